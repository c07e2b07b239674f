"""A picked worker that cannot be reached: the request goes on to the next of the list, and the picker learns of it."""

from __future__ import annotations

import json

import pytest

from epp.envoy_options import FailureMode, Profile
from tests.e2e.envoy import until
from tests.e2e.serving import DESTINATION, Answer, Stack, running_stack

DEAD = "127.0.0.1:9"
"""The discard port: nothing listens."""

THREE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft-scorer
- type: active-request-scorer
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 3}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: expected-ttft-scorer
    weight: 10
  - pluginRef: active-request-scorer
    weight: 0.1
  - pluginRef: max-score-picker
"""
# Scrapes would find out at once that nothing listens.
ARGS = ("--config-text", THREE, "--scrape-interval", "60")


def prompt(number: int) -> bytes:
    return json.dumps({"model": "m", "prompt": f"{number} The quick brown fox. " * 400}).encode()


async def fallen_back(stack: Stack) -> tuple[bytes, Answer]:
    """A request whose first choice was the dead worker, and its answer."""
    for number in range(200):
        answer = await stack.ask(prompt(number))
        assert answer.status == 200
        picked = answer.account["headers"][DESTINATION].split(",")
        assert len(set(picked)) == 3
        if picked[0] == DEAD:
            assert answer.account["worker"] == picked[1]
            return prompt(number), answer
    raise AssertionError("the dead worker was never the first choice")


@pytest.mark.parametrize(("profile", "usage"), [(Profile.GATEWAY, False), (Profile.FAST, False), (Profile.FAST, True)])
async def test_the_next_of_the_list_serves_and_what_it_has_cached_is_known(profile: Profile, usage: bool) -> None:
    """Where no response is shown the picker cannot know, and nothing is counted twice all the same."""
    async with running_stack(profile, dead=(DEAD,), failure_mode=FailureMode.CLOSED, usage=usage, args=ARGS) as stack:
        body, answer = await fallen_back(stack)
        await stack.idle()

        async def elsewhere() -> float:
            reasons = await stack.picker.gauges("kvsteer_reasons_total")
            return sum(value for labels, value in reasons.items() if '"served-elsewhere"' in labels)

        if profile is Profile.GATEWAY or usage:
            await until(elsewhere, lambda n: n >= 1)
            again = [await stack.ask(body) for _ in range(5)]
            firsts = {a.account["headers"][DESTINATION].split(",")[0] for a in again}
            assert firsts == {answer.account["worker"]}
        else:
            assert await elsewhere() == 0
        await stack.idle()
        ended = await stack.picker.gauges("inference_objective_request_duration_seconds_count")
        asked = await stack.picker.gauges("inference_objective_request_total")
        assert sum(ended.values()) == sum(asked.values()) > 0
