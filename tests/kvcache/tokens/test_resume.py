"""Bodies that begin alike are read from where they part; whatever stands there, the ids are those of the whole."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from epp.kvcache.tokens import local as module
from epp.kvcache.tokens import resume
from epp.kvcache.tokens.bodies import ChatBody, read_chat
from epp.kvcache.tokens.local import LocalModel
from epp.kvcache.tokens.messages import Unrenderable
from epp.kvcache.tokens.resume import STEP, Bodies, Earlier, without_known
from epp.kvcache.tokens.turns import Turns
from tests.kvcache.tokens import templates
from tests.kvcache.tokens.test_local import model

CHAT = templates.agent_chat(Random(1), 24, words=120)
assert len(json.dumps(CHAT)) > 2 * STEP


def body(messages: list[dict[str, Any]], **after: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **after}).encode()


def whole(request: bytes) -> list[int]:
    fresh = model(templates.CHATML)
    prompt = fresh.chat(request)
    assert prompt is not None
    return list(prompt.ids.tolist())


@pytest.fixture
def served() -> LocalModel:
    """A model that has seen the chat but for its last four messages."""
    made = model(templates.CHATML)
    made.chat(body(CHAT[:-6], tools=templates.TOOLS))
    made.chat(body(CHAT[:-4], tools=templates.TOOLS))
    return made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what is read as JSON."""
    lengths: list[int] = []

    def counting(text: bytes) -> ChatBody:
        lengths.append(len(text))
        return read_chat(text)

    monkeypatch.setattr(module, "read_chat", counting)
    return lengths


def test_only_what_is_new_is_read(served: LocalModel, read: list[int]) -> None:
    request = body(CHAT, tools=templates.TOOLS)
    prompt = served.chat(request)
    assert prompt is not None
    assert prompt.ids.tolist() == whole(request)
    assert read[0] < 8_000
    assert len(read) == 2, "once here, once by the comparison"


def test_the_same_body_again_reads_no_message(served: LocalModel, read: list[int]) -> None:
    request = body(CHAT[:-4], tools=templates.TOOLS)
    prompt = served.chat(request, quick=True)
    assert prompt is not None
    assert prompt.ids.tolist() == whole(request)
    assert read[0] < 3_000


@pytest.mark.parametrize(
    "request_body",
    [
        body(CHAT, tools=templates.TOOLS[:1]),
        body(CHAT),
        body(CHAT, tools=templates.TOOLS, add_generation_prompt=False),
        body(CHAT[:-8], tools=templates.TOOLS),
        body([*CHAT[:-4], {"role": "user", "content": "another end"}], tools=templates.TOOLS),
        body([*CHAT[:10], {"role": "user", "content": "another end"}], tools=templates.TOOLS),
        body(CHAT, tools=templates.TOOLS).replace(b"}, {", b"} \n,\t{"),
        body(CHAT, tools=templates.TOOLS)[:-1] + b', "messages": [{"role": "user", "content": "x"}]}',
        body(CHAT[:-4], tools=templates.TOOLS)[:-1] + b', "messages": [{"role": "user", "content": "x"}]}',
    ],
)
def test_whatever_follows_the_shared_beginning_the_ids_are_those_of_the_whole(
    served: LocalModel, request_body: bytes
) -> None:
    prompt = served.chat(request_body)
    assert prompt is not None
    assert prompt.ids.tolist() == whole(request_body)


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        (body(CHAT, tools=templates.TOOLS)[:-1], "unreadable-body"),
        (body([*CHAT, {"role": "wizard"}], tools=templates.TOOLS), "bad-message"),
        (body(CHAT[:-4], tools=templates.TOOLS)[:-1] + b', "messages": []}', "bad-message"),
    ],
)
def test_what_is_wrong_behind_it_has_its_reason(served: LocalModel, request_body: bytes, reason: str) -> None:
    with pytest.raises(Unrenderable) as caught:
        served.chat(request_body)
    assert caught.value.reason == reason


def test_a_turn_that_was_forgotten_is_read_anew(served: LocalModel) -> None:
    served._turns = Turns(1 << 24)
    request = body(CHAT, tools=templates.TOOLS)
    prompt = served.chat(request)
    assert prompt is not None
    assert prompt.ids.tolist() == whole(request)


def test_another_day_is_another_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    served = model(templates.DATED)
    served.chat(body(CHAT))
    monkeypatch.setattr(type(served._templates["default"]), "clock", lambda *_: "another day")
    assert served.chat(body(CHAT), quick=True) is None


def test_points_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_STEPS", 10)
    bodies = Bodies()
    for number in range(20):
        text = str(number).encode() * STEP
        bodies.remember(text, Earlier(0, 2 * STEP if number > 9 else STEP, b"", b"", b"", None))
    assert len(bodies) == 10


def test_the_place_where_messages_end_must_be_a_comma_or_the_end_of_the_list() -> None:
    text = b'{"messages": [{"a": 1} , {"b": 2}], "x": 3}'
    first = Earlier(14, 22, b"", b"", b"", None)
    assert without_known(text, first) == b'{"messages": [ {"b": 2}], "x": 3}'
    assert without_known(text, Earlier(14, 33, b"", b"", b"", None)) == b'{"messages": [null], "x": 3}'
    assert without_known(text, Earlier(14, 20, b"", b"", b"", None)) is None
    assert without_known(text[:22], first) is None
