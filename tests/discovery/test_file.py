"""Endpoints from a file: what it may say, what is refused, and what happens when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epp.discovery.file import EndpointFileError, FileDiscovery, load
from epp.discovery.membership import Membership
from epp.endpoint import Pool

ONE = "endpoints: [{address: 10.0.0.1, ports: 8000}]\n"
TWO = "endpoints: [{address: 10.0.0.1, ports: 8000}, {address: 10.0.0.2, ports: 8000}]\n"


def write(path: Path, text: str) -> None:
    """Put a new file in its place in one stroke."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[tuple[Pool, FileDiscovery]]:
    pool = Pool()
    source = FileDiscovery(path, poll_s=0.005)
    members = Membership(pool, clock=lambda: 100.0)
    await members.start([source])
    try:
        yield pool, source
    finally:
        await members.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def test_an_entry_says_address_ports_name_role_engine_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("""
endpoints:
  - address: 10.0.0.1
    ports: 8000-8001
    name: w0
    role: prefill
    engine: sglang
    labels: {zone: a}
  - address: "fd00:0::1"
    ports: [8000, 9000-9001]
""")
    specs = load(path)
    assert [(s.host, s.port, s.rank, s.name) for s in specs] == [
        ("10.0.0.1", 8000, 0, "w0-rank-0"),
        ("10.0.0.1", 8001, 1, "w0-rank-1"),
        ("fd00::1", 8000, 0, ""),
        ("fd00::1", 9000, 1, ""),
        ("fd00::1", 9001, 2, ""),
    ]
    assert specs[0].labels == {"zone": "a", "llm-d.ai/role": "prefill", "llm-d.ai/engine-type": "sglang"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: endpoints: is required"),
        ("- 1", "1: endpoints: is required"),
        ("endpoints: 3", "1: endpoints: must be a list, got 3"),
        ("endpoints: []\nendpoint: []", "2: endpoint: unknown key; did you mean 'endpoints'?"),
        ("endpoints:\n- {address: 10.0.0.1}", "2: endpoints[0].ports: is required"),
        ("endpoints:\n- address: worker\n  ports: 1", "2: endpoints[0].address: 'worker' is not an IP address"),
        ("endpoints:\n- address: 10.0.0.1\n  ports: x", "3: endpoints[0].ports: 'x' is not a port"),
        ("endpoints:\n- address: 10.0.0.1\n  ports: true", "3: endpoints[0].ports: 'True' is not a port"),
        ("endpoints:\n- address: 10.0.0.1\n  ports: []", "3: endpoints[0].ports: must name at least one port"),
        ("endpoints:\n- address: 10.0.0.1\n  ports: [1, 1]", "3: endpoints[0].ports: a port is given twice"),
        ("endpoints:\n- address: 10.0.0.1\n  ports: 1\n  port: 2", "4: endpoints[0].port: unknown key"),
        ("endpoints:\n- address: 10.0.0.1\n  ports: 1\n  role: x", "4: endpoints[0].role: the role 'x' is none of"),
        (
            "endpoints:\n- address: 10.0.0.1\n  ports: 1\n  labels: {a: 1}",
            "4: endpoints[0].labels.a: must be text, got 1",
        ),
        ("endpoints:\n- address: 10.0.0.1\n  ports: 1\n  address: x", "4: endpoints[0].address: is set twice"),
        (
            "endpoints:\n- {address: 10.0.0.1, ports: 1-2}\n- {address: 10.0.0.1, ports: 2}",
            "3: endpoints[1]: port 2 of 10.0.0.1 is already there on line 2",
        ),
        ("endpoints: [", "1: not YAML"),
    ],
)
def test_a_fault_is_named_by_file_line_and_path(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text)
    with pytest.raises(EndpointFileError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:{problem}")


def test_a_role_said_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints:\n- {address: 10.0.0.1, ports: 1, role: decode, labels: {llm-d.ai/role: prefill}}")
    with pytest.raises(EndpointFileError, match=r"the label llm-d\.ai/role says it too"):
        load(path)


def test_all_faults_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints:\n- {address: x, ports: 1}\n- {address: y, ports: 1}")
    with pytest.raises(EndpointFileError) as error:
        load(path)
    assert len(str(error.value).splitlines()) == 2


async def test_a_missing_or_wrong_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EndpointFileError, match=r"none\.yaml:1: cannot be read: No such file"):
        await FileDiscovery(tmp_path / "none.yaml").start(lambda specs: None)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    with pytest.raises(EndpointFileError, match="is not UTF-8 text"):
        await FileDiscovery(tmp_path / "bytes.yaml").start(lambda specs: None)


async def test_a_new_file_changes_the_pool_and_keeps_what_stayed(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    async with watching(path) as (pool, source):
        assert source.synced
        stayed = pool.endpoints[0]
        load_ = stayed.acquire(10, now=0.0)
        write(path, TWO)
        await until(lambda: len(pool) == 2)
        assert pool.by_key["10.0.0.1:8000"] is stayed
        assert stayed.in_flight == 1
        load_.release()
        write(path, ONE.replace("10.0.0.1", "10.0.0.3"))
        await until(lambda: [e.address for e in pool.endpoints] == ["10.0.0.3:8000"])


async def test_a_bad_new_file_is_refused_and_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(TWO)
    async with watching(path) as (pool, source):
        before = list(pool.endpoints)
        with caplog.at_level(logging.ERROR):
            write(path, TWO + "endpoint: 3\n")
            await until(lambda: source.counters["file_refused"] == 1)
        assert f"{path}:2: endpoint: unknown key" in caplog.text
        assert pool.endpoints == before
        path.unlink()
        await until(lambda: source.counters["file_refused"] == 2)
        assert pool.endpoints == before
        write(path, ONE)
        await until(lambda: len(pool) == 1)


async def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    async with watching(path) as (_, source):
        await asyncio.sleep(0.05)
        assert source.counters["file_loaded"] == 1


async def test_a_file_mounted_through_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    """A mounted ConfigMap is swapped by pointing a link at a new folder."""
    for version, text in (("v1", ONE), ("v2", TWO)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "endpoints.yaml").write_text(text)
    link = tmp_path / "data"
    link.symlink_to("v1")
    async with watching(link / "endpoints.yaml") as (pool, _):
        (tmp_path / "new").symlink_to("v2")
        os.replace(tmp_path / "new", link)
        await until(lambda: len(pool) == 2)


async def test_an_empty_list_is_a_valid_answer(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: []")
    async with watching(path) as (pool, source):
        assert (len(pool), source.synced) == (0, True)


def test_ranks_behind_a_port_are_read(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: [{address: 10.0.0.1, ports: 8000, dataParallelSize: 2}]\n")
    assert [(s.port, s.rank, s.ranks) for s in load(path)] == [(8000, 0, 2), (8000, 1, 2)]
    path.write_text("endpoints: [{address: 10.0.0.1, ports: 8000, dataParallelSize: 0}]\n")
    with pytest.raises(EndpointFileError, match=r"endpoints\[0\].dataParallelSize: '0' is not a number of"):
        load(path)
