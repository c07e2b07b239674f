"""`disagg-profile-handler`: prefill, decode and encode on workers of their own, or all at one.

The profiles `decode` (needed), `prefill` and `encode` are run, each with its filters and scorers; then it is settled
who takes part. With a decider, as in the field: decode as picked, and where the decider says so, prefill as picked. By
default by time: of all pairs of candidates the one with the soonest first token,

    first token(d, p) = prefill(p) + transfer(p -> d) + what waits at d        against        computing it all at d

where `prefill(p)` and `computing at d` are the estimates of the `ttft-estimator` (queue, uncached tokens, learned rate,
and the delay of those who decode there), and only the tokens that d lacks are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from epp.disagg import headers, pairing
from epp.disagg.transfer import TransferModel
from epp.plugin import (
    Candidates,
    Decider,
    Duration,
    Endpoint,
    Floats,
    Handle,
    InferenceRequest,
    Outcome,
    ProfileHandler,
    Range,
    Settled,
)

ALTERNATIVES = 3
"""Prefillers named, best first: the sidecar asks the next one when the first fails."""
CACHE_FULL = 0.97
"""Share of KV blocks in use from which on an endpoint has no room to receive a prompt's."""


@dataclass(frozen=True, slots=True)
class Stages:
    decode: str = ""
    prefill: str = ""
    encode: str = ""


@dataclass(frozen=True, slots=True)
class DisaggParameters:
    profiles: Stages = field(default_factory=Stages)
    """Names of the profiles, where they are not `decode`, `prefill`, `encode`."""
    deciders: Stages = field(default_factory=Stages)
    """Names of plugins that say when prefill and encode are used. Prefill without one is decided by time."""
    decode_profile: str = ""
    prefill_profile: str = ""
    encode_profile: str = ""
    """The older spelling of `profiles`."""
    decider_plugin_name: str = ""
    prefill_decider_plugin_name: str = ""
    encode_decider_plugin_name: str = ""
    """The older spelling of `deciders`."""
    min_tokens: Annotated[int, Range(min=0)] = 256
    """By time: a prompt of which the decoding endpoint lacks less stays there."""
    min_gain: Duration = 0.01
    """By time: seconds by which a pair has to be sooner."""
    kv_bytes_per_token: Annotated[float, Range(min=1, max=1e8)] = 160_000.0
    """What is sent of each token; 160 KB is a 32B model with grouped attention in 16 bits, to be set for others."""
    bandwidth: Annotated[float, Range(min=1e3, max=1e13)] = 12.5e9
    """Bytes a second between two workers, until learned; the default is 100 Gbit/s."""
    transfer_start: Duration = 0.005
    """Seconds of each transfer besides."""
    decode_load: Duration = 0.01
    """What each request at an endpoint counts against decoding there, in seconds of the first token: all its tokens
    come the slower."""
    max_transfers: Annotated[int, Range(min=1)] = 256
    """Transfers on their way at a time; beyond, the link counts as saturated and prompts are computed where decoded."""
    peer_pull: Literal["off", "prefill", "header"] = "off"
    """Without prefill workers, whether an endpoint may get its prompt's KV from another one that holds it: `prefill`,
    as from a prefill worker (NIXL, `kv_role: kv_both`); `header`, the worker pulls it itself
    (`x-kv-cache-source-host-port`)."""
    min_pull_gain: Duration = 0.05
    """Seconds by which a pull has to be sooner than computing."""

    def __post_init__(self) -> None:
        old = (self.decode_profile, self.prefill_profile, self.encode_profile)
        if any(old) and self.profiles != Stages():
            raise ValueError("profiles and the older decodeProfile, prefillProfile, encodeProfile exclude each other")
        if (
            self.decider_plugin_name or self.prefill_decider_plugin_name or self.encode_decider_plugin_name
        ) and self.deciders != Stages():
            raise ValueError("deciders and the older ...DeciderPluginName exclude each other")

    @property
    def decode(self) -> str:
        return self.profiles.decode or self.decode_profile or "decode"

    @property
    def prefill(self) -> str:
        return self.profiles.prefill or self.prefill_profile or "prefill"

    @property
    def encode(self) -> str:
        return self.profiles.encode or self.encode_profile or "encode"

    @property
    def prefill_decider(self) -> str:
        return self.deciders.prefill or self.prefill_decider_plugin_name or self.decider_plugin_name

    @property
    def encode_decider(self) -> str:
        return self.deciders.encode or self.encode_decider_plugin_name


@dataclass(frozen=True, slots=True)
class _Sent:
    """A transfer on its way, for the learning when its first token is seen."""

    tokens: float
    seconds: float
    rest_s: float
    """What the first token was expected to take besides."""


class DisaggProfileHandler(ProfileHandler[DisaggParameters]):
    """Prefill, decode and encode on workers of their own: by time, or as a decider says.

    Needs a profile `decode`; `prefill` and `encode` are used where they are there. Without a prefill worker, or where
    that is not worth it, the request is decoded alone, and the decision says why.
    """

    type = "disagg-profile-handler"
    aliases = ("pd-profile-handler",)
    Parameters = DisaggParameters
    reads = ("cached_tokens", "expected_ttft", "expected_cost")
    ignored_parameters: ClassVar[Mapping[str, str]] = {
        "primaryPort": "every data-parallel rank is an endpoint of its own here",
        "prefixPluginType": "cached tokens come from the producer",
        "prefixPluginName": "cached tokens come from the producer",
    }

    @classmethod
    def references(cls, parameters: Any) -> Mapping[str, str]:
        named = {"deciders.prefill": parameters.prefill_decider, "deciders.encode": parameters.encode_decider}
        return {place: name for place, name in named.items() if name}

    @classmethod
    def needs_profiles(cls, parameters: Any) -> Sequence[str]:
        return (parameters.decode,)

    def __init__(self, parameters: DisaggParameters, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        p = parameters
        self.transfer = TransferModel(p.kv_bytes_per_token, p.bandwidth, p.transfer_start)
        self.transfers = 0
        """On their way now."""

    def next_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, Sequence[Endpoint] | None],
    ) -> Sequence[str]:
        if not results:
            return (self.parameters.decode,)
        if results.get(self.parameters.decode) is None:
            return ()
        wanted = (self.parameters.prefill, self.parameters.encode)
        return [name for name in wanted if name in profiles and name not in results]

    def primary(self, results: Mapping[str, Sequence[Endpoint] | None]) -> str | None:
        return self.parameters.decode if results.get(self.parameters.decode) else None

    def settle(
        self,
        request: InferenceRequest,
        candidates: Mapping[str, Candidates],
        results: Mapping[str, Sequence[Endpoint] | None],
    ) -> Settled | None:
        p = self.parameters
        decode, picked = candidates.get(p.decode), results.get(p.decode)
        if decode is None or not picked:
            return None
        settled = self._prefill(request, decode, picked, candidates.get(p.prefill), results)
        encoders = results.get(p.encode)
        if encoders and self._decides(p.encode_decider, request, settled.endpoints[p.decode][0], decode):
            kind = "encode-prefill-decode" if settled.prefill is not None else "encode-decode"
            told = {**settled.headers, headers.ENCODERS: headers.addresses(encoders)}
            endpoints = {**settled.endpoints, p.encode: encoders}
            settled = _with(settled, endpoints, told, kind)
        return settled

    def _decides(self, name: str, request: InferenceRequest, endpoint: Endpoint, decode: Candidates) -> bool:
        decider = self.handle.plugins.get(name)
        row = decode.endpoints.index(endpoint)
        return isinstance(decider, Decider) and decider.splits(request, endpoint, float(decode.cached_tokens[row]))

    def _prefill(
        self,
        request: InferenceRequest,
        decode: Candidates,
        picked: Sequence[Endpoint],
        prefill: Candidates | None,
        results: Mapping[str, Sequence[Endpoint] | None],
    ) -> Settled:
        p = self.parameters
        if p.prefill_decider:
            prefillers = results.get(p.prefill)
            if not self._decides(p.prefill_decider, request, picked[0], decode):
                return self._alone(picked, "decider")
            if not prefillers:
                return self._alone(picked, "no-prefill-worker", lesser=True)
            return self._pair(picked, list(prefillers)[:ALTERNATIVES], None, {})
        if prefill is not None and len(prefill):
            return self._by_time(request, decode, picked, prefill)
        if p.peer_pull != "off":
            return self._pull(request, decode, picked)
        return self._alone(picked, "no-prefill-worker", lesser=p.prefill in results)

    def _alone(
        self, picked: Sequence[Endpoint], why: str, *, lesser: bool = False, notes: Mapping[str, Any] | None = None
    ) -> Settled:
        reasons = (f"decode-alone:{why}",) if lesser else ()
        return Settled(
            {self.parameters.decode: picked}, kind="decode-only", reasons=reasons, notes={"alone": why, **(notes or {})}
        )

    def _pair(
        self,
        picked: Sequence[Endpoint],
        prefillers: Sequence[Endpoint],
        expected: float | None,
        notes: Mapping[str, float | str | None],
    ) -> Settled:
        if prefillers[0] is picked[0]:
            return self._alone(picked, "prefills-itself", notes=notes)
        return Settled(
            {self.parameters.decode: picked, self.parameters.prefill: prefillers},
            {headers.PREFILLER: headers.addresses(prefillers)},
            prefillers[0],
            expected,
            "prefill-decode",
            notes=notes,
        )

    def _by_time(
        self, request: InferenceRequest, decode: Candidates, picked: Sequence[Endpoint], prefill: Candidates
    ) -> Settled:
        p = self.parameters
        best = _row(decode, picked[0])
        if request.prompt_tokens - decode.cached_tokens[best] < p.min_tokens:
            return self._alone(picked, "small-remainder")
        if self.transfers >= p.max_transfers:
            return self._alone(picked, "link-saturated", lesser=True)
        roomy = ~(decode.column("kv_usage") >= CACHE_FULL)
        if not roomy.any():
            return self._alone(picked, "decode-cache-full", lesser=True)
        lacking = np.maximum(request.prompt_tokens - decode.cached_tokens, 0.0)
        transfer = self.transfer.seconds(lacking, decode.endpoints, prefill.endpoints)
        load_s = _load(decode) * p.decode_load
        between = transfer + load_s[:, None]
        possible = np.broadcast_to(roomy[:, None], between.shape).copy()
        itself = {e: i for i, e in enumerate(prefill.endpoints)}
        for i, endpoint in enumerate(decode.endpoints):
            if endpoint in itself:
                possible[i, itself[endpoint]] = False
        prefill_s = _cost(prefill)
        choice = pairing.choose(_cost(decode) + load_s, prefill_s, between, possible=possible, gain_s=p.min_gain)
        notes = {"pair_s": choice.pair_s, "alone_s": choice.alone_s}
        if choice.prefill < 0:
            return self._alone(picked, "sooner-alone", notes=notes)
        endpoint = decode.endpoints[choice.decode]
        order = np.argsort(prefill_s + np.where(possible[choice.decode], between[choice.decode], np.inf))
        prefillers = [prefill.endpoints[i] for i in order[:ALTERNATIVES].tolist() if possible[choice.decode, i]]
        prefillers = [
            prefill.endpoints[choice.prefill],
            *(e for e in prefillers if e is not prefill.endpoints[choice.prefill]),
        ]
        sent_s = float(transfer[choice.decode, choice.prefill])
        assert prefill.expected_ttft is not None
        rest_s = float(prefill.expected_ttft[choice.prefill] + between[choice.decode, choice.prefill]) - sent_s
        request.attributes[self.name] = _Sent(float(lacking[choice.decode]), sent_s, rest_s)
        others = (e for e in picked if e is not endpoint)
        return self._pair((endpoint, *others), prefillers, rest_s + sent_s, notes)

    def _pull(self, request: InferenceRequest, decode: Candidates, picked: Sequence[Endpoint]) -> Settled:
        """Get the KV from a sibling that holds it, where that is sooner than computing it again."""
        p = self.parameters
        load_s = _load(decode) * p.decode_load
        cached, cost = decode.cached_tokens, _cost(decode) + load_s
        missing = cached[None, :] - cached[:, None]
        possible = missing >= max(p.min_tokens, 1)
        if not possible.any():
            return self._alone(picked, "nobody-holds-more")
        if self.transfers >= p.max_transfers:
            return self._alone(picked, "link-saturated", lesser=True)
        full = decode.column("kv_usage") >= CACHE_FULL
        possible &= ~full[:, None]
        gained = np.maximum(missing, 0.0)
        if p.peer_pull == "header":
            # Computed where it is decoded, but for what comes from the other: its seconds by the own pace.
            lacking = np.maximum(request.prompt_tokens - cached, 1.0)
            between = cost[:, None] * (1.0 - gained / lacking[:, None])
            between = between + self.transfer.seconds(gained, decode.endpoints, decode.endpoints)
            source_s: Floats = np.zeros(len(decode))
        else:
            lacking = np.maximum(request.prompt_tokens - cached, 0.0)
            between = self.transfer.seconds(lacking, decode.endpoints, decode.endpoints)
            between = between + load_s[:, None]
            source_s = _cost(decode)
        # Where there is no room, nothing is decoded soon, however much of the prompt is there.
        alone_s = cost if full.all() else np.where(full, np.inf, cost)
        choice = pairing.choose(alone_s, source_s, between, possible=possible, gain_s=p.min_pull_gain)
        notes = {"pair_s": choice.pair_s, "alone_s": choice.alone_s}
        if choice.prefill < 0:
            return self._alone(picked, "sooner-alone", notes=notes)
        endpoint, source = decode.endpoints[choice.decode], decode.endpoints[choice.prefill]
        chosen = (endpoint, *(e for e in picked if e is not endpoint))
        tokens = float(gained[choice.decode, choice.prefill])
        request.attributes[self.name] = _Sent(tokens, 0.0, 0.0)
        if p.peer_pull == "header":
            told = {headers.KV_SOURCE: source.address}
            return Settled({p.decode: chosen}, told, None, choice.pair_s, "peer-pull", notes=notes)
        told = {headers.PREFILLER: source.address}
        return Settled({p.decode: chosen}, told, source, choice.pair_s, "peer-pull", notes=notes)

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        if isinstance(request.attributes.get(self.name), _Sent):
            self.transfers += 1

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        sent = request.attributes.pop(self.name, None)
        if not isinstance(sent, _Sent):
            return
        self.transfers -= 1
        if outcome.first_token_s is not None and sent.seconds > 0 and (outcome.status or 200) < 400:
            self.transfer.observe(tokens=sent.tokens, seconds=outcome.first_token_s - sent.rest_s)


def _with(settled: Settled, endpoints: Mapping[str, Sequence[Endpoint]], told: Mapping[str, str], kind: str) -> Settled:
    return Settled(endpoints, told, settled.prefill, settled.expected_ttft, kind, settled.reasons, settled.notes)


def _row(candidates: Candidates, endpoint: Endpoint) -> int:
    return candidates.endpoints.index(endpoint)


def _load(candidates: Candidates) -> Floats:
    """Requests at each endpoint: the own count, or what its gauges show where that is more."""
    shown = candidates.column("running") + candidates.column("waiting")
    load: Floats = np.fmax(candidates.column("in_flight"), shown)
    return load


def _cost(candidates: Candidates) -> Floats:
    """Seconds to a first token there, and what that costs those who are there."""
    assert candidates.expected_cost is not None
    return candidates.expected_cost
