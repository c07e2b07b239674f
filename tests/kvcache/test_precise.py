"""What the precise producer tells the scorers, of real indexes that follow workers' events."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config import read
from epp.endpoint import Candidates, Endpoint
from epp.estimate import TTFTEstimator
from epp.kvcache.blocks import Keys, block_extras, extend, token_root
from epp.kvcache.events.confidence import Level
from epp.kvcache.events.decoder import Batch, Event, Ids, Removed, Stored
from epp.kvcache.events.follower import Follower
from epp.kvcache.events.ledger import Ledger, ServedAdapters
from epp.kvcache.index import BlockIndex
from epp.kvcache.precise import DISTRUSTED, NOT_FOLLOWED, PrecisePrefixCache, Restore
from epp.kvcache.tier import Tier
from epp.kvcache.tokens.local import Prompt
from epp.plugin import Outcome
from epp.request import InferenceRequest
from epp.scheduler import Scheduler
from epp.shared.learning import Holding
from tests.pools import NOW, candidates, plugin, request

MODEL = "m"
SIZE = 4
END = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
SERVED = Outcome(status=200, duration_s=1.0)
LATER = NOW + 100
"""When all grace is over."""


def ids(count: int, first: int = 0) -> Ids:
    return np.arange(first, first + count, dtype=np.uint32)


def keys(tokens: Ids, size: int = SIZE, *, adapter: str = "", extras: dict[int, bytes] | None = None) -> Keys:
    return extend(token_root(model=MODEL, adapter=adapter, salt=""), tokens, size, extras)


def stored(
    tokens: Ids,
    tier: Tier = Tier.GPU,
    *,
    size: int = SIZE,
    adapter: str = "",
    extras: Sequence[Sequence[str]] = (),
    parent: int | None = None,
) -> Stored:
    """The whole blocks of a prompt, under engine hashes that are as good as any."""
    blocks = len(tokens) // size
    named = {i: block_extras(e) for i, e in enumerate(extras) if e}
    hashes = keys(tokens[: blocks * size], size, adapter=adapter, extras=named) ^ np.uint64(0x5A5A)
    told = tuple(map(tuple, extras))
    return Stored(hashes, parent, tokens[: blocks * size], size, adapter, told, tier, 0, "", 0)


class Fleet:
    """A pool of which every endpoint is followed, and the producer that knows what they tell."""

    def __init__(self, count: int = 2, producer: PrecisePrefixCache | None = None, **parameters: Any) -> None:
        self.producer = producer or plugin(PrecisePrefixCache, **parameters)
        self.pool = candidates(count).pool
        self.sent: dict[Endpoint, int] = {}
        self.followers = {e: self._follow(e) for e in self.pool.endpoints}
        self.producer.followers = self.followers

    def __getitem__(self, index: int) -> Endpoint:
        return self.pool.endpoints[index]

    @property
    def index(self) -> BlockIndex:
        return self.producer.index

    def _follow(self, endpoint: Endpoint) -> Follower:
        """Followed from the worker's start: it answers that it has published nothing."""
        endpoint.block_size = SIZE
        follower = Follower(Ledger(self.index, self.index.join(endpoint), MODEL, adapters=ServedAdapters(endpoint)))
        follower.connected(NOW)
        follower.replayed(END, NOW)
        follower.work(NOW)
        return follower

    def tell(self, which: int, *events: Event, skip: int = 0) -> None:
        """A batch of one worker; `skip` batches before it are lost for good."""
        endpoint = self[which]
        follower = self.followers[endpoint]
        seq = self.sent.get(endpoint, 0) + skip
        self.sent[endpoint] = seq + 1
        if follower.batch(seq, Batch(float(seq + 1), 0, events), NOW, 0.0):
            follower.replayed(END, NOW)
        follower.work(NOW)

    def ask(self, asked: InferenceRequest, now: float = NOW) -> Candidates:
        found = self.pool.candidates(now)
        self.producer.produce(asked, found)
        return found

    def cached(self, asked: InferenceRequest, now: float = NOW) -> list[float]:
        return [float(x) for x in self.ask(asked, now).cached_tokens]

    def send(self, asked: InferenceRequest, which: int, now: float = NOW) -> InferenceRequest:
        self.ask(asked, now)
        self.producer.picked(asked, {"default": self[which]})
        return asked


def ask(*prompts: Ids | Prompt, **fields: Any) -> InferenceRequest:
    """A request of these token ids, and of text of four bytes a token, for the history."""
    known = tuple(p if isinstance(p, Prompt) else Prompt(p) for p in prompts)
    texts = tuple(b"".join(b"%04x" % t for t in p.ids.tolist()) for p in known)
    fields.setdefault("tokens", known)
    fields.setdefault("base_model", MODEL)
    fields.setdefault("prompt_tokens", sum(len(p.ids) for p in known))
    return request(*texts, **fields)


# -- what a match is ---------------------------------------------------------------------------------------------------


def test_what_events_tell_is_cached_where_they_come_from_by_tier() -> None:
    fleet = Fleet(3)
    fleet.tell(0, stored(ids(40)))
    fleet.tell(1, stored(ids(8)), stored(ids(20), Tier.CPU))
    found = fleet.ask(ask(ids(100)))
    assert found.cached_by_tier is not None
    assert found.cached_by_tier.tolist() == [[40, 8, 0], [0, 12, 0], [0, 0, 0], [0, 0, 0]]
    assert found.cached_tokens.tolist() == [40, 20, 0]


@pytest.mark.parametrize(("length", "cached"), [(40, 36), (41, 40), (39, 36), (37, 36), (36, 32), (1, 0), (4, 0)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    fleet = Fleet(1)
    fleet.tell(0, stored(ids(40)))
    assert fleet.cached(ask(ids(length))) == [cached]


def test_what_the_last_token_costs_is_taken_from_the_slowest_tier() -> None:
    fleet = Fleet(1)
    fleet.tell(0, stored(ids(8)), stored(ids(40), Tier.CPU))
    found = fleet.ask(ask(ids(40)))
    assert found.cached_by_tier is not None
    assert found.cached_by_tier[:, 0].tolist() == [8, 28, 0, 0]


def test_a_copy_on_the_host_outlives_that_on_the_device() -> None:
    fleet = Fleet(1)
    event = stored(ids(40))
    fleet.tell(0, event, stored(ids(40), Tier.CPU))
    fleet.tell(0, Removed(event.hashes, Tier.GPU, 0))
    found = fleet.ask(ask(ids(100)))
    assert found.cached_by_tier is not None
    assert found.cached_by_tier[:, 0].tolist() == [0, 40, 0, 0]


def test_every_item_of_a_list_counts_with_its_own_last_token() -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored(ids(40)))
    fleet.tell(1, stored(ids(40, first=1000)))
    assert fleet.cached(ask(ids(40), ids(60, first=1000), ids(60))) == [36 + 40, 40]


def test_workers_of_other_block_sizes_are_matched_each_by_its_own() -> None:
    fleet = Fleet(3)
    for which, size in enumerate((4, 6, 32)):
        fleet.tell(which, stored(ids(50), size=size))
    assert fleet.cached(ask(ids(100))) == [48, 48, 32]


def test_before_its_first_event_a_worker_has_the_block_size_of_its_metrics() -> None:
    fleet = Fleet(1)
    fleet[0].block_size = 8
    fleet.send(ask(ids(50)), 0)
    assert fleet.cached(ask(ids(100))) == [48]


@given(st.data())
def test_what_the_index_tells_is_the_leading_run_of_blocks_stored(data: st.DataObject) -> None:
    """Against the plain definition: from the front, on the device as far as it goes, then on the host."""
    size, length = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 60))
    fleet = Fleet(1)
    blocks = length // size
    places = data.draw(st.lists(st.sampled_from("gcb-"), min_size=blocks, max_size=blocks))
    whole = stored(ids(length), size=size)
    if blocks:
        fleet.tell(0, whole, stored(ids(length), Tier.CPU, size=size))
    for tier, staying in ((Tier.GPU, "gb"), (Tier.CPU, "cb")):
        gone = whole.hashes[[p not in staying for p in places]]
        if len(gone):
            fleet.tell(0, Removed(gone, tier, 0))
    device = next((i for i, p in enumerate(places) if p not in "gb"), blocks)
    host = next((i for i, p in enumerate(places) if i >= device and p not in "cb"), blocks)
    usable = (length - 1) // size
    found = fleet.ask(ask(ids(length)))
    expected = [min(device, usable) * size, (min(host, usable) - min(device, usable)) * size]
    if blocks:
        assert found.cached_by_tier is not None
        assert found.cached_by_tier[:2, 0].tolist() == expected
    assert found.cached_tokens.tolist() == [sum(expected)]


# -- what tells prompts apart ------------------------------------------------------------------------------------------


def test_an_adapters_blocks_are_its_own() -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored(ids(40)))
    fleet.tell(1, stored(ids(40), adapter="sql"))
    assert fleet.cached(ask(ids(100))) == [40, 0]
    assert fleet.cached(ask(ids(100), model="sql", adapter="sql")) == [0, 40]
    assert fleet.cached(ask(ids(100), model="other", adapter="other")) == [0, 0]


def test_a_salts_blocks_are_its_own() -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored(ids(40)))
    fleet.tell(1, stored(ids(40), extras=[["s1"], *[[]] * 9]))
    assert fleet.cached(ask(ids(100))) == [40, 0]
    assert fleet.cached(ask(ids(100), cache_salt="s1")) == [0, 40]
    assert fleet.cached(ask(ids(100), cache_salt="s2")) == [0, 0]


def test_media_name_the_blocks_that_their_placeholders_touch() -> None:
    def image(name: str) -> Any:
        return [[SimpleNamespace(offset=6, length=5, identifier=name)]]

    fleet = Fleet(2)
    fleet.tell(0, stored(ids(40), extras=[["s"], ["cat"], ["cat"], *[[]] * 7]))
    fleet.tell(1, stored(ids(40), extras=[["s"], ["dog"], ["dog"], *[[]] * 7]))
    assert fleet.cached(ask(ids(100), token_media=image("cat"), cache_salt="s")) == [40, 4]
    assert fleet.cached(ask(ids(100), token_media=image("dog"), cache_salt="s")) == [4, 40]
    assert fleet.cached(ask(ids(100), cache_salt="s")) == [4, 4]


def test_media_in_a_prompts_first_block_come_before_the_salt() -> None:
    fleet = Fleet(1)
    fleet.tell(0, stored(ids(40), extras=[["cat", "s"], *[[]] * 9]))
    image = [[SimpleNamespace(offset=0, length=4, identifier="cat")]]
    assert fleet.cached(ask(ids(100), token_media=image, cache_salt="s")) == [40]


@given(st.data())
def test_keys_taken_over_from_an_earlier_turn_are_those_of_the_whole_prompt(data: st.DataObject) -> None:
    fleet = Fleet(2)
    fleet[0].block_size, fleet[1].block_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    salt = data.draw(st.sampled_from(["", "s"]))
    earlier = Prompt(ids(data.draw(st.integers(1, 60))))
    for _ in range(3):
        fleet.ask(ask(earlier, cache_salt=salt))
        shared = data.draw(st.integers(0, len(earlier.ids)))
        new = ids(data.draw(st.integers(1, 30)), first=data.draw(st.integers(1000, 1003)))
        turn = Prompt(np.concatenate([earlier.ids[:shared], new]), shared, earlier.notes)
        afresh = Prompt(turn.ids)
        fleet.ask(ask(turn, cache_salt=salt))
        fleet.ask(ask(afresh, cache_salt=salt))
        assert turn.notes.keys() == afresh.notes.keys()
        for name, whole in afresh.notes.items():
            np.testing.assert_array_equal(np.asarray(turn.notes[name]), np.asarray(whole))
        earlier = turn


def test_keys_of_another_salt_or_adapter_are_not_taken_over() -> None:
    fleet = Fleet(1)
    first = Prompt(ids(40))
    fleet.ask(ask(first))
    fleet.tell(0, stored(ids(40)))
    for other in ({"cache_salt": "s"}, {"adapter": "sql", "model": "sql"}):
        assert fleet.cached(ask(Prompt(ids(60), 40, first.notes), **other)) == [0]
    assert fleet.cached(ask(Prompt(ids(60), 40, first.notes))) == [40]


# -- whom to believe ---------------------------------------------------------------------------------------------------


def test_without_token_ids_the_history_scores_and_the_index_says_nothing() -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored(ids(64)))
    fleet.send(ask(ids(64), tokens=()), 1)
    asked = ask(ids(64), tokens=())
    assert fleet.cached(asked)[1] > 0
    assert fleet.cached(asked)[0] == 0
    assert fleet.producer.counters == {"precise": 0, "history": 3}


def test_a_request_without_prompts_is_counted_nowhere() -> None:
    fleet = Fleet(1)
    assert fleet.cached(request()) == [0]
    assert fleet.producer.counters == {"precise": 0, "history": 0}


def test_without_any_followed_worker_the_history_scores_and_the_reason_says_so() -> None:
    fleet = Fleet(2)
    fleet.producer.followers = {}
    first = fleet.send(ask(ids(64)), 1)
    again = ask(ids(64))
    assert fleet.cached(again) == [0, 64]
    assert first.reasons == again.reasons == [NOT_FOLLOWED]


def test_where_one_worker_is_not_followed_the_history_stands_in_for_it_alone() -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored(ids(40)))
    del fleet.followers[fleet[1]]
    fleet.send(ask(ids(64)), 1)
    asked = ask(ids(100))
    assert fleet.cached(asked) == [40, 64]
    assert asked.reasons == [DISTRUSTED]


def test_a_worker_whose_stream_is_down_counts_a_little_less() -> None:
    fleet = Fleet(2)
    for which in range(2):
        fleet.tell(which, stored(ids(40)))
    fleet.followers[fleet[1]].disconnected()
    asked = ask(ids(100))
    assert fleet.cached(asked) == [40, 36]
    assert asked.reasons == []


def test_a_worker_that_contradicts_is_discounted_then_left_to_the_history() -> None:
    fleet = Fleet(1)
    follower = fleet.followers[fleet[0]]
    seen: list[tuple[float, list[str]]] = []
    for turn in range(12):
        fleet.tell(0, stored(ids(40, first=1000 * turn)))
        asked = ask(ids(100, first=1000 * turn))
        seen.append((fleet.cached(asked)[0], asked.reasons))
        fleet.producer.picked(asked, {"default": fleet[0]})
        fleet.producer.finished(asked, fleet[0], Outcome(status=200, duration_s=0.1, cached_tokens=0))
    assert [seen[0], seen[-1]] == [(40, []), (0, [DISTRUSTED])]
    assert follower.confidence.level is Level.SUSPECT
    discounts = [tokens for tokens, reasons in seen if not reasons]
    assert discounts == sorted(discounts, reverse=True)
    assert 0 < discounts[-1] < 20
    assert follower.counters["over"] == 12


def test_lost_events_are_a_discount_until_answers_agree_again() -> None:
    fleet = Fleet(1)
    fleet.tell(0, stored(ids(40)))
    fleet.tell(0, stored(ids(40, first=1000)), skip=3)
    assert fleet.cached(ask(ids(100))) == [36]
    for _ in range(16):
        asked = fleet.send(ask(ids(100)), 0)
        fleet.producer.finished(asked, fleet[0], Outcome(status=200, duration_s=0.1, cached_tokens=40))
        fleet.index.expire(LATER)
    assert fleet.cached(ask(ids(100)), LATER) == [40]


def test_what_an_answer_counts_beyond_the_index_after_a_loss_is_entered() -> None:
    fleet = Fleet(1)
    fleet.tell(0, stored(ids(8)))
    fleet.tell(0, stored(ids(40, first=1000)), skip=1)
    asked = fleet.send(ask(ids(100)), 0)
    fleet.producer.finished(asked, fleet[0], Outcome(status=200, duration_s=0.1, cached_tokens=40))
    found = fleet.ask(ask(ids(100)), LATER)
    assert found.cached_tokens.tolist() == [36]


def test_never_more_is_cached_than_the_prompt_has() -> None:
    fleet = Fleet(1)
    fleet.tell(0, stored(ids(40)))
    assert fleet.cached(ask(ids(60), prompt_tokens=10)) == [10]


# -- what requests bring -----------------------------------------------------------------------------------------------


def test_a_requests_blocks_are_there_from_the_pick_until_a_grace_after_its_end() -> None:
    fleet = Fleet(2)
    asked = fleet.send(ask(ids(41)), 1)
    assert fleet.cached(ask(ids(100)), LATER) == [0, 40]
    fleet.producer.finished(asked, fleet[1], SERVED)
    grace = fleet.index.grace_s
    assert fleet.cached(ask(ids(100)), NOW + 1.0 + grace / 2) == [0, 40]
    assert fleet.cached(ask(ids(100)), NOW + 1.1 + grace) == [0, 0]


def test_what_an_event_confirmed_stays() -> None:
    fleet = Fleet(1)
    asked = fleet.send(ask(ids(41)), 0)
    fleet.tell(0, stored(ids(41)))
    fleet.producer.finished(asked, fleet[0], SERVED)
    assert fleet.cached(ask(ids(100)), LATER) == [40]


@pytest.mark.parametrize(
    "outcome", [Outcome(status=503), Outcome(status=200, served="10.9.9.9:1")], ids=["failed", "served-elsewhere"]
)
def test_a_request_that_failed_or_was_served_elsewhere_has_brought_nothing(outcome: Outcome) -> None:
    fleet = Fleet(2)
    fleet.tell(0, stored(ids(20)))
    asked = fleet.send(ask(ids(41)), 0)
    fleet.producer.finished(asked, fleet[0], outcome)
    assert fleet.cached(ask(ids(100))) == [20, 0]
    assert fleet.followers[fleet[0]].counters["over"] == 0


def test_a_list_of_prompts_is_not_held_against_a_worker() -> None:
    """Its one number of cached tokens is the sum over prompts that share blocks: it tells nothing of each."""
    fleet = Fleet(1)
    asked = fleet.send(ask(ids(40), ids(40)), 0)
    fleet.producer.finished(asked, fleet[0], Outcome(status=200, duration_s=0.1, cached_tokens=0))
    verdicts = fleet.followers[fleet[0]].counters
    assert verdicts["agreed"] == verdicts["over"] == verdicts["under"] == 0


def test_what_was_sent_to_a_worker_anchors_events_of_unknown_parents() -> None:
    fleet = Fleet(1)
    fleet.send(ask(ids(41)), 0)
    fleet.tell(0, stored(ids(40)[20:], parent=77))
    assert fleet.followers[fleet[0]].ledger.counters["anchored"] == 5


def test_what_was_sent_for_an_adapter_anchors_that_adapters_events_alone() -> None:
    fleet = Fleet(1)
    fleet.send(ask(ids(41), adapter="sql", model="sql"), 0)
    ledger, anchored = fleet.followers[fleet[0]].ledger, []
    for adapter in ("", "sql"):
        fleet.tell(0, stored(ids(40)[20:], parent=77, adapter=adapter))
        anchored.append(ledger.counters["anchored"])
    assert anchored == [0, 5]


def test_two_profiles_claim_at_both_endpoints() -> None:
    fleet = Fleet(3)
    asked = ask(ids(41))
    fleet.ask(asked)
    fleet.producer.picked(asked, {"prefill": fleet[0], "decode": fleet[2]})
    assert fleet.cached(ask(ids(100))) == [40, 0, 40]
    fleet.producer.finished(asked, fleet[2], SERVED)
    assert fleet.cached(ask(ids(100))) == [0, 0, 40]


def test_an_endpoint_that_leaves_is_forgotten_and_its_running_request_ends_well() -> None:
    fleet = Fleet(2)
    gone = fleet[1]
    fleet.tell(1, stored(ids(40)))
    asked = fleet.send(ask(ids(60)), 1)
    fleet.pool.update(remove=[gone])
    fleet.index.leave(fleet.followers.pop(gone).ledger.holder)
    fleet.producer.removed(gone)
    assert fleet.cached(ask(ids(100))) == [0]
    fleet.producer.finished(asked, gone, Outcome(status=200, duration_s=0.1, cached_tokens=40))
    assert fleet.cached(ask(ids(100)), LATER) == [0]


# -- what lower tiers cost ---------------------------------------------------------------------------------------------


def test_what_lies_on_lower_tiers_costs_the_time_to_bring_it_back() -> None:
    fleet = Fleet(3, restore=Restore(cpu=100, disk=10, peer=1))
    fleet.tell(0, stored(ids(40)))
    fleet.tell(1, stored(ids(20)), stored(ids(40), Tier.CPU))
    fleet.tell(2, stored(ids(20), Tier.CPU), stored(ids(40), Tier.DISK))
    found = fleet.ask(ask(ids(100)))
    assert found.restore_s is not None
    assert found.restore_s.tolist() == pytest.approx([0, 0.2, 0.2 + 2.0])


def test_the_estimator_adds_the_time_to_restore() -> None:
    fleet = Fleet(2, restore=Restore(cpu=100))
    fleet.tell(0, stored(ids(40)))
    fleet.tell(1, stored(ids(40), Tier.CPU))
    asked = ask(ids(100))
    found = fleet.ask(asked)
    plugin(TTFTEstimator).produce(asked, found)
    assert found.expected_ttft is not None
    assert found.expected_ttft[1] - found.expected_ttft[0] == pytest.approx(0.4)


CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters: {{restore: {{cpu: {rate}}}}}
- type: expected-ttft-scorer
"""


@pytest.mark.parametrize(
    ("rate", "chosen"), [(200_000, 1), (1_000, 0)], ids=["cheaper-than-prefill", "dearer-than-prefill"]
)
def test_a_prefix_on_the_host_draws_its_request_if_bringing_it_back_is_cheaper(rate: int, chosen: int) -> None:
    """The start value of the prefill rate is 8000 tokens a second."""
    scheduler = Scheduler(read(CONFIG.format(rate=rate)))
    (producer,) = (p for p in scheduler.plugins.values() if isinstance(p, PrecisePrefixCache))
    fleet = Fleet(2, producer)
    fleet.tell(1, stored(ids(4000), Tier.CPU))
    decision = scheduler.schedule(ask(ids(4100)), fleet.pool.candidates(NOW), at=0)
    assert decision.endpoints[0] is fleet[chosen]
    (profile,) = decision.as_dict()["profiles"]
    at = profile["candidates"].index(fleet[1].address)
    assert profile["cached_by_tier"]["cpu"][at] == 4000
    assert profile["cached_by_tier"]["gpu"][at] == 0


# -- what replicas share -----------------------------------------------------------------------------------------------


def test_the_blocks_of_another_replicas_pick_are_there_until_a_grace_after_its_end() -> None:
    one, other = Fleet(), Fleet()
    asked = one.send(ask(ids(40)), 1)
    (taught,) = one.producer.taught(asked)
    end = other.producer.learn(other[1], taught, NOW)
    assert end is not None
    assert other.cached(ask(ids(100))) == one.cached(ask(ids(100))) == [0, 40]
    end(NOW + 10)
    assert other.cached(ask(ids(100)), NOW + 11) == [0, 40]
    assert other.cached(ask(ids(100)), LATER) == [0, 0]


def test_another_replicas_index_is_believed_as_one_that_is_partial() -> None:
    one, other = Fleet(), Fleet()
    one.tell(0, stored(ids(40)))
    one.tell(1, stored(ids(20), Tier.CPU))
    for follower in other.followers.values():
        follower.disconnected()
    for lot in one.producer.known():
        for holding in lot:
            there = other[one.pool.endpoints.index(holding.endpoint)]
            assert other.producer.believe(Holding(there, holding.keys, holding.tier, holding.group), NOW)
    found = other.ask(ask(ids(100)))
    assert found.cached_by_tier is not None
    assert found.cached_by_tier[:2].tolist() == [[36, 0], [0, 18]]
    assert {f.confidence.level for f in other.followers.values()} == {Level.PARTIAL}
    other.followers[other[0]].observed(40, 0, NOW, keys=keys(ids(40)), picked_at=NOW)
    assert other.cached(ask(ids(100)))[0] == 0


def test_where_all_events_were_seen_others_have_nothing_to_add() -> None:
    fleet = Fleet()
    fleet.tell(0, stored(ids(8)))
    assert fleet.producer.believe(Holding(fleet[0], keys(ids(40)), Tier.GPU), NOW)
    assert fleet.cached(ask(ids(100))) == [8, 0]


def test_what_others_know_of_a_worker_that_is_not_followed_yet_has_to_wait() -> None:
    fleet = Fleet()
    fleet.producer.followers = {}
    assert not fleet.producer.believe(Holding(fleet[0], keys(ids(40)), Tier.GPU), NOW)
