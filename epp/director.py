"""One request's life, from parsed body to released load.

In: a request's head and body (from the ext_proc exchange), what its response shows, and the moment it is over. Out: a
`Steering` or a `Rejection`, counts on the very endpoint that was picked, hooks of plugins, metrics, the decision.

    read -> candidates -> schedule -> count load -> steer -> (response: first token, usage) -> release, learn

A `Flight` is one request on its way. It is released exactly once, on every path: end, abort, reset, error, drain.
Nothing here does I/O or reads a clock; `now` is the picker's monotonic clock in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol
from uuid import uuid4

import msgspec

from epp.api.errors import BadRequest
from epp.api.requests import LOAD_ONLY, parse_request
from epp.api.responses import ResponseReader
from epp.api.rewriting import Renaming, Rewriter, response_rewriter
from epp.api.splice import include_usage, rewrite_model
from epp.decision import Decision
from epp.endpoint import Candidates, Endpoint, Load, Pool
from epp.gateway.errors import Rejection, bad_request, too_many_requests, unavailable
from epp.gateway.ext_proc_events import ResponseHead, Steering, settable
from epp.kvcache.tokens import Tokenized, Tokens
from epp.observe.metrics import Metrics, ModelStats
from epp.plugin import PREFILLED_AT, Outcome
from epp.request import BYTES_PER_TOKEN, Api, Headers, InferenceRequest, RequestHead
from epp.scheduler import NO_CANDIDATES, Scheduler, Unschedulable
from epp.signals.health import Health
from epp.token_rate import TokenRates, text_bytes

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
MODEL_REWRITE = "x-gateway-model-name-rewrite"
"""Request header that names the model to ask the worker for (set by a client or an earlier filter)."""

OBJECTIVE = "x-gateway-inference-objective"
"""Request header that names the InferenceObjective of a request."""
SHED_QUEUE, SHED_KV_USAGE, SHED_STALE_S = 5.0, 0.8, 2.0
"""Where every endpoint is beyond these, requests of negative priority are refused: waiting requests, share of KV blocks
in use, age of metrics. The defaults of the field's utilization detector."""

MAX_REQUEST_ID = 128

NOT_SHOWN = "body-not-shown"
"""The gateway keeps bodies to itself, or this one has no end: a request is steered by load alone."""
READING_FAILED = "reading-failed"
DECISION_DEADLINE = "decision-deadline"
TOKENS_LATE = "tokens-late"
"""Token ids were not there in time: the approximate history scores."""
TOKENS_FAILED = "tokens-failed"

_NOT_JSON = (Api.GRPC_GENERATE, Api.GRPC_EMBED)
_USAGE_ON_REQUEST = (Api.COMPLETIONS, Api.CHAT)
"""APIs whose streams tell usage only when asked (`stream_options.include_usage`)."""


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator sets for every request."""

    model_rewrites: Mapping[str, str] = field(default_factory=dict)
    """Model asked for -> model the worker is asked for; the header `x-gateway-model-name-rewrite` comes first."""
    observe_responses: bool = False
    """A second ext_proc filter shows responses (`kvsteer envoy-config --usage`): every request gets a key for it."""
    inject_usage: bool = False
    """Ask streaming workers for usage and hide the event that brings it from clients that did not ask."""
    ignore_subset: bool = False
    """Pick among the whole pool whatever the gateway's subset hint says."""
    retry_after_s: float = 1.0


class DecisionSink(Protocol):
    """Takes every decision, and later how it turned out."""

    def decided(self, decision: Decision) -> None: ...

    def finished(self, decision: Decision, outcome: Outcome | None = None) -> None: ...


class Sharing(Protocol):
    """Tells the picker's other replicas what is decided here."""

    @property
    def reason(self) -> str:
        """Why they cannot be told or heard; empty when they can."""

    def picked(self, request: InferenceRequest, endpoint: Endpoint) -> int: ...

    def ended(self, number: int) -> None: ...


class Policy(Protocol):
    """What a cluster's objects say of requests."""

    @property
    def rewrites(self) -> bool:
        """Whether a model may be renamed."""

    def target(self, model: str) -> str:
        """The model to ask a worker for; "" when nothing says. May be called off the event loop."""

    def priority(self, objective: str) -> int: ...


class Flight:
    """One request that was steered and has not ended."""

    __slots__ = (
        "accounted",
        "decision",
        "endpoint",
        "first_token_at",
        "key",
        "load",
        "observed",
        "picked_at",
        "prefill",
        "prompt_bytes",
        "reader",
        "request",
        "response_bytes",
        "scheduler",
        "served",
        "shared",
        "shared_prefill",
        "stats",
        "status",
        "undoing",
    )

    def __init__(
        self,
        request: InferenceRequest,
        decision: Decision,
        scheduler: Scheduler,
        load: Load,
        stats: ModelStats,
        now: float,
    ) -> None:
        self.request = request
        self.scheduler = scheduler
        """The one that picked; a reload may have put another in force since."""
        self.decision = decision
        self.load: Load | None = load
        """None once it has landed."""
        self.endpoint = load.endpoint
        self.prefill: Load | None = None
        """What it weighs on the endpoint that computes its prompt, until the first token is there."""
        self.stats = stats
        self.picked_at = now
        self.prompt_bytes = text_bytes(request)
        self.first_token_at: float | None = None
        self.reader: ResponseReader | None = None
        self.key = ""
        """`Steering.flight`; empty when responses are not observed."""
        self.observed = False
        """An observing stream shows the response and has not ended."""
        self.accounted = False
        self.undoing: Undoing | None = None
        self.response_bytes = 0
        self.served = ""
        self.shared_prefill = 0
        self.shared = 0
        """The number under which other replicas know of it; 0 = they do not."""
        self.status: int | None = None


class Undoing:
    """Undoes in the response what was changed in the request. What kind of response it is shows at its head."""

    __slots__ = ("_hide_usage", "_renaming", "_rewriter")

    def __init__(self, renaming: Renaming | None, *, hide_usage: bool) -> None:
        self._renaming = renaming
        self._hide_usage = hide_usage
        self._rewriter: Rewriter | None = None

    def begin(self, headers: Headers) -> None:
        self._rewriter = response_rewriter(
            headers.get("content-type"),
            renaming=self._renaming,
            hide_usage=self._hide_usage,
            content_encoding=headers.get("content-encoding"),
        )

    def feed(self, data: bytes, end: bool) -> bytes | None:
        return self._rewriter.feed(data, end) if self._rewriter is not None else None


class Director:
    """Decides requests and follows them to their end, against one pool and the scheduler of the moment."""

    def __init__(
        self,
        *,
        pool: Pool,
        scheduler: Callable[[], Scheduler],
        health: Health,
        metrics: Metrics,
        decisions: DecisionSink,
        wall: Callable[[], float],
        options: Options | None = None,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.health = health
        self.metrics = metrics
        self.decisions = decisions
        self.options = options or Options()
        self.rates = TokenRates()
        self.shared: Sharing | None = None
        self.policy: Policy | None = None
        self.tokens: Tokens | None = None
        """Where token ids come from; None: no model is registered, and prompts are weighed by their bytes."""
        self._wall = wall
        self._keys = count(1)
        self._observable: dict[str, Flight] = {}

    # Reading

    def must_read(self, head: RequestHead) -> bool:
        """Whether a request cannot go out unread: its model may have to be rewritten."""
        by_policy = self.policy is not None and self.policy.rewrites
        return by_policy or bool(self.options.model_rewrites) or MODEL_REWRITE in head.headers

    def read(self, head: RequestHead, body: bytes) -> InferenceRequest:
        """Read a request; may be called off the event loop. Raises BadRequest."""
        request = parse_request(head, body, _request_id(head))
        if request.model:
            request.target_model = self._target(request.model, head.headers)
        self.rates.estimate(request)
        return request

    def _target(self, model: str, headers: Headers) -> str:
        """The model to ask for: an InferenceModelRewrite beats the header, which beats `--model-rewrite`."""
        by_policy = self.policy.target(model) if self.policy is not None else ""
        return by_policy or headers.get(MODEL_REWRITE) or self.options.model_rewrites.get(model, "") or model

    def tokenised(self, request: InferenceRequest, found: Tokenized | BaseException) -> None:
        """Token ids of a request were found, or why there are none."""
        if isinstance(found, BaseException):
            if not self.metrics.reasons[TOKENS_FAILED]:
                log.error("a prompt could not be tokenised (said once); its text is scored", exc_info=found)
            request.reasons.append(TOKENS_FAILED)
        elif found.prompts:
            request.tokens, request.token_media = found.prompts, found.media
            if self.tokens is not None:
                request.base_model, request.adapter = self.tokens.base_of(request)
            if not request.tokens_exact:
                exact = sum(len(prompt.ids) for prompt in found.prompts)
                request.bytes_per_token *= request.prompt_tokens / max(exact, 1)
                request.prompt_tokens = exact
        else:
            request.reasons.append(f"no-tokens:{found.reason}")

    def renderer(self, request: InferenceRequest, now: float) -> str:
        """Address of a worker that may be asked to render a prompt: the one with least to do; "" when there is none."""
        candidates = self.pool.candidates(now, request.subset)
        return min(candidates, key=lambda e: e.in_flight).address if len(candidates) else ""

    def unread(self, head: RequestHead, size: int, reason: str) -> InferenceRequest:
        """A request of which only the head is known: it goes by load, weighing its bytes at the assumed rate."""
        return InferenceRequest(
            request_id=_request_id(head),
            api=Api.OTHER,
            headers=head.headers,
            subset=head.subset,
            body_bytes=size,
            prompt_tokens=size // BYTES_PER_TOKEN,
            attributes={LOAD_ONLY: reason},
        )

    def refuse(self, fault: BadRequest) -> Rejection:
        """The answer to a body that cannot be read."""
        self.metrics.reasons["bad-request"] += 1
        return bad_request(fault.path, fault.reason)

    def note_unreadable(self, error: BaseException) -> None:
        """Reading failed in a way that no body should bring about."""
        if not self.metrics.reasons[READING_FAILED]:
            log.error("a request could not be read (said once); it is steered by load", exc_info=error)

    # Deciding

    def decide(
        self,
        request: InferenceRequest,
        body: bytes | None,
        now: float,
        *,
        response_shown: bool = True,
        reason: str = "",
    ) -> tuple[Steering, Flight] | Rejection:
        """Pick an endpoint, and count the request there before the next decision is made.

        `reason`: why the decision is a lesser one; goes into it.
        """
        scheduler = self.scheduler()
        if self.options.ignore_subset:
            request.subset = None
        candidates = self.pool.candidates(now, request.subset)
        if self.policy is not None and OBJECTIVE in request.headers:
            request.priority = self.policy.priority(request.headers.get(OBJECTIVE))
            if request.priority < 0 and len(candidates) and not _has_room(candidates):
                return self._shed()
        try:
            decision = scheduler.schedule(request, candidates, at=self._wall())
        except Unschedulable as left:
            return self._unschedulable(request, left)
        self.metrics.attempts["success"] += 1
        if request.priority:
            decision = msgspec.structs.replace(decision, priority=request.priority)
        alone = self.shared.reason if self.shared is not None else ""
        if reason or alone:
            why = tuple(filter(None, (reason, alone)))
            decision = msgspec.structs.replace(decision, reasons=(*why, *decision.reasons))
        # What may raise comes before the load is counted: from then on only the flight's landing takes it back.
        body, undoing = self._rewrite(request, body, response_shown)
        key = str(next(self._keys)) if self.options.observe_responses else ""
        picked = decision.endpoints[0]
        steering = Steering(
            addresses=_addresses(decision.endpoints),
            rank=picked.rank if picked.ranks > 1 else None,
            set_headers=_told(request, decision),
            body=body,
            response_headers=self._response_headers(scheduler, request, decision, now),
            response_transform=undoing,
            flight=key,
        )
        flight = self._take_off(request, decision, scheduler, now)
        flight.undoing = undoing
        if key:
            flight.key = key
            self._observable[key] = flight
        return steering, flight

    def _shed(self) -> Rejection:
        self.metrics.attempts["failure"] += 1
        self.metrics.reasons["shed"] += 1
        message = "every endpoint is saturated, and the request's priority is below 0"
        return too_many_requests("rejected-saturated", message, retry_after_s=self.options.retry_after_s)

    def _unschedulable(self, request: InferenceRequest, left: Unschedulable) -> Rejection:
        self.decisions.decided(left.decision)
        self.decisions.finished(left.decision)
        self.metrics.attempts["failure"] += 1
        retry = self.options.retry_after_s
        if left.reason == NO_CANDIDATES:
            reason, where = "no-endpoint", "in the pool"
            if request.subset is not None:
                reason, where = "no-endpoint-in-subset", "among those the gateway allows"
            self.metrics.reasons[reason] += 1
            return unavailable(reason, f"no endpoint {where} is ready", retry_after_s=retry)
        self.metrics.reasons[left.reason] += 1
        message = f"every endpoint is filtered out for this request{_last_filter(left.decision)}"
        return too_many_requests("rejected-saturated", message, retry_after_s=retry)

    def _take_off(
        self,
        request: InferenceRequest,
        decision: Decision,
        scheduler: Scheduler,
        now: float,
    ) -> Flight:
        stats = self.metrics.model(request.model, request.target_model)
        stats.requests += 1
        stats.running += 1
        stats.request_bytes.observe(request.body_bytes)
        if decision.reasons:
            self.metrics.reasons.update(decision.reasons)
        endpoint, prefill = decision.endpoints[0], decision.prefill
        weight = _weight(decision)
        own = endpoint.acquire(0 if prefill is not None else weight, now)
        flight = Flight(request, decision, scheduler, own, stats, now)
        if prefill is not None:
            flight.prefill = prefill.acquire(weight, now)
            request.attributes[PREFILLED_AT] = prefill
        if decision.kind:
            stats.stages[decision.kind] += 1
        self.health.picked(endpoint, now)
        scheduler.picked(request, decision, now)
        if self.shared is not None:
            flight.shared = self.shared.picked(request, endpoint)
            if prefill is not None:
                flight.shared_prefill = self.shared.picked(request, prefill)
        # A response may run for an hour; its prompt, half a megabyte or more, is needed no longer.
        request.prompts, request.prompt_seed, request.tokens = (), b"", ()
        self.decisions.decided(decision)
        return flight

    def _response_headers(
        self, scheduler: Scheduler, request: InferenceRequest, decision: Decision, now: float
    ) -> dict[str, str]:
        """What plugins add for the client, without what must not be set: a plugin's fault costs only its header."""
        headers = scheduler.response_headers(request, decision, now)
        if not headers:
            return headers
        refused = [name for name, value in headers.items() if not settable(name, value)]
        for name in refused:
            del headers[name]
            if not self.metrics.reasons["response-header-refused"]:
                log.warning("a plugin's response header %r cannot be set (said once)", name)
            self.metrics.reasons["response-header-refused"] += 1
        return headers

    def _rewrite(
        self, request: InferenceRequest, body: bytes | None, response_shown: bool
    ) -> tuple[bytes | None, Undoing | None]:
        """The body toward the worker (None: as it came) and what undoes the change in the response.

        Usage is asked for only where the response is shown: elsewhere it could not be hidden from the client.
        """
        if body is None or not request.model or request.api in _NOT_JSON or _is_untouchable(request):
            return None, None
        changed: bytes | None = None
        renaming = None
        if request.target_model != request.model:
            renaming = Renaming(target=request.target_model, client=request.model)
            changed = rewrite_model(body, request.target_model)
        hide = False
        if self.options.inject_usage and response_shown and request.stream and request.api in _USAGE_ON_REQUEST:
            injected = include_usage(changed or body)
            hide = injected is not None
            changed = injected or changed
        if changed is None:
            return None, None
        return changed, Undoing(renaming, hide_usage=hide)

    # The response

    def response_began(self, flight: Flight, head: ResponseHead, now: float) -> None:
        """The response's head is here: who served, how it went."""
        flight.status = head.status
        flight.served = head.served
        if head.served and head.served != flight.endpoint.address:
            self._served_elsewhere(flight, head.served, now)
        if head.served in ("", flight.endpoint.address):
            if head.status >= 500:
                self.health.failed(flight.endpoint, now, f"status {head.status}", flight.picked_at)
            else:
                self.health.succeeded(flight.endpoint, now, flight.picked_at)
        if flight.undoing is not None:
            flight.undoing.begin(head.headers)
        fields = head.headers
        flight.reader = ResponseReader(
            flight.request.api, fields.get("content-type"), head.status, fields.get("content-encoding")
        )

    def _served_elsewhere(self, flight: Flight, served: str, now: float) -> None:
        """The gateway fell back to another endpoint: the picked one did not answer, and the load is on the other."""
        self.metrics.reasons["served-elsewhere"] += 1
        self.health.failed(flight.endpoint, now, "the gateway fell back to another endpoint", flight.picked_at)
        other = self.pool.served_by(served, flight.endpoint)
        if other is None or flight.load is None:
            return
        flight.load.release()
        flight.load = other.acquire(_weight(flight.decision), now)
        flight.endpoint = other
        if self.shared is not None:
            self.shared.ended(flight.shared)
            flight.shared = self.shared.picked(flight.request, other)

    def response_data(self, flight: Flight, data: bytes, now: float) -> None:
        """A piece of the response body went by."""
        flight.response_bytes += len(data)
        reader = flight.reader
        if reader is None:
            return
        reader.feed(data)
        if flight.first_token_at is None and reader.content_seen:
            flight.first_token_at = now
            if flight.load is not None:
                flight.load.first_token()
            self._prefilled(flight)

    def _prefilled(self, flight: Flight) -> None:
        """The prompt is computed, or nobody waits for it any more. Later calls do nothing."""
        load, flight.prefill = flight.prefill, None
        if load is not None:
            load.release()
            if self.shared is not None:
                self.shared.ended(flight.shared_prefill)

    def observe(self, key: str) -> Flight | None:
        """A stream that only shows begins: the request it shows, if it is one of ours and on its way."""
        flight = self._observable.get(key)
        if flight is None or flight.observed or flight.accounted:
            self.metrics.reasons["observed-unknown-request"] += 1
            return None
        flight.observed = True
        return flight

    def observed(self, flight: Flight, *, complete: bool, now: float) -> None:
        """The stream that showed the response is over. `complete`: its end was seen. Later calls do nothing."""
        if flight.observed:
            flight.observed = False
            if complete or flight.load is None:
                self.landed(flight, complete=complete, now=now)

    def landed(self, flight: Flight, *, complete: bool, now: float) -> None:
        """The request is over. `complete`: its response's end was seen. Later calls do nothing.

        The load is released now; an observed request is accounted for when the stream that shows its response ends.
        """
        load, flight.load = flight.load, None
        if load is not None:
            load.release()
            self._prefilled(flight)
            self._observable.pop(flight.key, None)
            if self.shared is not None:
                self.shared.ended(flight.shared)
        if flight.accounted or flight.observed:
            return
        flight.accounted = True
        outcome = self._outcome(flight, complete=complete, now=now)
        self._account(flight, outcome)
        flight.scheduler.finished(flight.request, flight.endpoint, outcome, now)
        self.decisions.finished(flight.decision, outcome)

    def _outcome(self, flight: Flight, *, complete: bool, now: float) -> Outcome:
        reader = flight.reader
        usage = reader.finish() if reader is not None else None
        first = flight.first_token_at if flight.request.stream and reader is not None and reader.streamed else None
        return Outcome(
            status=flight.status,
            first_token_s=None if first is None else first - flight.picked_at,
            duration_s=now - flight.picked_at,
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            aborted=flight.status is not None and not complete,
            served=flight.served,
        )

    def _account(self, flight: Flight, outcome: Outcome) -> None:
        stats = flight.stats
        stats.running -= 1
        if flight.status is not None:
            stats.response_bytes.observe(flight.response_bytes)
            if flight.status >= 400:
                stats.errors[str(flight.status)] += 1
        if outcome.aborted:
            stats.errors["aborted"] += 1
        if flight.reader is not None and flight.reader.faults:
            self._note_misread(flight)
        if outcome.duration_s is not None:
            stats.duration.observe(outcome.duration_s)
            if outcome.completion_tokens:
                stats.per_token.observe(outcome.duration_s / outcome.completion_tokens)
        if outcome.first_token_s is not None:
            stats.ttft.observe(outcome.first_token_s)
            expected = flight.decision.estimate.ttft_s
            if expected is not None and outcome.first_token_s > 0:
                stats.ttft_error.observe(abs(expected - outcome.first_token_s) / outcome.first_token_s)
        if outcome.prompt_tokens is not None:
            stats.input_tokens.observe(outcome.prompt_tokens)
            self.rates.observe(flight.request.target_model, flight.prompt_bytes, outcome.prompt_tokens)
        if outcome.completion_tokens is not None:
            stats.output_tokens.observe(outcome.completion_tokens)
        if outcome.cached_tokens is not None:
            stats.cached_tokens.observe(outcome.cached_tokens)
            expected = flight.decision.estimate.cached_tokens
            stats.cached_expected.observe(expected)
            stats.cached_error.observe(abs(outcome.cached_tokens - expected))

    def _note_misread(self, flight: Flight) -> None:
        """Usage in a response, or an event of it, could not be read: passed on as it came, its tokens not counted."""
        if not self.metrics.reasons["usage-unreadable"]:
            log.warning("usage in a response of %s cannot be read (said once)", flight.endpoint.key)
        self.metrics.reasons["usage-unreadable"] += 1

    def endpoints_left(self, endpoints: Sequence[Endpoint], now: float) -> None:
        """Endpoints are no longer in the pool: plugins forget them."""
        scheduler = self.scheduler()
        for endpoint in endpoints:
            scheduler.removed(endpoint, now)


def _addresses(endpoints: Sequence[Endpoint]) -> tuple[str, ...]:
    """The destination and its fallbacks, each address once.

    The header that names the rank stays as it is when a gateway falls back: only where that rank exists can it.
    """
    rank = endpoints[0].rank if endpoints[0].ranks > 1 else 0
    return tuple(dict.fromkeys(e.address for e in endpoints if e.ranks > rank))


def _weight(decision: Decision) -> int:
    """Prompt tokens to be computed, as expected."""
    return max(0, decision.estimate.prompt_tokens - decision.estimate.cached_tokens)


def _told(request: InferenceRequest, decision: Decision) -> dict[str, str]:
    """Request headers toward the worker: the request's id, and who else takes part."""
    told = {} if REQUEST_ID in request.headers else {REQUEST_ID: request.request_id}
    return {**told, **decision.headers} if decision.headers else told


def _last_filter(decision: Decision) -> str:
    """Which filter left nobody, for the reader of an error."""
    emptied = (f.name for profile in decision.profiles for f in profile.filters if not f.kept)
    name = next(emptied, "")
    return f" (by {name})" if name else ""


def _is_untouchable(request: InferenceRequest) -> bool:
    """Compressed and multipart bodies are not ours to splice."""
    return request.attributes.get(LOAD_ONLY) in ("compressed-body", "multipart-body")


def _request_id(head: RequestHead) -> str:
    return head.headers.get(REQUEST_ID)[:MAX_REQUEST_ID] or str(uuid4())


def _has_room(candidates: Candidates) -> bool:
    return bool(candidates.unsaturated(SHED_QUEUE, SHED_KV_USAGE, SHED_STALE_S).any())
