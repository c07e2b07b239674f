"""The contract between what replicas share and the plugins that know which blocks lie where.

A plugin that has `learners()` is asked after each pick what the pick taught it, is told of others' picks, and gives and
takes snapshots. Each learner has a name of its own; the same name at another replica stands for keys of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from epp.endpoint import Endpoint
from epp.kvcache.blocks import Keys
from epp.kvcache.tier import Tier
from epp.request import InferenceRequest

End = Callable[[float], None]
"""To be called once, with the time, when a pick is over."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks that an endpoint is believed to hold."""

    endpoint: Endpoint
    keys: Keys
    tier: Tier | None = None
    """None: `keys` are a prompt's, from its first; otherwise blocks in any order on this tier."""
    group: int = 0


class Learner(Protocol):
    """Knows blocks by endpoint. Times are seconds of the picker's clock."""

    @property
    def name(self) -> str: ...

    def taught(self, request: InferenceRequest) -> Sequence[Keys]:
        """Keys of the prompts of a request that was picked for just now; whole chains from the first block on."""

    def learn(self, endpoint: Endpoint, keys: Keys, now: float) -> End | None:
        """Another replica sent a prompt with these keys there. What is to be called when that request is over."""

    def known(self) -> Iterator[list[Holding]]:
        """All that is known, in lots of some milliseconds' work; between two of them anything may change.

        An endpoint's chains come in one lot, those used longest ago first.
        """

    def believe(self, holding: Holding, now: float) -> bool:
        """Take over what another replica knew, or this one before its restart. False: not yet, try again."""


@runtime_checkable
class Shares(Protocol):
    """A plugin with something to share."""

    def learners(self) -> Sequence[Learner]: ...
