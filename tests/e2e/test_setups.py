"""Set-ups that differ from the shipped defaults, behind the real Envoy: pools, TLS, usage, session affinity."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epp.envoy_options import FailureMode, Profile
from epp.gateway.tls import self_signed_pair
from tests.e2e.backend import echo, running_worker
from tests.e2e.envoy import until
from tests.e2e.serving import DESTINATION, running_stack

BODY = b'{"model":"m","prompt":"x"}'
STREAM = b'{"model":"m","prompt":"x","stream":true}'
EVENTS = """data: {"choices":[{"text":"a"}],"usage":null}

data: {"choices":[],"usage":{"prompt_tokens":120,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":96}}}

data: [DONE]

"""
AFFINITY = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: session-affinity-scorer
- type: active-request-scorer
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: session-affinity-scorer
    weight: 10
  - pluginRef: active-request-scorer
    weight: 1
  - pluginRef: max-score-picker
"""


@pytest.mark.parametrize("edge", ["lean", "grpcio"])
async def test_the_picker_is_reached_over_tls(edge: str) -> None:
    async with running_stack(Profile.GATEWAY, edge, tls=True, failure_mode=FailureMode.CLOSED) as stack:
        answers = await asyncio.gather(*(stack.ask(BODY) for _ in range(20)))
        assert {a.status for a in answers} == {200}


@pytest.mark.parametrize("edge", ["lean", "grpcio"])
async def test_the_pickers_certificate_from_files_is_verified_where_a_ca_is_given(edge: str, tmp_path: Path) -> None:
    """Gateways and pickers that did not agree on TLS failed with gRPC status 14 elsewhere (higress #3701)."""
    pair, other = self_signed_pair(["localhost"]), self_signed_pair(["localhost"])
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    (tmp_path / "other.crt").write_bytes(other.certificate)
    for ca, status in (("tls.crt", 200), ("other.crt", 503)):
        async with running_stack(
            Profile.FAST,
            edge,
            tls=True,
            picker_ca=str(tmp_path / ca),
            failure_mode=FailureMode.CLOSED,
            args=("--cert-path", str(tmp_path)),
        ) as stack:
            assert {(await stack.ask(BODY)).status for _ in range(5)} == {status}


async def test_an_unlisted_pool_is_steered_by_the_picker_alone() -> None:
    """A pooled connection must not outlive the pick that it was opened for (agentgateway #437)."""
    async with running_stack(Profile.GATEWAY, listed=False) as stack:

        async def client() -> set[str]:
            workers = set()
            for _ in range(125):
                answer = await stack.ask(BODY)
                assert answer.status == 200
                assert answer.account["headers"][DESTINATION] == answer.account["worker"] == answer.headers["x-worker"]
                workers.add(answer.account["worker"])
            return workers

        seen = await asyncio.gather(*(client() for _ in range(8)))
        assert set().union(*seen) == {w.address for w in stack.workers}
        assert sum(w.connections for w in stack.workers) < 500


@pytest.mark.parametrize("profile", Profile)
async def test_envoy_follows_a_pool_that_changes_and_serves_it_without_the_picker(
    profile: Profile, tmp_path: Path
) -> None:
    pool = tmp_path / "endpoints.yaml"
    pool.write_text("endpoints: []\n")
    args = ("--endpoints-file", str(pool))
    async with running_stack(profile, workers=1, followed=True, args=args) as stack, running_worker("late") as late:
        host, port = late.address.split(":")
        pool.write_text(f"endpoints:\n- address: {host}\n  ports: {port}\n")

        async def serving() -> object:
            return (await stack.ask(BODY)).account["worker"]

        await until(serving, lambda worker: worker == late.address)
        await stack.picker.kill()
        await stack.picker_is_left()
        answers = [await stack.ask(BODY) for _ in range(8)]
        assert {a.account["worker"] for a in answers} == {stack.workers[0].address, late.address}


@pytest.mark.parametrize("profile", Profile)
async def test_a_session_stays_where_it_began_because_its_token_reaches_the_client(profile: Profile) -> None:
    async with running_stack(profile, args=("--config-text", AFFINITY)) as stack:
        firsts = [await stack.ask(BODY) for _ in range(6)]
        for first in firsts:
            token = first.headers["x-session-token"]
            again = [await stack.ask(BODY, x_session_token=token) for _ in range(3)]
            assert {a.account["worker"] for a in again} == {first.account["worker"]}
            assert {a.headers["x-session-token"] for a in again} == {token}


@pytest.mark.parametrize("usage", [False, True], ids=["unseen", "usage"])
async def test_the_fast_profile_counts_tokens_where_responses_are_observed(usage: bool) -> None:
    async with running_stack(Profile.FAST, usage=usage) as stack:
        reply = echo(body=EVENTS, content_type="text/event-stream")
        answers = await asyncio.gather(*(stack.ask(STREAM, **reply) for _ in range(30)))
        assert {a.body.decode() for a in answers} == {EVENTS}
        await stack.idle()

        async def cached() -> dict[str, float]:
            return await stack.picker.gauges("inference_objective_prompt_cached_tokens_sum")

        if usage:
            await until(cached, lambda samples: sum(samples.values()) == 30 * 96)
        assert sum((await cached()).values()) == (30 * 96 if usage else 0)
        assert sum((await stack.picker.gauges("inference_objective_request_total")).values()) == 30
