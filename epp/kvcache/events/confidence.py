"""How far the index is to be believed about one worker, from what was received and from what its answers say.

In: breaks, losses and restarts of its event stream; after each response the cached tokens that the index predicted
against those the worker reports. Out: a level, and a factor 0..1 for scores. Without I/O.

    complete   every event since the worker's start (or its last clearing) was seen
    partial    some were lost, or may be as the stream was down: blocks may be missing, or gone without a word
    suspect    answers contradict: the worker had less than the index says
    none       nothing was ever heard

A prediction is contradicted when the worker had over a block less. It happens rightly now and then (a block is evicted
between pick and prefill), so it takes three to suspect a complete index, but one where losses are known. Four agreeing
answers make up for one contradiction; sixteen in a row make a partial index count as complete again.
"""

from __future__ import annotations

from enum import StrEnum

_DOUBT = {False: 3.0, True: 1.0}
"""Contradictions that make an index suspect, by whether something was lost."""
_MAX_DOUBT = 4.0
_RELIEF = 0.25
_HEALED = 16
_WEIGHT = 0.2
"""Of the newest answer in the share of predictions kept."""


class Level(StrEnum):
    COMPLETE = "complete"
    PARTIAL = "partial"
    SUSPECT = "suspect"
    NONE = "none"


_FACTORS = {Level.COMPLETE: 1.0, Level.PARTIAL: 0.9, Level.SUSPECT: 0.5, Level.NONE: 0.0}


class Verdict(StrEnum):
    """What one answer says about the prediction."""

    AGREED = "agreed"
    OVER = "over"
    UNDER = "under"


class Confidence:
    """Of one worker. It begins with nothing heard."""

    def __init__(self) -> None:
        self.kept = 1.0
        """Share of predicted cached tokens that were really cached, newer answers weighing more."""
        self._heard = False
        self._verified = False
        self._lost = False
        self._suspect = False
        self._doubt = 0.0
        self._agreed = 0

    @property
    def level(self) -> Level:
        if not self._heard:
            return Level.NONE
        if self._suspect:
            return Level.SUSPECT
        return Level.COMPLETE if self._verified and not self._lost else Level.PARTIAL

    @property
    def factor(self) -> float:
        """What a predicted match counts, 0..1; all of it while the index is complete."""
        level = self.level
        return 1.0 if level is Level.COMPLETE else _FACTORS[level] * self.kept

    def verified(self, *, yes: bool) -> None:
        """Whether nothing can have passed by: not so while the stream is down, nor after until it is seen to go on."""
        self._verified = yes

    def heard(self) -> None:
        """A batch was applied, or the worker answered that it has published none."""
        self._heard = True

    def lost(self) -> None:
        """Events were lost for good."""
        self._lost = True
        self._agreed = 0

    def fresh(self) -> None:
        """The worker holds nothing and everything from here on is seen: earlier losses do not matter any more."""
        self._lost = self._suspect = False
        self._doubt, self._agreed, self.kept = 0.0, 0, 1.0

    def observed(self, predicted: int, actual: int, tolerance: int) -> Verdict:
        """A response reported `actual` cached tokens; `tolerance` is the tokens of a block."""
        over = predicted - actual > tolerance
        if predicted > 0:
            share = 1.0 if not over else actual / predicted
            self.kept += _WEIGHT * (share - self.kept)
        if over:
            self._agreed = 0
            self._doubt = min(self._doubt + 1.0, _MAX_DOUBT)
            self._suspect = self._suspect or self._doubt >= _DOUBT[self._lost]
            return Verdict.OVER
        if actual - predicted > tolerance:
            self._agreed = 0
            return Verdict.UNDER
        if predicted > 0:  # agreeing that nothing is cached proves little
            self._agreed += 1
            self._doubt = max(self._doubt - _RELIEF, 0.0)
            self._suspect = self._suspect and self._doubt > 0
            if self._agreed >= _HEALED:
                self._lost = False
        return Verdict.AGREED
