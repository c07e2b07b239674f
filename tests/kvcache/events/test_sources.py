"""Where a worker publishes is read from what it tells, but always on its own host."""

from __future__ import annotations

import msgspec
import pytest

from epp.kvcache.events.sources import Source, configured, told


def test_ranks_publish_on_consecutive_ports() -> None:
    assert configured("10.0.0.1", 3, 5557, 6557) == Source("tcp://10.0.0.1:5560", "tcp://10.0.0.1:6560")
    assert configured("fd00::1", 0, 5557, None) == Source("tcp://[fd00::1]:5557", "")


@pytest.mark.parametrize(
    "answer",
    [
        {
            "0": {"endpoint": "tcp://*:1", "replay_endpoint": None},
            "2": {"endpoint": "tcp://*:7", "replay_endpoint": "tcp://h:8"},
        },
        [{"data_parallel_rank": 2, "endpoint": "tcp://[::]:7", "replay_endpoint": "tcp://1.2.3.4:8"}],
        {"0": {"endpoint": "tcp://evil.example:7", "replay_endpoint": "tcp://evil.example:8"}},
    ],
)
def test_a_worker_tells_its_ports_by_rank_and_nothing_else_of_it_counts(answer: object) -> None:
    assert told(msgspec.json.encode(answer), "10.0.0.1", 2) == Source("tcp://10.0.0.1:7", "tcp://10.0.0.1:8")


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"{}", b"[]", b"null", b"[1]", b"{", b"[" * 100_000, b'{"0": 1}', b'{"0": {"endpoint": "ipc://x"}}',
        b'{"0": {"endpoint": "tcp://*:0"}}', b'{"0": {"endpoint": "tcp://*:99999"}}', b'{"0": {"endpoint": 5}}',
        b'{"0": {"endpoint": "tcp://*:5"}, "1": {"endpoint": "tcp://*:6"}}',
    ],
)  # fmt: skip
def test_an_answer_that_names_no_publisher_of_the_rank_is_none(answer: bytes) -> None:
    assert told(answer, "10.0.0.1", 2) is None
