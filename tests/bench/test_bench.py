"""The bench's own parts: bodies, CPU reading, the JSON form, the merged bootstrap, and a run of its cheapest part."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from bench import load
from bench.backend import TICK_S, Connection
from bench.bodies import Conversation, small
from bench.cpp_server import CannotBuild, build
from bench.cpu import cpu_seconds
from bench.stack import CPP, LEAN, NONE, PROFILES, envoy_config
from bench.table import tables
from bench.targets import judged
from bench.timing import cpu_us
from epp.figures import figure, percentile, write


def test_a_turn_keeps_all_bytes_of_the_conversation_before_it() -> None:
    conversation = Conversation(1, 20_000, tools=2)
    before, after = conversation.body(0, 3), conversation.body(0, 4)
    assert len(before) > 20_000
    messages = [json.loads(body)["messages"] for body in (before, after)]
    assert messages[1][: len(messages[0])] == messages[0]
    assert after.startswith(before[:-50])  # all but what follows the messages
    assert 3_000 < len(after) - len(before) < 5_000


def test_branches_of_a_conversation_share_its_beginning_alone() -> None:
    conversation = Conversation(1, 20_000, tools=2)
    base, one, other = (json.loads(conversation.body(b, t))["messages"] for b, t in ((0, 0), (1, 1), (2, 1)))
    assert one[: len(base)] == other[: len(base)] == base
    assert one[len(base) :] != other[len(base) :]


def test_small_bodies_have_about_200_bytes() -> None:
    assert {len(small(seed)) for seed in range(50)} == {len(small(0))}
    assert 180 <= len(small(0)) <= 220


def test_cpu_of_a_process_is_counted_and_sleep_is_not() -> None:
    begin, clock = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - clock < 0.05:
        pass
    spent = cpu_seconds(os.getpid()) - begin
    assert 0.04 < spent < 5  # other threads of the test process may have run


def test_without_schedstat_the_ticks_of_stat_are_read(tmp_path: Path) -> None:
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    fields = ["S", *["0"] * 10, "150", "50", *["0"] * 30]
    (tmp_path / "7" / "stat").write_text(f"7 (a (b) c) {' '.join(fields)}")
    assert cpu_seconds(7, tmp_path) == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))


def test_schedstat_of_all_threads_is_summed(tmp_path: Path) -> None:
    for thread, nanoseconds in ((7, 1_500_000_000), (8, 500_000_000)):
        (tmp_path / "7" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(thread) / "schedstat").write_text(f"{nanoseconds} 99 1\n")
    assert cpu_seconds(7, tmp_path) == pytest.approx(2.0)


def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([], 0.5) == 0.0


def test_figures_are_written_in_one_form(tmp_path: Path) -> None:
    write(tmp_path / "new" / "f.json", [figure("a", 1.0, "us"), figure("b", 3.0, "us", ratio=3.0, to="a")])
    assert json.loads((tmp_path / "new" / "f.json").read_text()) == [
        {"name": "a", "value": 1.0, "unit": "us", "ratio": None, "to": None},
        {"name": "b", "value": 3.0, "unit": "us", "ratio": 3.0, "to": "a"},
    ]


def test_a_target_is_held_against_the_value_or_the_ratio_and_stays_open_without_one() -> None:
    name = "end_to_end/200B/gateway/kvsteer/picker_cpu"
    seen = judged([figure(name, 5.0, "us", ratio=2.5, to="x"), figure(name, 5.0, "us"), figure("other", 1.0, "us")])
    assert [f.get("met", "none") for f in seen] == [False, None, "none"]
    assert seen[0]["target"] == "ratio <= 2"
    assert [f["met"] for f in judged([figure("exchange/response chunk", 14.0, "us")])] == [True]


def test_tables_are_made_of_whatever_was_measured() -> None:
    through = [figure(f"end_to_end/200B/fast/{server}/envoy_cpu", 1.0, "us") for server in (NONE, LEAN)]
    assert [t.row_count for t in tables(through)] == [1]
    assert [t.row_count for t in tables([*through, figure("api/x", 1.0, "us")])] == [1, 1]


def test_the_cost_of_a_call_is_seen_to_grow_with_its_work() -> None:
    few, many = (cpu_us(lambda n=n: sum(range(n)), rounds=5, round_s=0.002) for n in (1_000, 20_000))  # type: ignore[misc]
    assert many > 5 * few


def test_all_listeners_are_the_product_s_own_and_differ_in_the_server_alone(tmp_path: Path) -> None:
    ports = {(s, p): 20_000 + i for i, (s, p) in enumerate((s, p) for s in (NONE, CPP, LEAN) for p in PROFILES)}
    tree = yaml.safe_load(envoy_config(tmp_path, ["127.0.0.1:1000", "127.0.0.1:1001"], ports, 19_999))
    resources = tree["static_resources"]
    seen = {}
    for listener in resources["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        filters = [f["typed_config"] for f in manager["http_filters"] if f["name"].endswith("ext_proc")]
        seen[listener["name"]] = [f["grpc_service"]["envoy_grpc"]["cluster_name"] for f in filters]
        assert not any(f["failure_mode_allow"] for f in filters)
    assert seen == {f"{s}-{p}": [f"picker-{s}"] if s != NONE else [] for s, p in ports}
    assert {c["name"] for c in resources["clusters"]} >= {"pool", "picker-cpp", "picker-kvsteer"}


def test_without_a_compiler_the_reason_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match=r"no g\+\+.*apt-get install .*libgrpc\+\+-dev"):
        build(tmp_path / "built")


async def _serving() -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)


async def test_the_load_generator_counts_whole_answers_with_length_and_streamed() -> None:
    async with await _serving() as server:
        port = server.sockets[0].getsockname()[1]
        plain = await load.run(port, [lambda: small(1)] * 2, 0.05)
        streamed = await load.run(port, [lambda: b"x" * 100_000], 0.0, chunks=5)
    assert len(plain.latencies) >= 2
    assert len(streamed.latencies) == 1
    assert streamed.latencies[0] >= 5 * TICK_S * 0.9


async def test_an_answer_other_than_200_ends_the_run() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(load.LoadError, match="503"):
            await load.run(server.sockets[0].getsockname()[1], [lambda: b"{}"], 1.0)


def test_the_backend_reads_bodies_that_come_chunked() -> None:
    async def ask() -> bytes:
        async with await _serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            for piece in (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\n{}\r\n", b"0\r\n", b"\r\n"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            answer = await reader.readuntil(b"\r\n")
            writer.close()
            return answer

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("only", "parts"),
    [
        ("micro", {"edge", "ext_proc", "api", "scheduler", "kv", "tokens", "events", "exchange"}),
        ("ext_proc", {"ext_proc"}),
    ],
)
def test_parts_can_be_measured_alone_and_leave_their_figures(only: str, parts: set[str], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "bench", "--quick", "--only", only, "--out", str(out)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert {f["name"].split("/")[0] for f in figures} >= parts
    assert all(f["value"] > 0 and f["unit"] in ("us", "ms", "B", "bytes", "MB") for f in figures)
    assert len({f["name"] for f in figures}) == len(figures)
    assert "By itself" in done.stdout
