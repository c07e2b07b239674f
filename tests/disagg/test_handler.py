"""Who prefills and who decodes: by the field's deciders, by time, by a pull from a peer; and what follows of it."""

from __future__ import annotations

from random import Random

import pytest

from epp.config import ConfigError, read
from epp.decision import Decision
from epp.disagg import headers
from epp.endpoint import Endpoint, Pool
from epp.plugin import Outcome
from epp.request import InferenceRequest
from epp.scheduler import Scheduler, Unschedulable
from tests.pools import NOW, request

HEAD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefill-filter
- type: decode-filter
- type: encode-filter
- type: expected-ttft-scorer
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 1000}
- type: always-disagg-multimodal-decider
- type: disagg-profile-handler
  parameters: {%s}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: expected-ttft-scorer}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: expected-ttft-scorer}]
"""
ENCODE = "- name: encode\n  plugins: [{pluginRef: encode-filter}]\n"
BY_DECIDER = "deciders: {prefill: prefix-based-pd-decider}"
LONG = 40_000


def workers(*roles: str) -> Pool:
    """One endpoint for each role, scraped now; "" has no role."""
    labels = [{"llm-d.ai/role": role} if role else {} for role in roles]
    pool = Pool(Endpoint("10.0.0.1", 8000 + i, labels=each) for i, each in enumerate(labels))
    for endpoint in pool.endpoints:
        endpoint.set("scraped_at", NOW)
        for name in ("waiting", "running", "kv_usage"):
            endpoint.set(name, 0.0)
        endpoint.set("prefill_rate", 10_000.0)
    return pool


def scheduler(parameters: str = "", extra: str = "") -> Scheduler:
    return Scheduler(read(HEAD % parameters + extra, source="test"), random=Random(1))


def decide(made: Scheduler, pool: Pool, asked: InferenceRequest | None = None, tokens: int = LONG) -> Decision:
    return made.schedule(asked or request(b"x" * 4 * tokens, prompt_tokens=tokens), pool.candidates(NOW), at=0.0)


def ports(decision: Decision) -> tuple[int, int | None]:
    """Of the destination and of who prefills."""
    return decision.endpoints[0].port, decision.prefill.port if decision.prefill else None


@pytest.mark.parametrize(("tokens", "prefill"), [(999, None), (1000, 8000), (LONG, 8000)])
def test_the_fields_threshold_counts_the_tokens_that_the_decoding_endpoint_lacks(
    tokens: int, prefill: int | None
) -> None:
    decision = decide(scheduler(BY_DECIDER), workers("prefill", "decode"), tokens=tokens)
    assert ports(decision) == (8001, prefill)
    assert decision.kind == ("prefill-decode" if prefill else "decode-only")
    assert decision.headers == ({headers.PREFILLER: "10.0.0.1:8000"} if prefill else {})


def test_by_time_a_long_prompt_goes_to_an_idle_prefill_worker_and_a_short_one_stays() -> None:
    pool = workers("prefill", "prefill", "decode", "decode")
    for endpoint in pool.endpoints[2:]:
        endpoint.set("running", 30)
    made = scheduler()
    long = decide(made, pool)
    assert long.kind == "prefill-decode"
    assert long.prefill in pool.endpoints[:2]
    assert long.endpoints[0] in pool.endpoints[2:]
    assert long.headers[headers.PREFILLER].split(",") == [
        long.prefill.address,
        *(e.address for e in pool.endpoints[:2] if e is not long.prefill),
    ]
    short = decide(made, pool, tokens=100)
    assert (short.kind, short.headers, short.notes["alone"]) == ("decode-only", {}, "small-remainder")


def test_by_time_a_prompt_that_the_decoding_endpoint_holds_stays_there() -> None:
    pool, made = workers("prefill", "decode", "decode"), scheduler()
    asked = request(b"x" * 4 * LONG, prompt_tokens=LONG)
    first = decide(made, pool, asked)
    made.picked(asked, first, NOW)
    made.finished(asked, first.endpoints[0], Outcome(status=200), NOW)
    again = decide(made, pool)
    assert again.endpoints[0] is first.endpoints[0]
    assert (again.prefill, again.notes["alone"]) == (None, "small-remainder")


def test_the_next_request_prefers_the_prefiller_that_holds_the_prefix() -> None:
    pool, made = workers("prefill", "prefill", "prefill", "decode"), scheduler("minTokens: 0")
    pool.endpoints[3].set("running", 64)
    asked = request(b"y" * 4 * LONG, prompt_tokens=LONG)
    first = decide(made, pool, asked)
    made.picked(asked, first, NOW)
    made.finished(asked, first.endpoints[0], Outcome(status=200), NOW)
    grown = request(b"y" * 4 * LONG + b"z" * 8000, prompt_tokens=LONG + 2000)
    pool.endpoints[3].set("kv_usage", 0.1)
    producer = made.plugins["approx-prefix-cache-producer"]
    producer.removed(pool.endpoints[3])  # the decoding worker has dropped it
    assert decide(made, pool, grown).prefill is first.prefill


def test_a_busy_prefill_worker_is_passed_over_for_another_and_all_busy_for_none() -> None:
    pool, made = workers("prefill", "prefill", "decode"), scheduler()
    pool.endpoints[2].set("running", 20)
    pool.endpoints[0].count(requests=1, tokens=0)
    pool.endpoints[0].set("waiting", 50)
    assert ports(decide(made, pool)) == (8002, 8001)
    pool.endpoints[1].set("waiting", 50)
    busy = decide(made, pool)
    assert (busy.prefill, busy.notes["alone"]) == (None, "sooner-alone")
    assert isinstance(busy.notes["alone_s"], float)


@pytest.mark.parametrize(
    ("roles", "change", "reason"),
    [
        (("decode", "decode"), "", "no-prefill-worker"),
        (("prefill", "decode"), "full", "decode-cache-full"),
        (("prefill", "decode"), "saturated", "link-saturated"),
    ],
)
def test_what_cannot_be_paired_is_decoded_alone_with_the_reason(
    roles: tuple[str, ...], change: str, reason: str
) -> None:
    pool, made = workers(*roles), scheduler("maxTransfers: 1")
    if change == "full":
        pool.endpoints[-1].set("kv_usage", 0.99)
    if change == "saturated":
        made.plugins["disagg-profile-handler"].transfers = 1  # type: ignore[attr-defined]
    decision = decide(made, pool)
    assert decision.prefill is None
    assert f"decode-alone:{reason}" in decision.reasons


@pytest.mark.parametrize("role", ["both", "prefill-decode"])
def test_workers_that_do_both_prefill_for_each_other_never_for_themselves(role: str) -> None:
    pool, made = workers(role, role), scheduler()
    pool.endpoints[0].set("waiting", 50)
    decision = decide(made, pool)
    assert decision.prefill is not decision.endpoints[0]


def test_without_a_decode_worker_nobody_can_serve() -> None:
    with pytest.raises(Unschedulable, match="all-filtered"):
        decide(scheduler(), workers("prefill", "prefill"))


def test_encoders_are_named_for_prompts_with_media_alone() -> None:
    made = scheduler("deciders: {encode: always-disagg-multimodal-decider}", ENCODE)
    pool = workers("encode", "prefill", "decode")
    pool.endpoints[2].set("running", 20)
    asked = request(b"x" * 4 * LONG, prompt_tokens=LONG, media=True)
    decision = decide(made, pool, asked)
    assert decision.kind == "encode-prefill-decode"
    assert decision.headers == {headers.ENCODERS: "10.0.0.1:8000", headers.PREFILLER: "10.0.0.1:8001"}
    assert headers.ENCODERS not in decide(made, pool).headers


@pytest.mark.parametrize("carrier", ["prefill", "header"])
def test_a_prefix_that_a_busy_peer_holds_is_pulled_where_that_is_sooner(carrier: str) -> None:
    made = scheduler(f"peerPull: {carrier}, minPullGain: 50ms")
    pool = workers("", "")
    asked = request(b"x" * 4 * LONG, prompt_tokens=LONG)
    first = decide(made, pool, asked)
    made.picked(asked, first, NOW)
    made.finished(asked, first.endpoints[0], Outcome(status=200), NOW)
    holder = first.endpoints[0]
    (idle,) = (e for e in pool.endpoints if e is not holder)
    holder.set("kv_usage", 0.99)
    pulled = decide(made, pool)
    assert (pulled.kind, pulled.endpoints[0]) == ("peer-pull", idle)
    name = headers.PREFILLER if carrier == "prefill" else headers.KV_SOURCE
    assert pulled.headers == {name: holder.address}
    assert pulled.prefill is (holder if carrier == "prefill" else None)
    holder.set("kv_usage", 0.5)
    assert decide(made, pool).kind == "decode-only"


def test_a_prefix_is_pulled_away_from_a_peer_that_decodes_for_many() -> None:
    made, pool = scheduler("peerPull: prefill, decodeLoad: 20ms"), workers("", "")
    asked = request(b"x" * 4 * LONG, prompt_tokens=LONG)
    first = decide(made, pool, asked)
    made.picked(asked, first, NOW)
    made.finished(asked, first.endpoints[0], Outcome(status=200), NOW)
    holder = first.endpoints[0]
    assert decide(made, pool).endpoints[0] is holder
    holder.set("running", 60)
    pulled = decide(made, pool)
    assert (pulled.kind, pulled.prefill) == ("peer-pull", holder)
    assert pulled.endpoints[0] is not holder


def test_transfers_are_counted_and_what_they_took_is_learned() -> None:
    pool, made = workers("prefill", "decode"), scheduler()
    pool.endpoints[1].set("running", 400)
    handler = made.plugins["disagg-profile-handler"]
    before = handler.transfer.factor  # type: ignore[attr-defined]
    for i in range(20):
        asked = request(b"%04d" % i * LONG, prompt_tokens=LONG)
        decision = decide(made, pool, asked)
        assert decision.estimate.ttft_s is not None
        made.picked(asked, decision, NOW)
        assert handler.transfers == 1  # type: ignore[attr-defined]
        outcome = Outcome(status=200, first_token_s=decision.estimate.ttft_s + 2.0)
        made.finished(asked, decision.endpoints[0], outcome, NOW)
        pool.endpoints[0].set("prefill_until", NOW)
    assert handler.transfers == 0  # type: ignore[attr-defined]
    assert handler.transfer.factor > 1.5 * before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("deciders: {prefill: nobody}", r'"nobody" is not in plugins'),
        ("profiles: {decode: other}", r'needs a profile "other"'),
        ("profiles: {decode: decode}, decodeProfile: decode", "exclude each other"),
        ("minGain: -1s", "minGain"),
        ("bandwidth: 0", "bandwidth"),
        ("peerPull: sometimes", "peerPull"),
    ],
)
def test_wrong_parameters_are_refused_by_name(parameters: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scheduler(parameters)
