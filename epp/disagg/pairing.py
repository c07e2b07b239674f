"""The search for the pair that gives a request its first token soonest. Pure.

In: seconds for each decode candidate alone, for each prefill candidate, and for the way between each two. Out: the best
of both, and what the best alone would take. All pairs are looked at up to `WHOLE` candidates a side; beyond, those that
are best by themselves.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.endpoint import Floats, Mask

WHOLE = 64
"""Candidates of one side among which every pair is looked at."""


class Choice(msgspec.Struct, frozen=True):
    """Rows of the best pair (`prefill` -1: decode alone is better), and the seconds of both ways."""

    decode: int
    prefill: int
    pair_s: float
    """inf: no pair is possible."""
    alone_s: float
    alone: int
    """Row of the best decode candidate alone."""


def choose(alone_s: Floats, prefill_s: Floats, between_s: Floats, *, possible: Mask, gain_s: float) -> Choice:
    """The soonest way. `alone_s`: shape (decode,), seconds with the prompt computed where it is decoded, harm to others
    included; `prefill_s`: shape (prefill,), seconds until the prompt is computed there; `between_s`: shape (decode,
    prefill), seconds from then to the first token; `possible`: shape (decode, prefill). A pair has to gain `gain_s`.
    """
    alone = int(np.argmin(alone_s))
    rows, columns = _best(np.min(np.where(possible, between_s, np.inf), axis=1, initial=np.inf)), _best(prefill_s)
    totals = np.where(possible, between_s + prefill_s, np.inf)
    if len(rows) < len(alone_s) or len(columns) < len(prefill_s):
        totals = totals[np.ix_(rows, columns)]
    if not totals.size:
        return Choice(alone, -1, np.inf, float(alone_s[alone]), alone)
    row, column = divmod(int(np.argmin(totals)), totals.shape[1])
    pair_s = float(totals[row, column])
    if not pair_s + gain_s <= alone_s[alone]:
        return Choice(alone, -1, pair_s, float(alone_s[alone]), alone)
    return Choice(int(rows[row]), int(columns[column]), pair_s, float(alone_s[alone]), alone)


def _best(seconds: Floats) -> NDArray[np.intp]:
    """Rows of the `WHOLE` least, all of them where there are no more, in their order."""
    if len(seconds) <= WHOLE:
        return np.arange(len(seconds))
    return np.sort(np.argpartition(seconds, WHOLE)[:WHOLE])
