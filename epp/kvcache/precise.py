"""The precise prefix producer: cached tokens per endpoint and tier, from what the workers themselves say they hold.

In: a request whose token ids are known, its candidates; the workers' KV events, through one follower each. Out:
`candidates.cached_tokens`, `cached_by_tier` and `restore_s`. The request's own blocks count as held at the endpoint it
is sent to from the pick on, for as long as it runs and a grace after it.

Nothing falls to zero in silence. Where a request's ids are not known, or a worker is not followed or not to be
believed, the approximate history of `ApproxPrefixCache` stands in, for that request or that worker, with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from epp.kvcache.blocks import Keys, block_extras, extend, token_root
from epp.kvcache.events.follower import Follower
from epp.kvcache.index import BlockIndex, Matches, Speculation
from epp.kvcache.producer import ApproxPrefixCache, PrefixParameters
from epp.kvcache.tier import Tier
from epp.plugin import Candidates, Endpoint, Floats, Handle, InferenceRequest, Outcome, Producer, Range, Unit
from epp.request import PlacedMedia, TokenPrompt
from epp.shared.learning import End, Holding, Learner

MAX_ITEMS = 64
"""Prompts of one request that are looked up, as for the approximate history."""

NOT_FOLLOWED = "kv-events-missing"
"""A reason: no worker's events are followed, the history scores."""
DISTRUSTED = "kv-events-distrusted"
"""A reason: for some candidate the history stands in, because its events were lost or contradicted."""

Rate = Annotated[float, Range(min=1), Unit("tokens/s")]


@dataclass(frozen=True, slots=True)
class Restore:
    """How fast KV comes back from a lower tier, in prompt tokens a second.

    Bandwidth over the model's KV bytes per token: 128 KiB a token (8B, grouped heads, 16 bits) over PCIe 5 at 26 GB/s
    are 200,000.
    """

    cpu: Rate = 200_000
    disk: Rate = 20_000
    peer: Rate = 50_000

    def seconds(self, tier: Tier, tokens: Floats) -> Floats:
        rate = {Tier.CPU: self.cpu, Tier.DISK: self.disk, Tier.PEER: self.peer}[tier]
        return tokens / rate


@dataclass(frozen=True, slots=True)
class PreciseParameters(PrefixParameters):
    """Those of the approximate history that stands in, and these."""

    max_precise_index_megabytes: Annotated[int, Range(min=1)] = 1024
    """Memory of the precise index; beyond it the blocks not stored or used for longest are forgotten."""
    min_confidence: Annotated[float, Range(min=0, max=1)] = 0.25
    """A worker believed less than this is scored by the history."""
    restore: Restore = field(default_factory=Restore)
    events_port: Annotated[int, Range(min=1, max=65_535)] | None = None
    """Port on which workers publish KV events (rank 0; rank n adds n); unset: each worker is asked (/kv_event_sources).
    """
    replay_port: Annotated[int, Range(min=1, max=65_535)] | None = None
    """Port of their replay sockets; unset with `eventsPort`: there is none."""
    bind: str = ""
    """ZeroMQ address to bind for workers that connect, such as tcp://*:5557, instead of dialling workers."""
    topic: str = ""
    """What topics on the bound address must begin with."""


@dataclass(slots=True)
class _Claim:
    """A prompt's keys at the endpoint it was sent to."""

    speculation: Speculation
    keys: Keys
    predicted: int
    """Cached tokens the index promised there, undiscounted."""


@dataclass(slots=True)
class _Lookup:
    """One request's keys and what the index said, until the request is over."""

    now: float
    adapter: str
    prompts: Sequence[TokenPrompt]
    keys: dict[int, list[Keys]]
    """Block size -> keys of each prompt."""
    predicted: dict[Endpoint, list[int]]
    """Endpoint -> cached tokens of each prompt."""
    claims: dict[Endpoint, list[_Claim]] = field(default_factory=dict)


class PrecisePrefixCache(Producer[PreciseParameters]):
    """Knows the prompt tokens each endpoint has cached, and on which tier, from its KV events and the prompt's ids.

    Needs an entry in `models` for the model, and workers that publish KV events. As vLLM counts: the leading blocks on
    the device, then those a connector finds on lower tiers; the last token is always computed. A match is discounted
    by the confidence in the worker's events; below `minConfidence`, without token ids or without events the
    approximate history scores. Lower tiers cost time (`restore`), which `ttft-estimator` adds.
    """

    type = "precise-prefix-cache-producer"
    Parameters = PreciseParameters
    writes = ("cached_tokens", "precise_match")
    ignored_parameters = ApproxPrefixCache.ignored_parameters

    def __init__(self, parameters: PreciseParameters, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self.index = BlockIndex(parameters.max_precise_index_megabytes << 20)
        self.followers: Mapping[Endpoint, Follower] = {}
        """Of the endpoints whose events are followed; whoever subscribes puts it here."""
        self.counters: Counter[str] = Counter(precise=0, history=0)
        """Requests scored by the index, and by the history alone."""
        self.history = ApproxPrefixCache(parameters, handle, f"{name}/history")

    def produce(self, request: InferenceRequest, candidates: Candidates) -> None:
        self.index.expire(candidates.now)
        self.history.produce(request, candidates)
        if not request.prompts:
            return
        known = [
            (row, f, size)
            for row, e in enumerate(candidates)
            if (f := self.followers.get(e)) is not None and (size := _block_size(f, e))
        ]
        if not request.tokens or not known:
            self.counters["history"] += 1
            if request.tokens:
                request.reasons.append(NOT_FOLLOWED)
            return
        self.counters["precise"] += 1
        lookup = _Lookup(candidates.now, request.adapter, request.tokens[:MAX_ITEMS], {}, {})
        request.attributes[self.name] = lookup
        self._match(request, candidates, known, lookup)

    def _match(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        known: list[tuple[int, Follower, int]],
        lookup: _Lookup,
    ) -> None:
        """Write what the index says into the candidates, for those whose worker is believed."""
        count = len(candidates)
        by_tier = np.zeros((len(Tier), count))
        by_tier[Tier.GPU] = candidates.cached_tokens
        distrusted = len(known) < count
        for size in {size for _, _, size in known}:
            rows = [row for row, _, own in known if own == size]
            followers = [f for _, f, own in known if own == size]
            trust = np.array([f.confidence.factor for f in followers])
            believed = trust >= self.parameters.min_confidence
            distrusted = distrusted or not believed.all()
            keys = lookup.keys[size] = [self._keys(request, i, p, size) for i, p in enumerate(lookup.prompts)]
            holders = [f.ledger.holder for f in followers]
            tokens = np.zeros((len(Tier), len(rows)))
            for prompt, chain in zip(lookup.prompts, keys, strict=True):
                matched = _tokens(self.index.match(chain, holders), size, len(prompt.ids))
                tokens += matched
                for row, total in zip(rows, matched.sum(axis=0).tolist(), strict=True):
                    lookup.predicted.setdefault(candidates[row], []).append(int(total))
            chosen = np.array(rows)[believed]
            by_tier[:, chosen] = (tokens * trust)[:, believed]
        if distrusted:
            request.reasons.append(DISTRUSTED)
        candidates.cached_by_tier = by_tier
        candidates.cached_tokens = np.minimum(by_tier.sum(axis=0), request.prompt_tokens)
        candidates.restore_s = sum(
            (self.parameters.restore.seconds(tier, by_tier[tier]) for tier in Tier if tier is not Tier.GPU),
            np.zeros(count),
        )

    def _keys(self, request: InferenceRequest, number: int, prompt: TokenPrompt, size: int) -> Keys:
        """Keys of a prompt's whole blocks. What an earlier turn shares with it is taken over from there."""
        root = token_root(model=request.base_model, adapter=request.adapter, salt="")
        media = request.token_media[number] if number < len(request.token_media) else ()
        extras = _extras(media, request.cache_salt, size)
        note = (size, root, request.cache_salt)
        before = None if media or prompt.earlier is None else prompt.earlier.get(note)
        if isinstance(before, np.ndarray) and len(before):
            held: Keys = before[: prompt.shared // size]
            if len(held):
                rest = extend(int(held[-1]), prompt.ids[len(held) * size :], size)
                keys = np.concatenate([held, rest])
                prompt.notes[note] = keys
                return keys
        keys = extend(root, prompt.ids, size, extras)
        if not media:
            prompt.notes[note] = keys
        return keys

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        self.history.picked(request, endpoints)
        lookup = request.attributes.get(self.name)
        if not isinstance(lookup, _Lookup):
            return
        for endpoint in set(endpoints.values()):
            follower = self.followers.get(endpoint)
            size = 0 if follower is None else _block_size(follower, endpoint)
            if follower is None or size not in lookup.keys:
                continue
            ledger = follower.ledger
            claims = lookup.claims[endpoint] = []
            promised = lookup.predicted[endpoint]
            for prompt, keys, predicted in zip(lookup.prompts, lookup.keys[size], promised, strict=True):
                ledger.sent(prompt.ids, keys, size, lookup.adapter)
                speculation = self.index.speculate(ledger.holder, keys, request.request_id, lookup.now)
                claims.append(_Claim(speculation, keys, predicted))
        lookup.prompts, lookup.keys = (), {}

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        self.history.finished(request, endpoint, outcome)
        lookup = request.attributes.pop(self.name, None)
        if not isinstance(lookup, _Lookup):
            return
        now = lookup.now + (outcome.duration_s or 0.0)
        failed = (outcome.status or 200) >= 400
        for picked, claims in lookup.claims.items():
            served = picked is endpoint and outcome.served in ("", endpoint.address)
            for claim in claims:
                if failed or not served:
                    self.index.contradict(claim.speculation)
                else:
                    self.index.finish(claim.speculation, now)
            follower = self.followers.get(picked)
            if (
                served
                and not failed
                and len(claims) == 1
                and follower is not None
                and outcome.cached_tokens is not None
            ):
                follower.observed(
                    claims[0].predicted, outcome.cached_tokens, now, keys=claims[0].keys, picked_at=lookup.now
                )

    def removed(self, endpoint: Endpoint) -> None:
        self.history.removed(endpoint)

    # What replicas of the picker share (`epp.shared.learning`)

    def learners(self) -> Sequence[Learner]:
        return (self.history, self)

    def taught(self, request: InferenceRequest) -> Sequence[Keys]:
        lookup = request.attributes.get(self.name)
        claims = next(iter(lookup.claims.values()), []) if isinstance(lookup, _Lookup) else []
        return [claim.keys for claim in claims]

    def learn(self, endpoint: Endpoint, keys: Keys, now: float) -> End | None:
        follower = self.followers.get(endpoint)
        if follower is None:
            return None
        speculation = self.index.speculate(follower.ledger.holder, keys, "", now)
        return lambda ended: self.index.finish(speculation, ended)

    def known(self) -> Iterator[list[Holding]]:
        for lot in self.index.export():
            yield [
                Holding(holder.endpoint, keys, tier, group)
                for holder, tier, group, keys in lot
                if isinstance(holder.endpoint, Endpoint)
            ]

    def believe(self, holding: Holding, now: float) -> bool:
        follower = self.followers.get(holding.endpoint)
        if follower is not None and holding.tier is not None:
            follower.ledger.block_size = _block_size(follower, holding.endpoint)
            follower.believe(holding.keys, holding.tier, holding.group, now)
        return follower is not None


def _block_size(follower: Follower, endpoint: Endpoint) -> int:
    """Tokens a block: as events tell, or, before the first one, as the worker's metrics do; 0 when neither has yet."""
    return follower.ledger.block_size or endpoint.block_size or 0


def _tokens(matches: Matches, size: int, prompt_tokens: int) -> Floats:
    """Tokens by tier and holder, shape (tiers, holders), as the engine can use them.

    The last token is computed in any case, so at most the whole blocks before it count; what is cut off is what comes
    last, the lower tiers' share first.
    """
    tokens: Floats = matches.by_tier.astype(np.float64) * size
    limit = (prompt_tokens - 1) // size * size
    for tier in reversed(Tier):
        over = np.maximum(tokens.sum(axis=0) - limit, 0.0)
        tokens[tier] -= np.minimum(over, tokens[tier])
    return tokens


def _extras(media: Sequence[PlacedMedia], salt: str, size: int) -> dict[int, bytes]:
    """What else names each block, in vLLM's order: media whose placeholder touches it, then the salt in the first."""
    names: dict[int, list[str]] = {}
    for item in sorted(media, key=lambda m: m.offset):
        for block in range(item.offset // size, (item.offset + max(item.length, 1) - 1) // size + 1):
            names.setdefault(block, []).append(item.identifier)
    if salt:
        names.setdefault(0, []).append(salt)
    return {block: block_extras(parts) for block, parts in names.items()}
