"""Fields of bodies that grow are those that reading the whole body gives."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.api import resuming
from epp.api.errors import BadRequest
from epp.api.fields import Fields, read_fields
from epp.api.resuming import resume_fields
from epp.growing import Growing

MESSAGES = [{"role": "user", "content": f'{n} "quoted" [{{ {"x" * 900}'} for n in range(60)]
LIST = json.dumps(MESSAGES).encode()[:-1]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_beginnings", Growing(1 << 20))


def outcome(read: object, body: bytes) -> object:
    try:
        fields: Fields = read(body)  # type: ignore[operator]
    except BadRequest as error:
        return error.path, error.reason
    return {name: bytes(getattr(fields, name)) for name in Fields.__struct_fields__}


def went_on(body: bytes) -> bool:
    known = resuming._beginnings.find(body)
    return known is not None and resuming._go_on(body, *known) is not None


BEFORE = b'{"model":"m","tools":[{"a":1}],"user":"u","messages":'
ENDS = [
    b"]}",
    b',{"role":"assistant","content":"more"}]}',
    b',{"role":"assistant","content":"more"} ] , "stream" : true}',
    b'],"stream":true,"max_tokens":7}',
    b'],"model":"another","user":null}',
    b'],"messages":[{"role":"user"}]}',
    b'],"messages":[0,{"role":"user"}]}',
    b",7]}",
    b',"text"],"system":"s"}',
    b', {"a": NaN}]}',
    b"7]}",
    b"",
    b"]",
    b"]}}",
    b"]}x",
    b"],}",
    b",]}",
    b',{"a":]}',
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("first", [b"]}", b'],"stream":false}', b'],"model":"last","system":"x"}'])
def test_a_body_that_goes_on_reads_as_the_whole_of_it(first: bytes, end: bytes) -> None:
    resume_fields(BEFORE + LIST + first)
    body = BEFORE + LIST + end
    assert outcome(resume_fields, body) == outcome(read_fields, body)
    assert outcome(resume_fields, body) == outcome(read_fields, body)


def test_only_what_is_new_is_read_turn_after_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    body = BEFORE + LIST + b"]}"
    resume_fields(body)
    monkeypatch.setattr(resuming, "read_fields", lambda body: pytest.fail("the whole body was read"))
    for turn in range(5):
        body = body[:-2] + b',{"role":"user","content":"%d"}]}' % turn
        assert outcome(resume_fields, body) == outcome(read_fields, body)


def test_members_before_the_list_count_as_they_stand_there_also_twice() -> None:
    before = b'{"model":"a","model":"b","messages":[1],"messages":'
    resume_fields(before + LIST + b'],"model":"c"}')
    body = before + LIST + b',{"role":"user"}]}'
    assert went_on(body)
    assert bytes(resume_fields(body).model) == b'"b"'
    assert outcome(resume_fields, body) == outcome(read_fields, body)


def test_the_input_of_the_responses_api_goes_on_too() -> None:
    before = b'{"model":"m","input":'
    resume_fields(before + LIST + b"]}")
    body = before + LIST + b',{"role":"user"}]}'
    assert went_on(body)
    assert outcome(resume_fields, body) == outcome(read_fields, body)


def test_a_body_that_differs_in_what_was_read_before_is_read_anew() -> None:
    resume_fields(BEFORE + LIST + b"]}")
    body = BEFORE.replace(b'"m"', b'"n"') + LIST + b"]}"
    assert not went_on(body)
    assert bytes(resume_fields(body).model) == b'"n"'


@settings(max_examples=40)
@given(cut=st.integers(0, len(LIST)), junk=st.binary(max_size=12), end=st.sampled_from(ENDS))
def test_whatever_follows_at_whatever_place_reads_the_same(cut: int, junk: bytes, end: bytes) -> None:
    resume_fields(BEFORE + LIST + b"]}")
    body = BEFORE + LIST[:cut] + junk + end
    assert outcome(resume_fields, body) == outcome(read_fields, body)
