from typing import Any

import numpy as np
import pytest

from epp.config import read
from epp.endpoint import Candidates
from epp.kvcache.producer import ApproxPrefixCache, PrefixParameters
from epp.plugin import Outcome
from epp.request import InferenceRequest
from tests.pools import candidates, plugin, request

PROMPT = bytes(range(256)) * 8  # 512 tokens, 32 blocks


def cached(producer: ApproxPrefixCache, pool: Candidates, asked: InferenceRequest) -> list[float]:
    pool.cached_tokens = np.zeros(len(pool))
    producer.produce(asked, pool)
    return [float(x) for x in pool.cached_tokens]


def send(producer: ApproxPrefixCache, pool: Candidates, asked: InferenceRequest, index: int) -> None:
    producer.produce(asked, pool)
    producer.picked(asked, {"default": pool[index]})


def test_what_was_sent_to_an_endpoint_is_cached_there() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(3)
    send(producer, pool, request(PROMPT), 1)
    assert cached(producer, pool, request(PROMPT)) == [0, 512, 0]
    assert cached(producer, pool, request(PROMPT[:1000] + b"other" * 400)) == [0, 240, 0]


def test_two_ports_of_one_pod_are_two_caches() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    for rank, endpoint in enumerate(pool):
        endpoint.name, endpoint.rank = "pod-0", rank
    send(producer, pool, request(PROMPT), 1)
    assert cached(producer, pool, request(PROMPT)) == [0, 512]


@pytest.mark.parametrize(
    "other", [{"model": "adapter-1"}, {"cache_salt": "s1"}, {"model": "s1"}, {"cache_salt": "s2", "model": "m"}]
)
def test_another_adapter_or_salt_has_nothing_cached(other: dict[str, Any]) -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    send(producer, pool, request(PROMPT), 1)
    assert cached(producer, pool, request(PROMPT, **other)) == [0, 0]


@pytest.mark.parametrize("asked", [request(b"hi"), request(), request(b"")])
def test_a_prompt_shorter_than_a_block_matches_nothing_and_harms_nothing(asked: InferenceRequest) -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    for _ in range(2):
        assert cached(producer, pool, asked) == [0, 0]
        producer.picked(asked, {"default": pool[0]})
        producer.finished(asked, pool[0], Outcome(status=200))
    assert producer.history.bytes == 0


def test_every_item_of_a_list_counts() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    a, b = PROMPT, PROMPT[::-1]
    send(producer, pool, request(a), 0)
    send(producer, pool, request(b), 1)
    assert cached(producer, pool, request(a, b)) == [512, 512]
    assert cached(producer, pool, request(a, a)) == [1024, 0]


def test_token_ids_are_matched_by_the_block() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)

    def ids(count: int) -> InferenceRequest:
        asked = request(prompt_tokens=count)
        asked.prompts = (np.arange(count, dtype=np.uint32),)
        return asked

    send(producer, pool, ids(100), 0)
    assert cached(producer, pool, ids(200)) == [96, 0]


def test_never_more_is_cached_than_the_prompt_has() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(1)
    send(producer, pool, request(PROMPT), 0)
    assert cached(producer, pool, request(PROMPT, prompt_tokens=100)) == [100]


@pytest.mark.parametrize("told_by", ["address", "endpoint"])
def test_history_follows_the_endpoint_that_served(told_by: str) -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    asked = request(PROMPT)
    send(producer, pool, asked, 0)
    final = pool[0] if told_by == "address" else pool[1]
    producer.finished(asked, final, Outcome(status=200, served=pool[1].address))
    assert cached(producer, pool, request(PROMPT)) == [0, 512]


def test_what_a_stranger_served_is_cached_nowhere() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    asked = request(PROMPT)
    send(producer, pool, asked, 0)
    producer.finished(asked, pool[0], Outcome(status=200, served="10.9.9.9:1"))
    assert cached(producer, pool, request(PROMPT)) == [0, 0]


def test_a_failed_request_has_cached_nothing_but_what_was_there_before_stays() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    first = request(PROMPT[:1024])
    send(producer, pool, first, 0)
    producer.finished(first, pool[0], Outcome(status=200, served=pool[0].address))
    longer = request(PROMPT)
    send(producer, pool, longer, 0)
    producer.finished(longer, pool[0], Outcome(status=503))
    assert cached(producer, pool, request(PROMPT)) == [256, 0]


def test_a_removed_endpoint_is_forgotten_and_its_running_request_ends_well() -> None:
    producer, pool = plugin(ApproxPrefixCache), candidates(2)
    asked, late = request(PROMPT), request(PROMPT)
    send(producer, pool, asked, 0)
    producer.produce(late, pool)
    gone = pool[0]
    pool.pool.update(remove=[gone])
    producer.removed(gone)
    producer.picked(late, {"default": gone})
    producer.finished(asked, gone, Outcome(status=502))
    assert producer.history.bytes == 0
    assert cached(producer, pool.pool.candidates(101.0), request(PROMPT)) == [0]


def test_block_and_cache_size_come_from_the_worker_unless_tuning_is_off() -> None:
    pool = candidates(2)
    for endpoint in pool:
        endpoint.block_size, endpoint.cache_blocks = 64, 4
    tuned = plugin(ApproxPrefixCache)
    send(tuned, pool, request(PROMPT), 0)
    assert cached(tuned, pool, request(PROMPT)) == [256, 0]
    fixed = plugin(ApproxPrefixCache, auto_tune=False, lru_capacity_per_server=2)
    send(fixed, pool, request(PROMPT), 0)
    assert cached(fixed, pool, request(PROMPT)) == [32, 0]


def test_the_number_of_blocks_looked_at_can_be_limited() -> None:
    for parameters, tokens in (
        ({}, 512),
        ({"max_prefix_blocks_to_match": 4}, 64),
        ({"max_prefix_blocks_to_match": 4, "max_prefix_tokens_to_match": 160}, 160),
    ):
        producer, pool = plugin(ApproxPrefixCache, **parameters), candidates(1)
        send(producer, pool, request(PROMPT), 0)
        assert cached(producer, pool, request(PROMPT)) == [tokens]


def test_parameters_given_to_the_scorer_reach_the_producer_that_is_added_for_it() -> None:
    config = read(
        """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
  parameters: {blockSizeTokens: 128, lruCapacityPerServer: 3, maxPrefixBlocksToMatch: 256, autoTune: false}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
""",
        source="test",
    )
    assert config.plugin("approx-prefix-cache-producer").parameters == PrefixParameters(
        auto_tune=False, block_size_tokens=128, lru_capacity_per_server=3, max_prefix_blocks_to_match=256
    )
