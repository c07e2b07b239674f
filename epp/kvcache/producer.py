"""The approximate prefix producer: cached tokens per endpoint, from the history of this picker's own picks.

In: a request and its candidates; later the endpoint picked, and the one that served. Out: `candidates.cached_tokens`.
No worker is asked and no tokenizer needed: a block of text has four bytes a token, and counts as many tokens as the
model's learned rate says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from epp.kvcache.blocks import Keys, request_keys
from epp.kvcache.history import History
from epp.plugin import Candidates, Endpoint, Handle, InferenceRequest, Outcome, Producer, Range
from epp.request import BYTES_PER_TOKEN
from epp.shared.learning import Holding

MAX_ITEMS = 64
"""Prompts of one request that are looked up; the work of a request stays bounded, the rest counts as uncached."""
UNLIMITED = 1 << 31


@dataclass(frozen=True, slots=True)
class PrefixParameters:
    auto_tune: bool = True
    """Take block size and cache size from what the workers tell of their cache, where they do."""
    block_size_tokens: Annotated[int, Range(min=1, max=65_536)] = 16
    """Tokens per block, where no worker told its own."""
    max_prefix_blocks_to_match: Annotated[int, Range(min=0)] = 0
    """Leading blocks looked at; 0 = all of them, however long the prompt."""
    max_prefix_tokens_to_match: Annotated[int, Range(min=0)] = 0
    """The same in tokens; where set it wins."""
    lru_capacity_per_server: Annotated[int, Range(min=1)] = 31_250
    """Blocks an endpoint is taken to hold, where it did not tell."""
    max_index_megabytes: Annotated[int, Range(min=1)] = 512
    """Memory of the whole history; beyond it, what was used least recently anywhere is forgotten."""


@dataclass(slots=True)
class _Lookup:
    """A request's keys and what they matched, until it is over."""

    keys: list[Keys]
    matches: list[dict[Endpoint, int]]
    tokens: dict[Endpoint, list[int]]
    """Endpoint -> the history's token for each of `keys`."""
    tokens_of_text: float
    """Tokens that one nominal token of these keys stands for; see `_tokens_of_text`."""
    destination: Endpoint | None = None


class ApproxPrefixCache(Producer[PrefixParameters]):
    """Estimates the prompt tokens each endpoint has cached, from the requests that were sent there before.

    Block keys chain over model or adapter, cache salt, tools, system and prompt; the longest leading match counts. Each
    endpoint forgets like its own cache does, least recently used first. A list of prompts counts the sum over its items
    (the first 64). When another endpoint served than the one picked, or the request failed, the history is corrected.
    """

    type = "approx-prefix-cache-producer"
    Parameters = PrefixParameters
    writes = ("cached_tokens",)
    ignored_parameters: ClassVar[Mapping[str, str]] = {
        "blockSize": "it counted characters; set blockSizeTokens",
        "hashBlockSize": "it counted characters; set blockSizeTokens",
    }

    def __init__(self, parameters: PrefixParameters, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self.history: History[Endpoint] = History(parameters.max_index_megabytes << 20)
        self._tuned_block_size: int | None = None

    def produce(self, request: InferenceRequest, candidates: Candidates) -> None:
        if not request.prompts:
            return
        p = self.parameters
        block_size = self._block_size(candidates)
        limit = p.max_prefix_tokens_to_match // block_size or p.max_prefix_blocks_to_match or UNLIMITED
        keys = request_keys(request, block_size, limit=limit, max_items=MAX_ITEMS)
        lookup = _Lookup(keys, [self.history.match(k) for k in keys], {}, _tokens_of_text(request))
        request.attributes[self.name] = lookup
        if any(lookup.matches):
            pool = candidates.pool
            by_row = [0] * len(pool)
            for matched in lookup.matches:
                for endpoint, blocks in matched.items():
                    if endpoint.pool is pool:
                        by_row[endpoint.row] += blocks
            cached = np.array(by_row)[candidates.rows] * (block_size * lookup.tokens_of_text)
            candidates.cached_tokens = np.minimum(cached, request.prompt_tokens)

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        lookup = request.attributes.get(self.name)
        if isinstance(lookup, _Lookup):
            lookup.destination = endpoints.get("decode") or next(iter(endpoints.values()), None)
            for endpoint in set(endpoints.values()):
                self._insert(lookup, endpoint)

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        lookup = request.attributes.pop(self.name, None)
        if not isinstance(lookup, _Lookup) or lookup.destination is None:
            return
        served: Endpoint | None = endpoint
        if outcome.served not in ("", endpoint.address):
            served = endpoint.pool.served_by(outcome.served, endpoint) if endpoint.pool is not None else None
        failed = (outcome.status or 200) >= 400
        if failed or served is not lookup.destination:
            self._retract(lookup, lookup.destination)
        if not failed and served is not None and served is not lookup.destination:
            self._insert(lookup, served)

    def removed(self, endpoint: Endpoint) -> None:
        self.history.remove(endpoint)

    # What replicas of the picker share (`epp.shared.learning`)

    def learners(self) -> Sequence[ApproxPrefixCache]:
        return (self,)

    def taught(self, request: InferenceRequest) -> Sequence[Keys]:
        lookup = request.attributes.get(self.name)
        return lookup.keys if isinstance(lookup, _Lookup) else ()

    def learn(self, endpoint: Endpoint, keys: Keys, now: float) -> None:
        del now
        self.history.insert(endpoint, keys, self._capacity(endpoint))

    def known(self) -> Iterator[list[Holding]]:
        for endpoint in self.history.endpoints():
            yield [Holding(endpoint, keys) for keys in self.history.chains(endpoint)]

    def believe(self, holding: Holding, now: float) -> bool:
        self.learn(holding.endpoint, holding.keys, now)
        return True

    def _insert(self, lookup: _Lookup, endpoint: Endpoint) -> None:
        if endpoint.pool is None:
            return
        capacity = self._capacity(endpoint)
        capacity = max(int(capacity / lookup.tokens_of_text), 1)
        lookup.tokens[endpoint] = [self.history.insert(endpoint, keys, capacity) for keys in lookup.keys]

    def _retract(self, lookup: _Lookup, endpoint: Endpoint) -> None:
        tokens = lookup.tokens.get(endpoint)
        if tokens:
            for keys, matched, token in zip(lookup.keys, lookup.matches, tokens, strict=True):
                self.history.retract(endpoint, keys, token, keep=matched.get(endpoint, 0))

    def _block_size(self, candidates: Candidates) -> int:
        """The first block size that a worker told; it then stays, so that keys stay comparable."""
        if self.parameters.auto_tune and self._tuned_block_size is None:
            self._tuned_block_size = next((e.block_size for e in candidates if e.block_size), None)
        return self._tuned_block_size or self.parameters.block_size_tokens

    def _capacity(self, endpoint: Endpoint) -> int:
        """Blocks of our size that fit the endpoint's cache."""
        p = self.parameters
        if p.auto_tune and endpoint.cache_blocks and endpoint.block_size:
            ours = self._tuned_block_size or p.block_size_tokens
            return max(endpoint.cache_blocks * endpoint.block_size // ours, 1)
        return p.lru_capacity_per_server


def _tokens_of_text(request: InferenceRequest) -> float:
    """Blocks of text hold `BYTES_PER_TOKEN` bytes a token; a model with more bytes a token has fewer tokens in them."""
    return 1.0 if request.tokens_exact else BYTES_PER_TOKEN / request.bytes_per_token
