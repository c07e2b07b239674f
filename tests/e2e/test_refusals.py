"""Which status a client gets when its request cannot be served, through the real Envoy and `kvsteer serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epp.envoy_options import FailureMode, Profile
from tests.e2e.backend import echo
from tests.e2e.envoy import until
from tests.e2e.serving import Answer, Stack, manager_of, running_stack, write_endpoints

BODY = b'{"model":"m","prompt":"x"}'
DROPPED = "x-llm-d-request-dropped-reason"

both_profiles = pytest.mark.parametrize("profile", Profile)


def refused(answer: Answer) -> tuple[int, str]:
    """Status and reason of an answer that has all a refusal must have."""
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) >= 1
    error = json.loads(answer.body)["error"]
    assert error["message"]
    assert error["type"]
    return answer.status, answer.headers[DROPPED]


ONE_EACH = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: concurrency-detector
  parameters: {maxConcurrency: 1}
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: concurrency-detector
  - pluginRef: max-score-picker
"""


@both_profiles
async def test_a_saturated_pool_is_429_with_the_reason_and_serves_again_once_there_is_room(profile: Profile) -> None:
    async with running_stack(profile, args=("--config-text", ONE_EACH)) as stack:
        held = [asyncio.create_task(stack.ask(BODY, **echo(hold=True))) for _ in range(3)]
        await until(stack.running, lambda n: n == 3)
        for path, body, method in (("/v1/completions", BODY, "POST"), ("/v1/models", None, "GET")):
            answer = await stack.ask(body, path=path, method=method)
            assert refused(answer) == (429, "rejected-saturated")
        for worker in stack.workers:
            worker.gate.set()
        assert {a.status for a in await asyncio.gather(*held)} == {200}
        await stack.idle()
        assert (await stack.ask(BODY)).status == 200


@both_profiles
async def test_a_body_over_the_pickers_own_limit_is_413_however_it_comes(profile: Profile) -> None:
    async def upload(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 400):
            yield body[start : start + 400]
            await asyncio.sleep(0.005)

    fits = b'{"model":"m","prompt":"' + b"x" * 975 + b'"}'
    async with running_stack(profile, args=("--max-request-bytes", "1000")) as stack:
        assert len(fits) == 1000
        for body, status in ((fits, 200), (fits + b" ", 413), (fits * 3, 413)):
            for answer in (await stack.ask(body), await stack.ask(upload(body))):
                assert answer.status == status
                assert status == 200 or json.loads(answer.body)["error"]["code"] == "request_too_large"
        await stack.idle()


def without_health_checks(tree: Any, known: list[str]) -> None:
    """Let Envoy ask a picker that says it is not ready."""
    for cluster in tree["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)


@both_profiles
async def test_an_empty_pool_is_503_with_the_reason(profile: Profile, tmp_path: Path) -> None:
    """Endpoints come and go with their file; what runs when they go is finished."""
    file = tmp_path / "endpoints.yaml"
    async with running_stack(
        profile, failure_mode=FailureMode.CLOSED, endpoints_file=file, edit=without_health_checks
    ) as stack:
        slow = asyncio.create_task(stack.ask(BODY, **echo(hold=True)))
        await until(stack.running, lambda n: n == 1)
        write_endpoints(file, [])
        answer = await until(lambda: stack.ask(BODY), lambda a: a.status != 200)
        assert refused(answer) == (503, "no-endpoint")
        assert refused(await stack.ask(method="GET", path="/v1/models")) == (503, "no-endpoint")
        for worker in stack.workers:
            worker.gate.set()
        assert (await slow).status == 200
        (only, *_) = stack.workers
        write_endpoints(file, [only.address])
        await until(lambda: stack.ask(BODY), lambda a: a.status == 200)
        assert {(await stack.ask(BODY)).account["worker"] for _ in range(10)} == {only.address}


# The subset hint

NAMESPACE, KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"


def put_first(tree: Any, name: str, **config: Any) -> None:
    """A filter before all others."""
    config["@type"] = f"type.googleapis.com/envoy.extensions.filters.http.{name}.v3.Config"
    manager_of(tree)["http_filters"].insert(0, {"name": f"envoy.filters.http.{name}", "typed_config": config})


def hint_from_header(tree: Any, known: list[str]) -> None:
    """Give the picker the header `x-allow` as the hint."""
    rule = {"header": "x-allow", "on_header_present": {"metadata_namespace": NAMESPACE, "key": KEY, "type": "STRING"}}
    put_first(tree, "header_to_metadata", request_rules=[rule])


@both_profiles
async def test_only_endpoints_that_the_gateway_allows_are_picked(profile: Profile) -> None:
    async with running_stack(profile, edit=hint_from_header) as stack:
        one, two, three = (w.address for w in stack.workers)
        for allowed, workers in (
            (one, {one}),
            (f" {two} , {three}", {two, three}),
            (f"10.9.9.9:80,{three},nonsense", {three}),
            ("127.0.0.1", {one, two, three}),
        ):
            for body, method in ((BODY, "POST"), (None, "GET")):
                # Enough that chance leaves nobody out.
                times = 12 if len(workers) == 1 else 40
                answers = [await stack.ask(body, method=method, x_allow=allowed) for _ in range(times)]
                assert {a.account["worker"] for a in answers} == workers, allowed
        for allowed in ("10.9.9.9:80", "nonsense"):
            assert refused(await stack.ask(BODY, x_allow=allowed)) == (503, "no-endpoint-in-subset")
        assert (await stack.ask(BODY)).status == 200


@pytest.mark.parametrize(("count", "profile"), [(0, Profile.GATEWAY), (2, Profile.FAST)])
async def test_the_hint_may_be_a_list(profile: Profile, count: int) -> None:
    def hint(tree: Any, known: list[str]) -> None:
        put_first(tree, "set_metadata", metadata=[{"metadata_namespace": NAMESPACE, "value": {KEY: known[:count]}}])

    async with running_stack(profile, edit=hint) as stack:
        answers = [await stack.ask(BODY) for _ in range(12)]
        if count:
            assert {a.account["worker"] for a in answers} == {w.address for w in stack.workers[:count]}
        else:
            assert {refused(a) for a in answers} == {(503, "no-endpoint-in-subset")}


@both_profiles
async def test_a_picker_that_is_gone_is_503_where_the_failure_mode_is_closed(profile: Profile) -> None:
    async with running_stack(profile, failure_mode=FailureMode.CLOSED) as stack:
        assert (await stack.ask(BODY)).status == 200
        served = await requests(stack)
        await stack.picker.kill()
        answers = [await stack.ask(BODY) for _ in range(10)]
        assert {a.status for a in answers} == {503}
        assert await requests(stack) == served


async def requests(stack: Stack) -> int:
    return sum(w.requests for w in stack.workers)
