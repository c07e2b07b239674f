"""Token ids of a request: at once, from a thread or a worker, in time or not; no decision waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from epp.director import TOKENS_FAILED, TOKENS_LATE
from epp.exchange import Patience
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.kvcache.tokens import Tokenized, Tokens
from epp.kvcache.tokens.local import Prompt
from epp.request import InferenceRequest
from tests.exchanges import Rig, Stream
from tests.gateway.ext_proc_peer import CHAT, http_headers

IDS = Prompt(np.arange(77, dtype=np.uint32))
FOUND = Tokenized((IDS,), "local")
NOT_LOCAL = Tokenized((), "estimate", "not-local")
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"word " * 100 + b'"}]}'


class FakeTokens:
    """`Tokens` with answers written down."""

    def __init__(
        self,
        *,
        at_once: Tokenized | None = None,
        in_thread: Tokenized | Exception = FOUND,
        rendered: Tokenized | None = None,
    ) -> None:
        self.at_once, self.in_thread, self.rendered = at_once, in_thread, rendered
        self.asked: list[str] = []

    def base_of(self, request: InferenceRequest) -> tuple[str, str]:
        return "base", ""

    def ready(self, request: InferenceRequest, body: bytes) -> Tokenized | None:
        return self.at_once

    def work(self, request: InferenceRequest, body: bytes) -> Callable[[], Tokenized]:
        def tokenize() -> Tokenized:
            if isinstance(self.in_thread, Exception):
                raise self.in_thread
            return self.in_thread

        return tokenize

    def renders(self, request: InferenceRequest) -> bool:
        return self.rendered is not None

    async def render(self, request: InferenceRequest, body: bytes, worker: str) -> Tokenized:
        self.asked.append(worker)
        assert self.rendered is not None
        return self.rendered


def asked(rig: Rig, body: bytes = BODY) -> Stream:
    stream = rig.open()
    stream.send(request_headers=http_headers(CHAT))
    stream.send(request_body=pb.HttpBody(body=body, end_of_stream=True))
    return stream


def rig_with(tokens: FakeTokens, endpoints: int = 3) -> Rig:
    rig = Rig(endpoints, patience=Patience(deadline_s=0.25))
    rig.director.tokens = cast(Tokens, tokens)
    return rig


def decided(rig: Rig) -> tuple[int, tuple[str, ...]]:
    (decision,) = rig.decisions.made
    return decision.estimate.prompt_tokens, tuple(decision.reasons)


def test_ids_that_are_there_at_once_are_decided_on_at_once() -> None:
    rig = rig_with(FakeTokens(at_once=FOUND))
    asked(rig)
    assert decided(rig) == (77, ())


def test_ids_from_a_thread_come_before_the_decision() -> None:
    rig = rig_with(FakeTokens())
    stream = asked(rig)
    assert rig.decisions.made == []
    rig.clock.run_thread()
    assert decided(rig) == (77, ())
    stream.reset()
    rig.assert_idle()


def test_ids_that_come_late_are_not_waited_for_and_the_text_is_scored() -> None:
    rig = rig_with(FakeTokens())
    stream = asked(rig)
    rig.clock.advance(0.3)
    tokens, reasons = decided(rig)
    assert reasons == (TOKENS_LATE,)
    assert tokens != 77
    rig.clock.run_thread()
    assert len(rig.decisions.made) == 1
    stream.reset()
    rig.assert_idle()


def test_a_worker_renders_what_cannot_be_tokenised_here() -> None:
    tokens = FakeTokens(at_once=NOT_LOCAL, rendered=Tokenized((IDS,), "render"))
    rig = rig_with(tokens)
    asked(rig)
    rig.clock.run_thread()
    assert decided(rig) == (77, ())
    assert tokens.asked == ["10.0.0.1:8000"]


def test_a_worker_renders_what_a_thread_could_not() -> None:
    rig = rig_with(FakeTokens(in_thread=NOT_LOCAL, rendered=Tokenized((IDS,), "render")))
    asked(rig)
    rig.clock.run_thread()
    rig.clock.run_thread()
    assert decided(rig) == (77, ())


def test_without_a_worker_to_ask_the_request_is_answered_all_the_same() -> None:
    rig = rig_with(FakeTokens(at_once=NOT_LOCAL, rendered=FOUND), endpoints=0)
    stream = asked(rig)
    assert stream.immediate is not None
    assert stream.immediate.status.code == 503
    rig.assert_idle()


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (FakeTokens(at_once=NOT_LOCAL), "no-tokens:not-local"),
        (FakeTokens(in_thread=RuntimeError("broken")), TOKENS_FAILED),
        (
            FakeTokens(at_once=NOT_LOCAL, rendered=Tokenized((), "estimate", "render-timeout")),
            "no-tokens:render-timeout",
        ),
    ],
)
def test_a_request_without_ids_says_why_and_is_scored_by_its_text(tokens: FakeTokens, reason: str) -> None:
    rig = rig_with(tokens)
    asked(rig)
    rig.clock.run_thread()
    assert decided(rig)[1] == (reason,)
    assert rig.reasons[reason] == 1


@pytest.mark.parametrize("moment", ["thread", "render"])
def test_a_client_that_goes_away_while_ids_are_awaited_leaves_no_pick_behind(moment: str) -> None:
    rendered: Any = {"at_once": NOT_LOCAL, "rendered": FOUND} if moment == "render" else {}
    rig = rig_with(FakeTokens(**rendered))
    stream = asked(rig)
    stream.reset()
    rig.clock.run_thread()
    rig.clock.advance(1)
    assert rig.decisions.made == []
    rig.assert_idle()
