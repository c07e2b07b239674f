"""The answers given in a worker's stead."""

from __future__ import annotations

import json

import pytest

from epp.gateway import errors
from epp.gateway.errors import Rejection

ALL = [
    errors.bad_request("messages[0].content", "must be a string or a list"),
    errors.bad_request("", "the body is not JSON"),
    errors.too_large(1024),
    errors.too_many_requests("rejected-saturated", "the system is saturated"),
    errors.unavailable("draining", "the picker is draining"),
]


@pytest.mark.parametrize("rejection", ALL, ids=lambda rejection: str(rejection.status))
def test_every_error_has_the_shape_of_the_openai_api(rejection: Rejection) -> None:
    document = json.loads(rejection.body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert isinstance(document["error"]["message"], str)
    assert isinstance(document["error"]["type"], str)
    assert isinstance(document["error"]["code"], str)
    assert rejection.headers["content-type"] == "application/json"
    assert rejection.reason


def test_a_bad_request_names_the_path_and_the_reason() -> None:
    error = json.loads(ALL[0].body)["error"]
    assert error["message"] == "messages[0].content: must be a string or a list"
    assert error["param"] == "messages[0].content"
    assert json.loads(ALL[1].body)["error"]["param"] is None


def test_words_from_outside_are_bounded() -> None:
    assert len(errors.bad_request("x" * 10_000, "y" * 10_000).body) < 1_500


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.0, "2"), (2.1, "3")])
def test_shed_requests_say_why_and_when_to_come_back(seconds: float, header: str) -> None:
    for rejection in (
        errors.too_many_requests("rejected-saturated", "full", retry_after_s=seconds),
        errors.unavailable("rejected-saturated", "full", retry_after_s=seconds),
    ):
        assert rejection.headers["retry-after"] == header
        assert rejection.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert rejection.reason == "rejected-saturated"


def test_statuses_are_those_of_the_protocol() -> None:
    assert [rejection.status for rejection in ALL] == [400, 400, 413, 429, 503]
