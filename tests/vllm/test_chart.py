"""The chart's workers: their arguments are ones that vLLM's own parser takes, and mean what they should there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import VALUES, containers, expanded, flavour
from tests.vllm.workers import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]

SCRIPT = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
names = ["port", "enable_prompt_tokens_details", "data_parallel_size", "data_parallel_size_local",
         "data_parallel_start_rank", "data_parallel_multi_port_external_lb", "enable_expert_parallel"]
for arguments in json.load(sys.stdin):
    found = parser.parse_args(arguments)
    values = {name: getattr(found, name) for name in names}
    values["kv_connector"] = getattr(found.kv_transfer_config, "kv_connector", None)
    values["kv_events"] = getattr(found.kv_events_config, "enable_kv_cache_events", None)
    values["speculative"] = found.speculative_config
    print(json.dumps(values, default=str))
"""


def parsed(arguments: list[list[str]]) -> list[dict[str, Any]]:
    """What vLLM makes of each list of arguments."""
    done = subprocess.run(
        [vllm_python(), "-c", SCRIPT], input=json.dumps(arguments), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def arguments_of(path: Path) -> list[list[str]]:
    """Of each worker; what the shell of a LeaderWorkerSet's pod adds is added."""
    return [
        [*expanded(worker), "--data-parallel-start-rank=8"] if "-c" in worker["command"] else expanded(worker)
        for worker in containers(flavour(path), "vllm")
    ]


def test_vllm_takes_the_arguments_of_every_worker_of_the_chart() -> None:
    asked = {path.stem: arguments_of(path) for path in VALUES}
    found = iter(parsed([arguments for each in asked.values() for arguments in each]))
    workers = {stem: [next(found) for _ in each] for stem, each in asked.items()}
    every = [worker for each in workers.values() for worker in each]
    assert len(every) >= 6
    assert all(worker["enable_prompt_tokens_details"] and worker["kv_events"] for worker in every)
    assert [worker["kv_connector"] for worker in workers["prefill-decode"]] == ["NixlConnector"] * 2
    assert sorted(worker["port"] for worker in workers["prefill-decode"]) == [8000, 8200]
    assert workers["tiered-cache"][0]["kv_connector"] == "OffloadingConnector"
    wide = workers["wide-ep"][0]
    assert (wide["data_parallel_size"], wide["data_parallel_size_local"], wide["data_parallel_start_rank"]) == (
        16,
        8,
        8,
    )
    assert wide["data_parallel_multi_port_external_lb"]
    assert wide["enable_expert_parallel"]
    assert "mtp" in str(workers["mtp"][0]["speculative"])
