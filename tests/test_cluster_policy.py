"""What a cluster's InferenceObjectives and InferenceModelRewrites do to a request on its way."""

from __future__ import annotations

import json

import pytest

from epp.director import SHED_QUEUE, Options
from tests.exchanges import Rig, Stream
from tests.gateway.ext_proc_peer import CHAT, Fields

ASK = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
JSON: Fields = ((":status", b"200"), ("content-type", b"application/json"))


class Policy:
    """`policy.PoolPolicy` by hand."""

    def __init__(self, targets: dict[str, str] | None = None, priorities: dict[str, int] | None = None) -> None:
        self.targets, self.priorities = targets or {}, priorities or {}

    @property
    def rewrites(self) -> bool:
        return bool(self.targets)

    def target(self, model: str) -> str:
        return self.targets.get(model, "")

    def priority(self, objective: str) -> int:
        return self.priorities.get(objective, 0)


def ask(rig: Rig, *fields: tuple[str, bytes], answer: bytes = b'{"model":"llama"}') -> Stream:
    stream = rig.open()
    stream.request((*CHAT, *fields), [ASK])
    if stream.immediate is None:
        stream.response(JSON, [answer])
    stream.end()
    rig.assert_idle()
    return stream


@pytest.mark.parametrize(
    ("targets", "header", "option", "asked"),
    [
        ({"m": "llama"}, "", "", "llama"),
        ({"m": "llama"}, "from-header", "from-option", "llama"),
        ({"x": "llama"}, "from-header", "from-option", "from-header"),
        ({"x": "llama"}, "", "from-option", "from-option"),
        ({"x": "llama"}, "", "", "m"),
    ],
)
def test_the_model_asked_for_is_the_objects_then_the_headers_then_the_options(
    targets: dict[str, str], header: str, option: str, asked: str
) -> None:
    rig = Rig(options=Options(model_rewrites={"m": option} if option else {}))
    rig.director.policy = Policy(targets)
    fields = [("x-gateway-model-name-rewrite", header.encode())] if header else []
    stream = ask(rig, *fields, answer=json.dumps({"model": asked}).encode())
    assert json.loads(stream.body["request"] or ASK)["model"] == asked
    assert json.loads(stream.body["response"] or b'{"model": "m"}')["model"] == "m", "the client's own name comes back"


def saturate(rig: Rig, *, but: int = 0) -> None:
    for endpoint in rig.pool.endpoints[but:]:
        endpoint.set("waiting", SHED_QUEUE + 1)
        endpoint.set("kv_usage", 0.1)
    for endpoint in rig.pool.endpoints[:but]:
        endpoint.set("waiting", 0)
        endpoint.set("kv_usage", 0.1)


@pytest.mark.parametrize(
    ("objective", "saturated_but", "refused"),
    [("batch", 0, True), ("batch", 1, False), ("normal", 0, False), ("unknown", 0, False), ("", 0, False)],
)
def test_a_request_of_negative_priority_is_refused_while_every_endpoint_is_saturated(
    objective: str, saturated_but: int, refused: bool
) -> None:
    rig = Rig()
    rig.director.policy = Policy(priorities={"batch": -1, "normal": 3})
    saturate(rig, but=saturated_but)
    stream = ask(rig, *([("x-gateway-inference-objective", objective.encode())] if objective else []))
    assert (stream.immediate is not None and stream.immediate.status.code == 429) is refused
    assert rig.reasons.get("shed", 0) == refused
    if not refused:
        assert rig.decisions.made[0].priority == {"batch": -1, "normal": 3}.get(objective, 0)
