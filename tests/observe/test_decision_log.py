"""The decision log: lines in a rotated file, recent ones in memory, and never in the way of serving."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

import epp.observe.decision_log as module
from epp.decision import Decision, Estimate
from epp.observe.decision_log import DecisionLog, LogFile
from epp.plugin import Outcome
from tests.pools import candidates, request
from tests.scheduler.faulty import scheduler


def decision(name: str = "r") -> Decision:
    return Decision(name, "m", "chat", 1e9, (), (), Estimate(10, 0))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_the_decision_and_its_outcome(tmp_path: Path) -> None:
    log = DecisionLog(LogFile(tmp_path / "d.jsonl"))
    made = scheduler("row").schedule(request(b"x" * 400), candidates(2), at=5.0)
    log.decided(made)
    log.finished(made, Outcome(status=200, cached_tokens=64))
    log.close()
    (line,) = lines(tmp_path / "d.jsonl")
    assert line["outcome"]["cached_tokens"] == 64
    assert {k: v for k, v in line.items() if k != "outcome"} == json.loads(json.dumps(made.as_dict()))
    assert (log.written, log.dropped) == (1, 0)


def test_recent_decisions_are_newest_first_bounded_and_show_outcomes_that_came(tmp_path: Path) -> None:
    log = DecisionLog(recent=3)
    made = [decision(f"r{i}") for i in range(5)]
    for each in made:
        log.decided(each)
    for each in made[:4]:
        log.finished(each, Outcome(status=200))
    recent = log.recent()
    assert [r["request_id"] for r in recent] == ["r4", "r3", "r2"]
    assert ["outcome" in r for r in recent] == [False, True, True]
    assert [r["request_id"] for r in log.recent(1)] == ["r4"]
    assert [r["request_id"] for r in log.recent(50, "r2")] == ["r2"]


def test_only_the_sampled_share_is_written(tmp_path: Path) -> None:
    log = DecisionLog(LogFile(tmp_path / "d.jsonl", sample=0.25), random=Random(1))
    for _ in range(1000):
        log.finished(decision())
    log.close()
    assert 200 < len(lines(tmp_path / "d.jsonl")) < 300


def test_the_file_is_rotated_by_size_and_a_bounded_number_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"request_id": "before"}\n')
    log = DecisionLog(LogFile(path, max_bytes=1000, files=3))
    for i in range(40):
        log.finished(decision(f"r{i}"))
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    kept = [line["request_id"] for name in ("d.jsonl.2", "d.jsonl.1", "d.jsonl") for line in lines(tmp_path / name)]
    assert kept == [f"r{i}" for i in range(40 - len(kept), 40)]
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())


def test_what_the_disk_cannot_take_is_dropped_and_counted_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, render = threading.Event(), module.render

    def slow(*args: Any) -> dict[str, Any]:
        go.wait(10)
        return render(*args)

    monkeypatch.setattr(module, "render", slow)
    log = DecisionLog(LogFile(tmp_path / "d.jsonl", queue_lines=10))
    for _ in range(100):
        log.finished(decision())
    dropped = log.dropped
    go.set()
    log.close()
    assert 88 <= dropped <= 90  # ten wait, and one may be in the thread's hands
    assert log.written == 100 - dropped


def test_a_path_that_cannot_be_written_fails_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        DecisionLog(LogFile(tmp_path / "nowhere" / "d.jsonl"))


def test_a_failing_rotation_drops_lines_and_goes_on_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rotate, failing = tmp_path / "d.jsonl", module.rotate, [True]

    def sometimes(file: LogFile) -> Any:
        if failing:
            failing.pop()
            raise OSError(28, "No space left on device")
        return rotate(file)

    monkeypatch.setattr(module, "rotate", sometimes)
    log = DecisionLog(LogFile(path, max_bytes=300, files=9))
    for i in range(10):
        log.finished(decision(f"r{i}"))
    log.close()
    assert log.dropped == 1
    assert log.written == 9


def test_a_full_disk_drops_every_line_once_and_ends_quietly(recwarn: pytest.WarningsRecorder) -> None:
    log = DecisionLog(LogFile(Path("/dev/full")))
    for i in range(100):
        log.finished(decision(f"r{i}"))
    log.close()
    assert (log.written, log.dropped) == (0, 100)
    assert not recwarn.list  # pytest warns of a thread that ended by an exception


def test_a_decision_that_cannot_be_written_costs_its_own_line_only(tmp_path: Path) -> None:
    log = DecisionLog(LogFile(tmp_path / "d.jsonl"))
    for name in ("a", "\ud800", "b"):
        log.finished(decision(name))
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "d.jsonl")] == ["a", "b"]
    assert (log.written, log.dropped) == (2, 1)
