"""What one decision costs: CPU time of making the candidates and of `Scheduler.schedule`, printed as JSON.

    python bench/scheduler_micro.py

`framework` is the decision with scorers that only hand out a ready array, so what is left is the scheduler's own cost;
`default` is the built-in configuration, producers included; `six` is six scorers over the field's largest fleet.
Microseconds of CPU time (thread clock), the best of several rounds: other load on the machine adds, never takes away.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random

import numpy as np

from epp.config import PickerConfig, load_default, read
from epp.endpoint import Candidates, Endpoint, Pool
from epp.plugin import Floats, InferenceRequest, NoParameters, Scorer
from epp.registry import Registry, default_registry
from epp.request import Api
from epp.scheduler import Scheduler

ROUNDS = 15
SIX = (
    "queue-scorer",
    "running-requests-size-scorer",
    "kv-cache-utilization-scorer",
    "load-aware-scorer",
    "active-request-scorer",
    "token-load-scorer",
)


class Ready(Scorer[NoParameters]):
    """Hands out one array, again and again."""

    type = "ready"
    scores: Floats = np.zeros(0)

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        return self.scores


Ready.__module__ = "scorers.ready"  # so that it runs inline, as a shipped one does


def main() -> None:
    """Measure and print."""
    results = []
    for name, config, endpoints, target in (
        ("framework: 16 endpoints, 2 scorers", _config("ready", "ready"), 16, 40.0),
        ("framework: 544 endpoints, 6 scorers", _config(*["ready"] * 6), 544, None),
        ("default: 16 endpoints", load_default(), 16, None),
        ("default: 544 endpoints", load_default(), 544, None),
        ("six: 544 endpoints, 6 scorers", _config(*SIX), 544, 500.0),
    ):
        pool = _pool(endpoints)
        Ready.scores = np.linspace(0, 1, endpoints)
        scheduler = Scheduler(config, random=Random(1))
        request = InferenceRequest("r", Api.CHAT, "m", "m", prompts=(b"x" * 4000,), prompt_tokens=1000)

        def decide(scheduler: Scheduler = scheduler, request: InferenceRequest = request, pool: Pool = pool) -> None:
            scheduler.schedule(request, pool.candidates(100.0), 0.0)

        value = _microseconds(decide)
        result = {"name": name, "value": round(value, 1), "unit": "us CPU"}
        results.append(
            result if target is None else {**result, "ratio": round(value / target, 2), "to": f"{target} us"}
        )
    print(json.dumps(results, indent=2))


def _config(*types: str) -> PickerConfig:
    entries = ", ".join(f"{{type: {name}, name: s{i}}}" for i, name in enumerate(types))
    text = f"{{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, plugins: [{entries}]}}"
    return read(text, registry=Registry([*default_registry().classes(), Ready]))


def _pool(count: int) -> Pool:
    random, pool = Random(1), Pool(Endpoint(f"10.0.{i // 250}.{i % 250}", 8000) for i in range(count))
    for endpoint in pool.endpoints:
        for column in ("waiting", "running", "kv_usage"):
            endpoint.set(column, random.random())
        endpoint.set("scraped_at", 100.0)
        endpoint.count(requests=random.randrange(8), tokens=random.randrange(100_000))
    return pool


def _microseconds(function: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started, calls = time.thread_time(), 0
        while (spent := time.thread_time() - started) < 0.02:
            for _ in range(10):
                function()
            calls += 10
        best = min(best, spent / calls * 1e6)
    return best


if __name__ == "__main__":
    main()
