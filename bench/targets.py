"""What the figures should be: held against a run, so that its table and its JSON say what is met.

In: figures. Out: the same with `target` (text) and `met` on those that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epp.figures import Figure


@dataclass(frozen=True, slots=True)
class Target:
    """The figure's `value`, or its `ratio`, is at most this."""

    at_most: float
    of: str = "value"


TARGETS = {
    "end_to_end/200B/gateway/kvsteer/picker_cpu": Target(2.0, "ratio"),
    "end_to_end/400KB/fast/kvsteer/picker_cpu": Target(1.5, "ratio"),
    "end_to_end/400KB/gateway/kvsteer/picker_cpu": Target(1.5, "ratio"),
    "end_to_end/400KB/fast/kvsteer/envoy_and_picker_cpu": Target(1000),
    "end_to_end/400KB/gateway/kvsteer/envoy_and_picker_cpu": Target(1000),
    "end_to_end/stream/gateway/kvsteer/picker_cpu_per_message": Target(15),
    "exchange/response chunk": Target(15),
    "tokens/tiktoken, warm turn": Target(1000),
    "tokens/tokenizers, warm turn": Target(1000),
    "scheduler/six, 544 endpoints, 6 scorers": Target(500),
    "kv/memory per block and endpoint, 64 endpoints": Target(64),
    "index/store, a block of a 64-block event": Target(2),
    "index/store, a single-block event": Target(10),
    "index/match, warm turn, 64 endpoints, 1 M blocks": Target(100),
    "index/memory per block with the map of engine hashes, 64 endpoints, 10 M blocks": Target(64),
}


def judged(figures: Sequence[Figure]) -> list[Figure]:
    """Figures with their targets; a ratio that could not be taken leaves its target open (`met` is None)."""
    out = []
    for figure in figures:
        target = TARGETS.get(figure["name"])
        if target is not None:
            seen = figure[target.of]
            met = None if seen is None else seen <= target.at_most
            figure = {**figure, "target": f"{target.of} <= {target.at_most:g}", "met": met}
        out.append(figure)
    return out
