"""A worker's events become exactly the blocks it holds, under our keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache.blocks import Keys, block_extras, extend, token_root
from epp.kvcache.events.decoder import Batch, Cleared, Event, Removed, Stored, decode_batch
from epp.kvcache.events.ledger import Ledger, LedgerSettings, Singles, bundled
from epp.kvcache.index import BlockIndex
from epp.kvcache.tier import Tier
from tests.kvcache.events.worker import BLOCK, MODEL, Picker, Worker, ids, prompt_keys

DATA = Path(__file__).parents[2] / "data" / "kv_events"
CAPTURES = sorted(p for p in DATA.glob("*.jsonl") if not p.name.endswith(".replay.jsonl"))
PROMPT = list(range(100, 100 + 6 * BLOCK))


def new(**settings: int) -> tuple[BlockIndex, Ledger]:
    index = BlockIndex()
    return index, Ledger(index, index.join("e"), MODEL, settings=LedgerSettings(**settings))


def stored(
    first: int, end: int, *, prompt: list[int] = PROMPT, tier: Tier = Tier.GPU, named: bool = True, **fields: Any
) -> Stored:
    """Blocks first..end of a prompt; block i has the engine hash 1000 + i. `named`: with token ids."""
    values: dict[str, Any] = {
        "hashes": np.arange(1000 + first, 1000 + end, dtype=np.uint64),
        "parent": 999 + first if first and named else None,
        "ids": ids(prompt[first * BLOCK : end * BLOCK] if named else []),
        "block_size": BLOCK if named else 0,
        "adapter": "",
        "extras": (),
        "tier": tier,
        "group": 0,
        "kind": "",
        "window": 0,
    }
    return Stored(**{**values, **fields})


def removed(*blocks: int, tier: Tier = Tier.GPU, group: int = 0) -> Removed:
    return Removed(np.array([1000 + b for b in blocks], dtype=np.uint64), tier, group)


def matched(index: BlockIndex, keys: Keys) -> tuple[int, int]:
    """Leading blocks on the device, and on any tier."""
    matches = index.match(keys)
    return int(matches.device[0]), int(matches.usable[0])


class Truth:
    """What a capture's own decoding says is there: by engine hash, the tiers."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self.tiers: dict[int, set[Tier]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        hashes = [self._number(h) for h in event.get("block_hashes", ())]
        tier = Tier.of(event.get("medium") or "")
        match event["type"]:
            case "AllBlocksCleared":
                self.tiers.clear()
            case "BlockRemoved":
                for h in hashes:
                    self.tiers[h].remove(tier)
            case "BlockStored":
                if event["token_ids"]:
                    self._learn(event, hashes)
                for h in hashes:
                    self.tiers.setdefault(h, set()).add(tier)

    def _learn(self, event: dict[str, Any], hashes: list[int]) -> None:
        adapter, size = event["lora_name"] or "", event["block_size"]
        parent = event["parent_block_hash"]
        key = token_root(model=MODEL, adapter=adapter, salt="")
        if parent is not None:
            key = self.keys[self._number(parent)]
        for i, h in enumerate(hashes):
            strings = [s for s in event["extra_keys"][i] or () if s != adapter]
            extras = {0: block_extras(strings)} if strings else None
            key = extend(key, ids(event["token_ids"][i * size : (i + 1) * size]), size, extras).item(0)
            self.keys[h] = key

    @staticmethod
    def _number(value: Any) -> int:
        return int.from_bytes(bytes.fromhex(value["__bytes__"])[-8:], "big") if isinstance(value, dict) else int(value)


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda p: p.stem)
def test_after_every_captured_batch_the_index_holds_what_the_worker_holds(capture: Path) -> None:
    index, ledger = new()
    truth = Truth()
    for line in capture.read_text().splitlines():
        message = json.loads(line)
        for event in decode_batch(bytes.fromhex(message["frames"][2])).events:
            ledger.apply(event, 0.0)
        for told in message["batch"][1]:
            truth.apply(told)
        for tier in Tier:
            assert index.blocks(ledger.holder)[tier] == sum(tier in tiers for tiers in truth.tiers.values())
        for h, key in truth.keys.items():
            held = truth.tiers.get(h, set())
            assert matched(index, np.array([key], dtype=np.uint64)) == (int(Tier.GPU in held), int(bool(held)))
    assert len(ledger) == sum(bool(tiers) for tiers in truth.tiers.values())
    assert ledger.counters["unknown_removals"] == ledger.counters["orphans_dropped"] == ledger.waiting == 0


@pytest.mark.parametrize("path", sorted(DATA.glob("*.msgpack")), ids=lambda p: p.stem)
def test_captured_single_batches_are_applied_without_a_rest(path: Path) -> None:
    index, ledger = new()
    batch: Batch = decode_batch(path.read_bytes())
    first = next(e for e in batch.events if isinstance(e, Stored))
    ledger.apply(
        Stored(np.array([first.parent or 1], dtype=np.uint64), None, ids(range(32)), 32, "", (), first.tier, 0, "", 0),
        0.0,
    )
    for event in batch.events:
        ledger.apply(event, 0.0)
    assert sum(index.blocks(ledger.holder)) > 1
    assert ledger.waiting == 0


def test_a_clearing_takes_everything() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(0, 6, tier=Tier.CPU), 0.0)
    assert matched(index, prompt_keys(PROMPT)) == (6, 6)
    ledger.apply(Cleared(), 0.0)
    assert matched(index, prompt_keys(PROMPT)) == (0, 0)
    assert len(ledger) == 0


def test_an_adapters_blocks_match_requests_for_the_adapter_only() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6, adapter="a1"), 0.0)
    assert matched(index, prompt_keys(PROMPT, adapter="a1"))[0] == 6
    assert matched(index, prompt_keys(PROMPT))[0] == 0


def test_a_bare_string_that_names_an_adapter_the_worker_serves_is_the_adapter() -> None:
    index, ledger = new()
    ledger.adapters = {"a1"}
    ledger.apply(stored(0, 6, extras=(("a1", "salt"), *[("a1",)] * 5)), 0.0)
    ledger.apply(stored(0, 6, hashes=np.arange(6, dtype=np.uint64), extras=(("s1",), *[()] * 5)), 0.0)
    assert matched(index, prompt_keys(PROMPT, adapter="a1", salt="salt"))[0] == 6
    assert matched(index, prompt_keys(PROMPT, salt="s1"))[0] == 6
    assert matched(index, prompt_keys(PROMPT))[0] == 0


def test_media_identifiers_count_in_the_block_where_they_lie() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6, extras=((), (), ("img",), (), (), ())), 0.0)
    root = token_root(model=MODEL, adapter="", salt="")
    assert matched(index, extend(root, ids(PROMPT), BLOCK, {2: block_extras(["img"])}))[0] == 6
    assert matched(index, extend(root, ids(PROMPT), BLOCK, {2: block_extras(["other"])}))[0] == 2


def test_extras_of_a_block_are_told_apart_by_where_they_end() -> None:
    assert block_extras(["a", "b"]) != block_extras(["ab"]) != block_extras(["1:a"])


@pytest.mark.parametrize("single", [False, True])
def test_a_block_with_two_copies_stays_until_both_are_gone(single: bool) -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    for first, end in [(4, 5), (5, 6)] if single else [(4, 6)]:
        ledger.apply(stored(first, end), 0.0)
    keys = prompt_keys(PROMPT)
    ledger.apply(removed(5, 4), 0.0)
    assert matched(index, keys)[0] == 6
    ledger.apply(removed(5), 0.0)
    assert matched(index, keys)[0] == 5
    ledger.apply(removed(4), 0.0)
    assert matched(index, keys)[0] == 4
    assert len(ledger) == 4
    assert ledger.counters["unknown_removals"] == 0


def test_a_prompt_of_one_block_that_is_repeated_is_a_second_copy() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(0, 1), 0.0)
    ledger.apply(removed(0), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == 6


@pytest.mark.parametrize("blocks", [2, 6])
def test_blocks_told_again_from_the_beginning_are_no_second_copies(blocks: int) -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(0, blocks), 0.0)
    ledger.apply(removed(blocks - 1), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == blocks - 1


def test_after_a_loss_the_first_removal_takes_a_block_out() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(3, 6), 0.0)
    ledger.lost()
    ledger.apply(removed(5), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == 5


def test_a_loss_before_anything_was_known_leaves_the_count_of_copies_right() -> None:
    index, ledger = new()
    ledger.lost()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(3, 6), 0.0)
    ledger.apply(removed(5), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == 6


def test_a_copy_on_the_host_outlives_the_one_on_the_device_and_brings_it_back_by_hash() -> None:
    index, ledger = new()
    keys = prompt_keys(PROMPT)
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(0, 6, tier=Tier.CPU, named=False), 0.0)
    ledger.apply(removed(5, 4, 3, 2), 0.0)
    assert matched(index, keys) == (2, 6)
    ledger.apply(stored(2, 6, named=False), 0.0)
    assert matched(index, keys) == (6, 6)
    ledger.apply(removed(*range(6), tier=Tier.CPU), 0.0)
    assert matched(index, keys) == (6, 6)
    ledger.apply(removed(*range(6)), 0.0)
    assert matched(index, keys) == (0, 0)
    assert (len(ledger), ledger.counters["unknown_removals"]) == (0, 0)


def test_a_hash_alone_that_comes_just_after_the_device_copy_went_is_joined() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(removed(*range(6)), 0.0)
    ledger.apply(stored(0, 6, tier=Tier.CPU, named=False), 0.0)
    assert matched(index, prompt_keys(PROMPT)) == (0, 6)


def test_a_hash_alone_waits_for_its_tokens() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6, tier=Tier.CPU, named=False), 0.0)
    ledger.apply(removed(5, tier=Tier.CPU), 0.0)
    assert ledger.waiting == 5
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(removed(*range(6)), 0.0)
    assert matched(index, prompt_keys(PROMPT)) == (0, 5)
    assert ledger.waiting == 0


@pytest.mark.parametrize("order", [[5, 3, 0, 4, 1, 2], [5, 4, 3, 2, 1, 0]])
def test_children_before_their_parents_are_adopted(order: list[int]) -> None:
    index, ledger = new()
    for block in order:
        ledger.apply(stored(block, block + 1, tier=Tier.CPU), 0.0)
    assert matched(index, prompt_keys(PROMPT)) == (0, 6)
    assert ledger.waiting == 0
    assert ledger.counters["adopted"] == ledger.counters["parked"] > 0


def test_a_block_removed_while_it_waits_for_its_parent_does_not_come_back() -> None:
    index, ledger = new()
    ledger.apply(stored(3, 6), 0.0)
    ledger.apply(removed(4), 0.0)
    ledger.apply(stored(0, 3), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == 4
    ledger.apply(stored(4, 5), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == 6
    assert ledger.counters["unknown_removals"] == 0


def test_what_waits_is_bounded_and_the_oldest_is_dropped() -> None:
    index, ledger = new(parked_blocks=2)
    for block in (5, 3, 1):
        ledger.apply(stored(block, block + 1), 0.0)
    assert ledger.waiting == 2
    assert ledger.counters["orphans_dropped"] == 1
    ledger.apply(stored(0, 1), 0.0)
    ledger.apply(stored(2, 3), 0.0)
    ledger.apply(stored(4, 5), 0.0)
    assert matched(index, prompt_keys(PROMPT))[0] == 5
    index, ledger = new(parked_bytes=200)
    for block in range(1, 20):
        ledger.apply(stored(3, 4, hashes=np.array([block], dtype=np.uint64)), 0.0)
    assert ledger.waiting == 200 // (8 + 4 * BLOCK)


def test_an_orphan_is_anchored_by_the_tokens_we_sent_there() -> None:
    index, ledger = new()
    ledger.sent(ids(PROMPT), prompt_keys(PROMPT), BLOCK)
    ledger.apply(stored(3, 5), 0.0)
    assert ledger.counters["anchored"] == 2
    ledger.apply(stored(5, 6), 0.0)
    keys = prompt_keys(PROMPT)
    assert matched(index, keys[2:])[0] == 4  # the parent, which lies beside a block just computed, included
    ledger.apply(removed(2), 0.0)
    assert matched(index, keys[2:])[0] == 0
    assert ledger.counters["unknown_removals"] == 0


def test_prompts_we_sent_are_remembered_up_to_a_bound_of_their_tokens() -> None:
    index, ledger = new(sent_tokens=len(PROMPT) + 1)
    ledger.sent(ids(PROMPT), prompt_keys(PROMPT), BLOCK)
    other = [9, *PROMPT[1:]]
    ledger.sent(ids(other), prompt_keys(other), BLOCK)
    ledger.apply(stored(3, 5), 0.0)
    assert ledger.counters["anchored"] == 2
    assert matched(index, prompt_keys(PROMPT)[2:])[0] == 0
    assert matched(index, prompt_keys(other)[2:])[0] == 3


def test_an_orphan_that_fits_two_prompts_is_not_guessed() -> None:
    _, ledger = new()
    for begin in (1, 2):
        prompt = [begin, *PROMPT[1:]]
        ledger.sent(ids(prompt), prompt_keys(prompt), BLOCK)
    ledger.apply(stored(3, 5), 0.0)
    assert (ledger.counters["anchored"], ledger.waiting) == (0, 2)


@pytest.mark.parametrize("fields", [{"adapter": "a1"}, {"extras": (("img",),) * 2}, {"block_size": 2}])
def test_an_orphan_of_another_kind_than_the_prompt_is_not_anchored(fields: dict[str, Any]) -> None:
    _, ledger = new()
    ledger.sent(ids(PROMPT), prompt_keys(PROMPT), BLOCK)
    event = stored(3, 5, **fields)
    if "block_size" in fields:
        event = stored(3, 5, ids=event.ids[:4], **fields)
    ledger.apply(event, 0.0)
    assert ledger.counters["anchored"] == 0


def test_events_that_follow_each_other_are_put_together_only_if_they_are_alike() -> None:
    one = [stored(n, n + 1) for n in range(1, 6)]
    gone = [removed(n) for n in range(5)]
    assert [type(e) for e in bundled([*one, *gone])] == [Singles, Removed]
    assert [len(e.events) for e in bundled([*one, Cleared(), *one]) if isinstance(e, Singles)] == [5, 5]
    for other in (
        stored(0, 1),
        stored(6, 7, named=False),
        stored(5, 6, adapter="a"),
        stored(5, 6, tier=Tier.CPU),
        stored(5, 6, group=1),
        stored(5, 6, extras=(("img",),)),
        stored(3, 5),
        removed(9, tier=Tier.CPU),
    ):
        assert bundled([*one, other, *gone])[1:2] == [other]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.sampled_from(["", "a"])), max_size=40))
def test_events_put_together_do_what_they_do_one_by_one(steps: list[tuple[int, bool, str]]) -> None:
    """Over chains that fork, repeat blocks and lack parents."""
    events: list[Event] = []
    for block, goes, adapter in steps:
        offset = 500 if adapter else 0
        hashes = np.array([1000 + offset + block], dtype=np.uint64)
        if goes:
            events.append(Removed(hashes, Tier.GPU, 0))
        else:
            parent = None if block == 1 and adapter else 999 + offset + block
            events.append(stored(block, block + 1, hashes=hashes, parent=parent, adapter=adapter))
    (index_a, one_by_one), (index_b, together) = new(), new()
    for ledger in (one_by_one, together):
        ledger.apply(stored(0, 1), 0.0)
    for event in events:
        one_by_one.apply(event, 0.0)
    for each in bundled(events):
        together.apply(each, 0.0)
    assert one_by_one.counters == together.counters
    assert (len(one_by_one), one_by_one.waiting) == (len(together), together.waiting)
    for keys in (prompt_keys(PROMPT), prompt_keys(PROMPT, adapter="a")):
        for key in keys.tolist():
            array = np.array([key], dtype=np.uint64)
            assert matched(index_a, array) == matched(index_b, array)


def test_a_removal_of_what_was_never_there_is_counted() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 3), 0.0)
    ledger.apply(removed(0, tier=Tier.CPU), 0.0)
    ledger.apply(removed(7), 0.0)
    assert ledger.counters["unknown_removals"] == 2
    assert matched(index, prompt_keys(PROMPT))[0] == 3


def test_a_hash_told_with_other_tokens_stands_for_those() -> None:
    index, ledger = new()
    other = [7] * len(PROMPT)
    ledger.apply(stored(0, 3), 0.0)
    ledger.apply(stored(0, 3, prompt=other), 0.0)
    ledger.apply(stored(0, 1), 0.0)
    assert (matched(index, prompt_keys(PROMPT))[0], matched(index, prompt_keys(other)[1:])[0]) == (1, 2)
    assert ledger.counters["rekeyed"] == 4


def test_attention_groups_each_have_their_copy_and_a_match_counts_what_all_can_use() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6, kind="full_attention"), 0.0)
    ledger.apply(stored(0, 6, group=1, kind="sliding_window", window=2 * BLOCK + 1), 0.0)
    keys = prompt_keys(PROMPT)
    assert matched(index, keys)[0] == 6
    ledger.apply(removed(0, 1, 2, group=1), 0.0)
    assert matched(index, keys)[0] == 6
    ledger.apply(removed(5, group=1), 0.0)
    assert matched(index, keys)[0] == 5
    ledger.apply(removed(5), 0.0)
    assert len(ledger) == 5


def test_more_groups_than_are_kept_are_counted() -> None:
    _, ledger = new()
    for group in range(20):
        ledger.apply(stored(0, 6, group=group), 0.0)
    assert ledger.counters["too_many_places"] == 4 * 6
    ledger.apply(stored(0, 6, group=30, hashes=np.arange(6, dtype=np.uint64)), 0.0)
    ledger.apply(stored(6, 7, prompt=PROMPT * 2, parent=5), 0.0)
    assert len(ledger) == 6


def test_another_block_size_makes_other_keys_and_both_are_kept() -> None:
    index, ledger = new()
    ledger.apply(stored(0, 6), 0.0)
    ledger.apply(stored(0, 6, hashes=np.arange(12, dtype=np.uint64), block_size=2), 0.0)
    assert ledger.block_size == 2
    assert matched(index, prompt_keys(PROMPT))[0] == 6
    assert matched(index, prompt_keys(PROMPT, block_size=2))[0] == 12


def test_writes_of_a_ledger_whose_holder_left_do_not_land() -> None:
    index, ledger = new()
    index.leave(ledger.holder)
    ledger.apply(stored(0, 6), 0.0)
    assert index.match(prompt_keys(PROMPT)).usable.tolist() == []


@pytest.mark.parametrize("layout", ["map", "array"])
def test_the_emulated_workers_cache_is_the_index(layout: str) -> None:
    worker, picker = Worker(num_blocks=10, layout=layout), Picker()
    prompts = [PROMPT[:17], PROMPT[:24], [*PROMPT[:8], *range(12)], list(range(50, 70))]
    for step in range(60):
        prompt = prompts[step * 7 % 4]
        predicted = picker.match(prompt_keys(prompt))
        cached = worker.begin(prompt)
        assert cached in (-1, min(predicted, (len(prompt) - 1) // BLOCK) * BLOCK)
        worker.decode(step % 3)
        picker.live(worker.publish())
        worker.finish(step)
        for each in prompts:
            assert picker.match(prompt_keys(each)) == worker.holds(each)
