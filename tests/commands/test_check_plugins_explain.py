"""The commands `check`, `plugins` and `explain`, as a person uses them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from epp.cli import main
from epp.config import default_text
from epp.explain import read
from epp.observe.decision_log import render
from epp.plugin import Outcome
from epp.registry import default_registry
from tests.pools import candidates, request
from tests.scheduler.faulty import GivingFilter, GivingScorer, scheduler


def run(*args: str, text: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, args, input=text)


def records(count: int = 1) -> list[dict[str, Any]]:
    pool = candidates(4)
    pool.expected_ttft = np.array([0.5, 0.25, 0.125, 1.0])
    GivingFilter.gives = [True, True, True, False]
    GivingScorer.gives = [0.5, float("nan"), 1.0]
    picker = scheduler("giving-filter", "giving-scorer", "row")
    made = []
    for i in range(count):
        asked = request(b"x" * 4000)
        asked.request_id = f"r{i}"
        decision = picker.schedule(asked, pool, at=1e9)
        outcome = Outcome(status=200, first_token_s=0.2, prompt_tokens=990, cached_tokens=640)
        made.append(json.loads(json.dumps(render(decision, outcome))))
    return made


# --- check ---


def test_check_prints_what_a_good_file_comes_to(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(default_text())
    result = run("check", str(path))
    assert result.exit_code == 0
    assert f"{path}: OK" in result.stdout
    assert "producers: approx-prefix-cache-producer, ttft-estimator" in result.stdout
    assert "expected-ttft-scorer x 10" in result.stdout


def test_check_prints_every_problem_of_every_file_and_exits_2(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(default_text())
    bad.write_text(default_text().replace("weight: 10", "weight: x").replace("kind:", "kint:"))
    result = run("check", str(bad), str(good), str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert f"{good}: OK" in result.stdout
    assert f'{bad}:14: schedulingProfiles[0].plugins[0].weight: must be a number, got "x"' in result.stderr
    assert f"{bad}:4: kint: unknown key; did you mean 'kind'?" in result.stderr
    assert "none.yaml:1: cannot be read: No such file or directory" in result.stderr


def test_check_prints_the_default_and_needs_something_to_do() -> None:
    assert run("check", "--print-default").stdout == default_text()
    assert run("check").exit_code == 2


# --- plugins ---


def test_plugins_lists_every_type_with_its_kind() -> None:
    result = run("plugins")
    assert result.exit_code == 0
    for cls in default_registry().classes():
        assert cls.type in result.stdout
    assert "round-robin-picker" in result.stdout


def test_plugins_describes_parameters_with_bounds_units_defaults_and_meaning() -> None:
    described = " ".join(run("plugins", "prefix-cache-affinity-filter").stdout.split())
    assert "affinityThreshold" in described
    assert "0.8" in described
    picker = run("plugins", "max-score-picker").stdout
    assert "int, 1..64" in picker
    assert "requests or tokens" in " ".join(run("plugins", "concurrency-detector").stdout.split())
    assert "ordered fallbacks" in picker
    assert "duration" in run("plugins", "ttft-estimator").stdout
    assert "also called by-label-selector" in run("plugins", "by-label-selector").stdout


@pytest.mark.parametrize("name", [cls.type for cls in default_registry().classes()])
def test_every_type_can_be_described(name: str) -> None:
    result = run("plugins", name)
    assert result.exit_code == 0
    assert name in result.stdout


def test_an_unknown_type_gets_a_suggestion() -> None:
    result = run("plugins", "max-scores-picker")
    assert result.exit_code == 2
    assert "did you mean 'max-score-picker'?" in result.stderr


# --- explain ---


def test_explain_shows_filters_scores_total_choice_estimate_and_outcome(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records(2)))
    result = run("explain", str(path))
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "10.0.0.1:8002" in line]
    assert "request r1" in rows[0]
    assert "-> 10.0.0.1:8002" in rows[0]
    assert "0.125" in rows[1]
    assert "1.667" in rows[1]
    assert "*" in rows[1]
    (out,) = [line for line in result.stdout.splitlines() if "10.0.0.1:8003" in line]
    assert "no" in out
    assert "giving-scorer: nan: for 1 of 3 candidates" in result.stdout
    told = " ".join(result.stdout.split())
    assert "expected 0 of 1000 prompt tokens cached first token in 0.125 s" in told
    assert "came out 640 of 990 prompt tokens cached first token in 0.200 s status 200" in told
    assert "plugin-fault:giving-scorer:nan" in result.stdout
    assert "request r0" in run("explain", str(path), "--id", "r0").stdout


@pytest.mark.parametrize("shape", ["lines", "list", "one", "wrapped"])
def test_explain_reads_standard_input_in_every_shape(shape: str) -> None:
    made = records(2)
    text = {
        "lines": "\n\n".join(map(json.dumps, made)),
        "list": json.dumps(made),
        "one": json.dumps(made[0]),
        "wrapped": json.dumps({"decisions": made}),
    }[shape]
    assert "request r0" in run("explain", "-", "--id", "r0", text=text).stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "line 1 is not JSON"), ("[1]", "entry 1 is not a decision"), ("", "no decision"), ("[" * 9999, "not JSON")],
)
def test_explain_says_what_is_wrong_with_its_input(text: str, problem: str) -> None:
    result = run("explain", "-", text=text)
    assert result.exit_code == 1
    assert problem in result.stderr


@pytest.mark.parametrize("damage", [{"profiles": [1]}, {"profiles": [{}]}, {"timing": 3}, {"estimate": [1]}])
def test_a_damaged_decision_is_an_error_and_no_traceback(damage: dict[str, Any]) -> None:
    result = run("explain", "-", text=json.dumps({**records()[0], **damage}))
    assert result.exit_code == 1
    assert "not a decision that this version can read" in result.stderr


def test_markup_in_names_is_shown_and_not_obeyed() -> None:
    (record,) = records()
    record["request_id"] = "[red]x[/red]"
    record["profiles"][0]["name"] = "[/]"
    result = run("explain", "-", text=json.dumps(record))
    assert result.exit_code == 0
    assert "request [red]x[/red]" in result.stdout


def test_an_ipv6_endpoint_is_shown_whole() -> None:
    text = json.dumps(records()[0]).replace("10.0.0.1:8002", "[fd00::1]:8002")
    shown = run("explain", "-", text=text).stdout
    assert len([line for line in shown.splitlines() if "[fd00::1]:8002" in line]) == 2  # the headline and its row


def test_a_narrow_terminal_breaks_the_names_of_scorers_and_cuts_none() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["explain", "-"], input=json.dumps(records()[0]))
    assert shown.exit_code == 0
    assert "\u2026" not in shown.stdout


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1: Connection refused"),
        ("none.jsonl", "none.jsonl: No such file or directory"),
        ("127.0.0.1:9090", "No such file or directory; an admin port is a URL"),
    ],
)
def test_explain_says_why_its_source_cannot_be_read(source: str, problem: str) -> None:
    result = run("explain", source)
    assert result.exit_code == 1
    assert problem in result.stderr
    assert "Errno" not in result.stderr


@pytest.fixture
def admin_port() -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = ("/debug/decisions", "/debug/decisions?limit=1&id=", "/debug/decisions?limit=1&id=r0")
            body = json.dumps(records()).encode() if self.path in asked else b"not here"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(10)


def test_explain_asks_the_admin_port(admin_port: int) -> None:
    result = run("explain", f"http://127.0.0.1:{admin_port}")
    assert "request r0" in result.stdout
    assert run("explain", f"http://127.0.0.1:{admin_port}/", "--id", "r0").exit_code == 0
    assert run("explain", f"http://127.0.0.1:{admin_port}/debug/decisions").exit_code == 0
    assert run("explain", f"http://127.0.0.1:{admin_port}/x").exit_code == 1


def test_a_decision_without_an_endpoint_is_explained_too() -> None:
    (record,) = records()
    record.update(endpoints=[], profiles=[])
    assert "no endpoint" in run("explain", "-", text=json.dumps(record)).stdout


def test_the_latest_decision_is_explained_whichever_way_they_are_ordered() -> None:
    made = [{**record, "at": float(i)} for i, record in enumerate(records(3))]
    for order in (made, made[::-1]):
        assert "request r2" in run("explain", "-", text=json.dumps(order)).stdout


def test_read_takes_an_empty_list() -> None:
    assert list(read("[]")) == []
