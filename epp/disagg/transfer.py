"""What it takes to send the KV of a prompt from one worker to another: an estimate that learns.

In: tokens, and where the two workers are; later, how long a first token took. Out: seconds. The start value is bytes
per token over the bandwidth; each paired request's first token moves a factor on it, in small bounded steps on a log
scale. Workers of one host or rack are nearer, those of different zones farther.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from epp.endpoint import Endpoint, Floats

HOST = "kubernetes.io/hostname"
RACK = ("topology.kubernetes.io/rack", "rack")
ZONE = ("topology.kubernetes.io/zone", "zone")
SAME_HOST, SAME_RACK, OTHER_ZONE = 0.25, 0.7, 3.0
"""Factors on the seconds."""
BOUNDS = (0.02, 50.0)
GAIN = 0.1


class TransferModel:
    """Seconds of a transfer, learned over all pairs."""

    def __init__(self, bytes_per_token: float, bandwidth: float, start_s: float) -> None:
        """`bandwidth` in bytes a second, `start_s` what each transfer takes besides."""
        self._pace_s = bytes_per_token / bandwidth
        self._start_s = start_s
        self.factor = 1.0
        """What is learned: on the seconds per token."""
        self._near: tuple[tuple[Endpoint, ...], tuple[Endpoint, ...], Floats] | None = None

    def seconds(self, tokens: Floats, to: Sequence[Endpoint], source: Sequence[Endpoint]) -> Floats:
        """For each of `to` (rows) and `source` (columns); `tokens`, shape (to,) or (to, source), are to be sent."""
        near = self._nearness(tuple(to), tuple(source))
        sent = tokens[:, None] if tokens.ndim == 1 else tokens
        made: Floats = self._start_s + sent * (self._pace_s * self.factor) * near
        return made

    def observe(self, *, tokens: float, seconds: float) -> None:
        """A transfer of so many tokens seems to have taken so long, at equal nearness."""
        expected = tokens * self._pace_s
        if expected <= 0 or not math.isfinite(seconds):
            return
        implied = max(seconds - self._start_s, 0.05 * expected) / expected
        moved = self.factor * math.exp(GAIN * min(max(math.log(implied / self.factor), -1.5), 1.5))
        self.factor = min(max(moved, BOUNDS[0]), BOUNDS[1])

    def _nearness(self, to: tuple[Endpoint, ...], source: tuple[Endpoint, ...]) -> Floats:
        """Factors, shape (to, source); kept as long as the candidates are the same."""
        if self._near is None or self._near[0] != to or self._near[1] != source:
            factors = np.array([[_factor(a, b) for b in source] for a in to], dtype=np.float64)
            self._near = (to, source, factors.reshape(len(to), len(source)))
        return self._near[2]


def _factor(a: Endpoint, b: Endpoint) -> float:
    if a.host == b.host or _same(a, b, (HOST,)):
        return SAME_HOST
    if _same(a, b, RACK):
        return SAME_RACK
    zones = [next((e.labels[key] for key in ZONE if key in e.labels), "") for e in (a, b)]
    return OTHER_ZONE if all(zones) and zones[0] != zones[1] else 1.0


def _same(a: Endpoint, b: Endpoint, keys: Sequence[str]) -> bool:
    return any(key in a.labels and a.labels[key] == b.labels.get(key) for key in keys)
