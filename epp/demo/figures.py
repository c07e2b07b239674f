"""Figures of a replay.

In: replies. Out: a `Summary` of one policy; two of them compared, in the common form of `epp.figures`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epp.demo.agents import Reply
from epp.figures import Figure, figure, percentile


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy's replay. Times in seconds, shares 0..1."""

    policy: str
    requests: int
    failed: int
    per_worker: dict[str, int]
    prompt_tokens: int
    cached_share: float
    ttft_p50_s: float
    ttft_p90_s: float


def summarise(policy: str, replies: Sequence[Reply]) -> Summary:
    good = [r for r in replies if r.status == 200 and not r.error]
    prompt = sum(r.prompt_tokens for r in good)
    return Summary(
        policy=policy,
        requests=len(replies),
        failed=len(replies) - len(good),
        per_worker=dict(sorted(Counter(r.worker for r in good).items())),
        prompt_tokens=prompt,
        cached_share=sum(r.cached_tokens for r in good) / prompt if prompt else 0.0,
        ttft_p50_s=percentile([r.ttft_s for r in good], 0.5),
        ttft_p90_s=percentile([r.ttft_s for r in good], 0.9),
    )


def compare(new: Summary, base: Summary) -> list[Figure]:
    """All figures of two replays, the new one's with their ratio to the base."""
    out = []
    for summary in (base, new):
        for name, unit, value, reference in (
            ("requests", "requests", summary.requests, base.requests),
            ("failed", "requests", summary.failed, base.failed),
            ("cached_share", "share of prompt tokens", summary.cached_share, base.cached_share),
            ("ttft_p50", "s", summary.ttft_p50_s, base.ttft_p50_s),
            ("ttft_p90", "s", summary.ttft_p90_s, base.ttft_p90_s),
        ):
            against = summary is not base and reference
            out.append(
                figure(
                    f"{summary.policy}/{name}",
                    value,
                    unit,
                    ratio=value / reference if against else None,
                    to=f"{base.policy}/{name}" if against else "",
                )
            )
        out.extend(figure(f"{summary.policy}/requests/{w}", n, "requests") for w, n in summary.per_worker.items())
    return out
