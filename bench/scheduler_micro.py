"""What one decision costs: CPU time of making the candidates and of `Scheduler.schedule`.

`framework` is the decision with scorers that only hand out a ready array, so what is left is the scheduler's own cost;
`default` is the built-in configuration, producers included; `six` is six scorers over the field's largest fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from bench.timing import cpu_us
from epp.config import PickerConfig, load_default, read
from epp.endpoint import ROLE_LABEL, Candidates, Endpoint, Pool
from epp.figures import Figure, figure
from epp.plugin import Floats, InferenceRequest, NoParameters, Scorer
from epp.registry import Registry, default_registry
from epp.request import Api
from epp.scheduler import Scheduler

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


def figures() -> list[Figure]:
    out = []
    for name, config, endpoints in (
        ("framework, 16 endpoints, 2 scorers", _config("ready", "ready"), 16),
        ("framework, 544 endpoints, 6 scorers", _config(*["ready"] * 6), 544),
        ("default, 16 endpoints", load_default(), 16),
        ("default, 544 endpoints", load_default(), 544),
        ("six, 544 endpoints, 6 scorers", _config(*SIX), 544),
    ):
        pool = make_pool(endpoints)
        Ready.scores = np.linspace(0, 1, endpoints)
        scheduler = Scheduler(config, random=Random(1))
        request = InferenceRequest("r", Api.CHAT, "m", "m", prompts=(b"x" * 4000,), prompt_tokens=1000)

        def decide(scheduler: Scheduler = scheduler, request: InferenceRequest = request, pool: Pool = pool) -> None:
            scheduler.schedule(request, pool.candidates(100.0), 0.0)

        out.append(figure(f"scheduler/{name}", cpu_us(decide), "us"))
    out.append(figure("scheduler/pairs, 64 prefill x 64 decode endpoints", cpu_us(_pairing()), "us"))
    return out


PAIRS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: prefill-filter}, {type: decode-filter}, {type: disagg-profile-handler}]
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""


def _pairing() -> Callable[[], object]:
    """A decision between all pairs, filters, estimates and record included."""
    pool = make_pool(128)
    for i, endpoint in enumerate(pool.endpoints):
        endpoint.labels = {ROLE_LABEL: "prefill" if i < 64 else "decode"}
    scheduler = Scheduler(read(PAIRS), random=Random(1))
    request = InferenceRequest("r", Api.CHAT, "m", "m", prompts=(b"x" * 40_000,), prompt_tokens=10_000)
    return lambda: scheduler.schedule(request, pool.candidates(100.0), 0.0)


def _config(*types: str) -> PickerConfig:
    entries = ", ".join(f"{{type: {name}, name: s{i}}}" for i, name in enumerate(types))
    text = f"{{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, plugins: [{entries}]}}"
    return read(text, registry=Registry([*default_registry().classes(), Ready]))


def make_pool(count: int) -> Pool:
    """Endpoints with gauges and counts of their own."""
    random, pool = Random(1), Pool(Endpoint(f"10.0.{i // 250}.{i % 250}", 8000) for i in range(count))
    for endpoint in pool.endpoints:
        for column in ("waiting", "running", "kv_usage"):
            endpoint.set(column, random.random())
        endpoint.set("scraped_at", 100.0)
        endpoint.block_size, endpoint.cache_blocks = 16, 100_000
        endpoint.count(requests=random.randrange(8), tokens=random.randrange(100_000))
    return pool
