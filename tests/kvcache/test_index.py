import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from epp.kvcache.blocks import Keys, extend, token_root
from epp.kvcache.index import ALL_BLOCKS, BlockIndex, Holder, Speculation, Tier, blocks_needed

LOWER = (Tier.CPU, Tier.DISK, Tier.PEER)
GRACE = 5.0


def u64(numbers: list[int]) -> Keys:
    return np.array(numbers, dtype=np.uint64)


def chain(length: int, seed: int = 0, parent: int = 7) -> Keys:
    ids = np.random.default_rng(seed).integers(0, 1 << 17, length, dtype=np.uint32)
    return extend(parent, ids, 1)


def matched(index: BlockIndex, keys: Keys, *holders: Holder) -> list[tuple[int, ...]]:
    """(device, usable) of each holder."""
    matches = index.match(keys, holders or None)
    return list(zip(matches.device.tolist(), matches.usable.tolist(), strict=True))


class Truth:
    """What one holder has, the plain way."""

    def __init__(self) -> None:
        self.epoch = 0
        self.held: dict[tuple[int, Tier], set[int]] = {}
        self.guessed: set[int] = set()
        self.claims: list[tuple[Speculation, set[int]]] = []
        self.groups: dict[int, int] = {0: ALL_BLOCKS}

    def of(self, group: int, tier: Tier) -> set[int]:
        return self.held.setdefault((group, tier), set())

    def match(self, keys: list[int]) -> tuple[int, int, list[int]]:
        def going_on(has: Callable[[int, int], bool]) -> int:
            for n in range(len(keys), 0, -1):
                if all(all(has(g, i) for i in range(max(n - need, 0), n)) for g, need in self.groups.items()):
                    return n
            return 0

        def on_device(group: int, i: int) -> bool:
            return keys[i] in self.of(group, Tier.GPU) or keys[i] in self.guessed

        def below(group: int, i: int) -> bool:
            return any(keys[i] in self.of(group, tier) for tier in LOWER)

        device = going_on(on_device)
        usable = going_on(lambda g, i: (i < device and on_device(g, i)) or below(g, i))
        widest = max(self.groups, key=lambda g: (self.groups[g], -g))
        by_tier = [device, 0, 0, 0]
        for key in keys[device:usable]:
            by_tier[next((t for t in LOWER[:-1] if key in self.of(widest, t)), Tier.PEER)] += 1
        return device, usable, by_tier


some_keys = st.lists(st.integers(0, 14), min_size=1, max_size=14) | st.integers(1, 15).map(lambda n: list(range(n)))
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK, Tier.PEER])
groups = st.sampled_from([0, 0, 0, 1, 2])


class IndexIsSets(RuleBasedStateMachine):
    """The index is a dict of sets: with epochs, tiers, groups, speculation, and holders that come and go."""

    holders = Bundle("holders")
    speculations = Bundle("speculations")

    @initialize()
    def begin(self) -> None:
        self.index = BlockIndex(grace_s=GRACE)
        self.truths: dict[Holder, Truth] = {}
        self.ending: list[tuple[float, Speculation]] = []
        self.now = 100.0

    def truth(self, holder: Holder) -> Truth:
        return self.truths.get(holder) or Truth()

    @rule(target=holders, count=st.sampled_from([1, 1, 2, 70]))
    def join(self, count: int) -> object:
        joined = [self.index.join("10.0.0.1:8000") for _ in range(count)]
        self.truths.update((holder, Truth()) for holder in joined)
        return multiple(*joined[-2:])

    @rule(holder=holders)
    def leave(self, holder: Holder) -> None:
        self.index.leave(holder)
        self.truths.pop(holder, None)

    @rule(holder=holders, keys=some_keys, tier=tiers, group=groups, late=st.sampled_from([0, 0, 0, 1]))
    def store(self, holder: Holder, keys: list[int], tier: Tier, group: int, late: int) -> None:
        lands = self.index.store(holder, holder.epoch - late, u64(keys), tier, self.now, group)
        assert lands == (holder in self.truths and not late)
        if lands:
            truth = self.truths[holder]
            truth.of(group, tier).update(keys)
            if (group, tier) == (0, Tier.GPU):
                truth.guessed -= set(keys)

    @rule(holder=holders, keys=some_keys, tier=tiers, group=groups, late=st.sampled_from([0, 0, 0, 1]))
    def remove(self, holder: Holder, keys: list[int], tier: Tier, group: int, late: int) -> None:
        lands = self.index.remove(holder, holder.epoch - late, u64(keys), tier, group)
        assert lands == (holder in self.truths and not late)
        if lands:
            truth = self.truths[holder]
            truth.of(group, tier).difference_update(keys)
            if (group, tier) == (0, Tier.GPU):
                truth.guessed -= set(keys)

    @rule(holder=holders, tier=st.none() | tiers)
    def clear(self, holder: Holder, tier: Tier | None) -> None:
        before = holder.epoch
        self.index.clear(holder, tier)
        assert holder.epoch == before + 1
        truth = self.truth(holder)
        for (_, t), held in truth.held.items():
            if tier is None or t == tier:
                held.clear()
        if tier in (None, Tier.GPU):
            truth.guessed.clear()

    @rule(holder=holders, needs=st.none() | st.dictionaries(groups, st.sampled_from([1, 2, 5, ALL_BLOCKS]), min_size=1))
    def set_groups(self, holder: Holder, needs: dict[int, int] | None) -> None:
        if holder in self.truths:
            self.index.set_groups(holder, needs)
            self.truths[holder].groups = needs or {0: ALL_BLOCKS}

    @rule(target=speculations, holder=holders, keys=some_keys, looked=st.booleans())
    def speculate(self, holder: Holder, keys: list[int], looked: bool) -> Speculation:
        truth = self.truth(holder)
        held = 0
        if looked and truth.groups == {0: ALL_BLOCKS}:
            held = int(self.index.match(u64(keys), [holder]).device[0])
        speculation = self.index.speculate(holder, u64(keys), "r", self.now, held=held)
        new = set(keys[held:]) - truth.of(0, Tier.GPU)
        truth.guessed |= new
        truth.claims.append((speculation, new))
        return speculation

    @rule(speculation=speculations)
    def finish(self, speculation: Speculation) -> None:
        self.index.finish(speculation, self.now)
        self.ending.append((self.now + GRACE, speculation))

    @rule(seconds=st.floats(0, 4))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)
        for end, speculation in self.ending:
            if end <= self.now:
                self.end(speculation)

    @rule(speculation=speculations)
    def contradict(self, speculation: Speculation) -> None:
        self.index.contradict(speculation)
        self.end(speculation)

    @rule(speculation=speculations)
    def confirm(self, speculation: Speculation) -> None:
        truth = self.truth(speculation.holder)
        live = any(s is speculation for s, _ in truth.claims)
        self.index.confirm(speculation, self.now)
        if live and speculation.epoch == speculation.holder.epoch:
            keys = set(speculation.keys.tolist())
            truth.of(0, Tier.GPU).update(keys)
            truth.guessed -= keys
        self.end(speculation)

    def end(self, speculation: Speculation) -> None:
        truth = self.truth(speculation.holder)
        gone = [keys for s, keys in truth.claims if s is speculation]
        truth.claims = [(s, keys) for s, keys in truth.claims if s is not speculation]
        if gone:
            truth.guessed -= gone[0] - set().union(*(keys for _, keys in truth.claims))

    @rule(keys=some_keys)
    def match(self, keys: list[int]) -> None:
        matches = self.index.match(u64(keys))
        assert set(matches.holders) == set(self.truths)
        for i, holder in enumerate(matches.holders):
            found = (int(matches.device[i]), int(matches.usable[i]), matches.by_tier[:, i].tolist())
            assert found == self.truths[holder].match(keys)

    @invariant()
    def whole_chain_matches(self) -> None:
        self.match(list(range(15)))

    @invariant()
    def counts(self) -> None:
        for holder, truth in itertools.islice(self.truths.items(), 4):
            for group in range(3):
                assert self.index.blocks(holder, group) == tuple(len(truth.of(group, tier)) for tier in Tier)


TestIndexIsSets = IndexIsSets.TestCase
TestIndexIsSets.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@given(st.integers(0, 1000), st.sampled_from([None, {0: ALL_BLOCKS, 1: 3}]))
@settings(max_examples=10, deadline=None)
def test_a_long_prompt_of_many_stretches_matches_exactly(seed: int, needs: dict[int, int] | None) -> None:
    """Several hundred stretches of different holders: more than are looked at in one go."""
    rng = np.random.default_rng(seed)
    index, keys = BlockIndex(), chain(600, seed)
    names = keys.tolist()
    for i in range(6):
        holder, truth = index.join(i), Truth()
        index.set_groups(holder, needs)
        truth.groups = needs or truth.groups
        for group in range(2):
            for tier, share in ((Tier.GPU, 0.01), (Tier.CPU, 0.003), (Tier.DISK, 0.5)):
                kept = keys[rng.random(600) > share * rng.integers(0, 2)]
                index.store(holder, 0, kept, tier, 1.0, group)
                truth.of(group, tier).update(kept.tolist())
        found = index.match(keys, [holder])
        assert (found.device[0], found.usable[0], found.by_tier[:, 0].tolist()) == truth.match(names)


def test_a_block_on_the_device_only_does_not_continue_a_run_of_the_lower_tier() -> None:
    """vLLM looks up the device's leading run, then asks the connector from there on."""
    index, keys = BlockIndex(), chain(10)
    worker = index.join("w")
    index.store(worker, 0, keys[:3], Tier.GPU, 0.0)
    index.store(worker, 0, keys[5:], Tier.GPU, 0.0)
    index.store(worker, 0, keys[2:5], Tier.CPU, 0.0)
    index.store(worker, 0, keys[6:], Tier.CPU, 0.0)
    assert matched(index, keys) == [(3, 5)]
    index.store(worker, 0, keys[5:6], Tier.DISK, 0.0)
    assert matched(index, keys) == [(3, 10)]
    assert index.match(keys).by_tier[:, 0].tolist() == [3, 6, 1, 0]


def test_a_copy_in_memory_outlives_that_on_the_device() -> None:
    index, keys = BlockIndex(), chain(8)
    worker = index.join("w")
    index.store(worker, 0, keys, Tier.GPU, 0.0)
    index.store(worker, 0, keys, Tier.CPU, 0.0)
    index.remove(worker, 0, keys, Tier.GPU)
    assert matched(index, keys) == [(0, 8)]
    index.remove(worker, 0, keys, Tier.CPU)
    assert matched(index, keys) == [(0, 0)]
    assert len(index) == 0


def test_all_blocks_cleared_leaves_no_match() -> None:
    index, keys = BlockIndex(), chain(100)
    one, two = index.join("a"), index.join("b")
    for holder in (one, two):
        index.store(holder, 0, keys, Tier.GPU, 0.0)
    index.clear(one)
    assert matched(index, keys, one, two) == [(0, 0), (100, 100)]


def test_a_write_of_an_epoch_that_is_over_never_lands() -> None:
    index, keys = BlockIndex(), chain(10)
    worker = index.join("w")
    before = worker.epoch
    index.clear(worker)
    assert not index.store(worker, before, keys, Tier.GPU, 1.0)
    assert matched(index, keys) == [(0, 0)]
    assert index.store(worker, worker.epoch, keys, Tier.GPU, 1.0)
    assert not index.remove(worker, before, keys, Tier.GPU)
    assert matched(index, keys) == [(10, 10)]
    index.leave(worker)
    assert not index.store(worker, worker.epoch, keys, Tier.GPU, 2.0)
    assert index.stale_writes == 3
    assert matched(index, keys, worker) == [(0, 0)]


def test_two_ports_of_one_pod_are_two_holders() -> None:
    index, keys = BlockIndex(), chain(10)
    first, second = index.join(("10.0.0.1", 8000)), index.join(("10.0.0.1", 8001))
    index.store(first, 0, keys, Tier.GPU, 0.0)
    assert matched(index, keys, first, second) == [(10, 10), (0, 0)]


def test_who_joins_in_the_place_of_one_that_left_holds_nothing() -> None:
    index, keys = BlockIndex(), chain(10)
    gone = index.join("a")
    index.store(gone, 0, keys, Tier.GPU, 0.0)
    claim = index.speculate(gone, chain(20), "r", 0.0)
    index.leave(gone)
    index.leave(gone)
    new = index.join("b")
    assert matched(index, keys, new, gone) == [(0, 0), (0, 0)]
    index.speculate(new, chain(20), "s", 0.0)
    index.contradict(claim)
    assert matched(index, chain(20), new) == [(20, 20)]


def test_speculation_lives_as_long_as_its_request_and_a_grace() -> None:
    index, keys = BlockIndex(grace_s=5), chain(100)
    worker = index.join("w")
    claim = index.speculate(worker, keys, "r", now=0.0)
    index.expire(1000.0)
    assert matched(index, keys) == [(100, 100)]
    index.store(worker, 0, keys[:30], Tier.GPU, 1000.0)
    index.finish(claim, 1000.0)
    index.expire(1004.9)
    assert matched(index, keys) == [(100, 100)]
    index.expire(1005.0)
    assert matched(index, keys) == [(30, 30)]
    assert index.blocks(worker) == (30, 0, 0, 0)


def test_an_eviction_contradicts_what_was_speculated() -> None:
    index, keys = BlockIndex(), chain(10)
    worker = index.join("w")
    index.speculate(worker, keys, "r", 0.0)
    index.remove(worker, 0, keys[4:5], Tier.GPU)
    assert matched(index, keys) == [(4, 4)]


def test_a_request_that_fails_takes_back_only_its_own_claims() -> None:
    index, keys = BlockIndex(), chain(20)
    worker = index.join("w")
    index.store(worker, 0, keys[:5], Tier.GPU, 0.0)
    one = index.speculate(worker, keys[:10], "a", 0.0, held=5)
    two = index.speculate(worker, keys, "b", 0.0)
    index.contradict(two)
    assert matched(index, keys) == [(10, 10)]
    index.contradict(one)
    index.contradict(one)
    assert matched(index, keys) == [(5, 5)]


def test_speculation_leaves_no_bytes_behind() -> None:
    index = BlockIndex(grace_s=0)
    worker = index.join("w")
    empty = index.nbytes
    for i in range(50):
        index.finish(index.speculate(worker, chain(100, i), "r", float(i)), float(i))
        index.expire(float(i))
    assert len(index) == 0
    assert index.nbytes < empty + 100 * 150


def test_a_window_group_counts_only_where_its_window_is_whole() -> None:
    index, keys = BlockIndex(), chain(100)
    worker = index.join("w")
    index.set_groups(worker, {0: ALL_BLOCKS, 1: blocks_needed("sliding_window", 65, 16)})
    index.store(worker, 0, keys, Tier.GPU, 0.0, group=0)
    assert matched(index, keys) == [(0, 0)]
    index.store(worker, 0, keys[57:60], Tier.GPU, 0.0, group=1)
    assert matched(index, keys) == [(0, 0)]
    index.store(worker, 0, keys[56:57], Tier.GPU, 0.0, group=1)
    assert matched(index, keys) == [(60, 60)]
    index.remove(worker, 0, keys[30:31], Tier.GPU, group=0)
    assert matched(index, keys) == [(0, 0)]


def test_a_mamba_group_needs_the_state_at_the_end_only() -> None:
    index, keys = BlockIndex(), chain(50)
    worker = index.join("w")
    index.set_groups(worker, {0: blocks_needed("mamba", None, 16), 1: blocks_needed("full_attention", None, 16)})
    index.store(worker, 0, keys[[9, 29]], Tier.GPU, 0.0, group=0)
    index.store(worker, 0, keys[:20], Tier.GPU, 0.0, group=1)
    assert matched(index, keys) == [(10, 10)]


@pytest.mark.parametrize(
    ("kind", "window", "size", "need"),
    [
        ("full_attention", None, 16, ALL_BLOCKS),
        ("sink_full_attention", None, 16, ALL_BLOCKS),
        ("mla_attention", None, 16, ALL_BLOCKS),
        ("mamba", None, 16, 1),
        ("sliding_window", 128, 16, 8),
        ("sliding_window", 129, 16, 8),
        ("sliding_window", 130, 16, 9),
        ("sliding_window", 1, 16, 1),
        ("sliding_window", None, 16, ALL_BLOCKS),
        ("something new", 5, 16, ALL_BLOCKS),
    ],
)
def test_how_many_blocks_an_attention_group_needs(kind: str, window: int | None, size: int, need: int) -> None:
    assert blocks_needed(kind, window, size) == need


def test_a_million_distinct_blocks_stay_below_the_bound_and_the_oldest_are_gone() -> None:
    index = BlockIndex(5 << 20)
    worker = index.join("w")
    first, last = chain(1000, seed=1), chain(1000, seed=2)
    index.store(worker, 0, first, Tier.GPU, 0.0)
    for i in range(100):
        index.store(worker, 0, chain(10_000, seed=10 + i), Tier.GPU, float(i))
        assert index.nbytes <= 5 << 20
    index.store(worker, 0, last, Tier.GPU, 100.0)
    assert matched(index, first) == [(0, 0)]
    assert matched(index, last) == [(1000, 1000)]
    assert index.evicted > 900_000
    assert index.blocks(worker)[0] == len(index) > 50_000


def test_blocks_in_use_outlive_older_ones() -> None:
    """Speculating marks a prompt's blocks as used, so a session that goes on is not the first to go."""
    index = BlockIndex(2 << 20)
    worker = index.join("w")
    session, other = chain(1000, seed=1), chain(1000, seed=2)
    for keys in (session, other):
        index.store(worker, 0, keys, Tier.GPU, 0.0)
    for i in range(1, 13):
        now = 100.0 * i
        index.contradict(index.speculate(worker, session, "r", now, held=1000))
        index.store(worker, 0, chain(10_000, seed=10 + i), Tier.GPU, now)
    assert matched(index, session) == [(1000, 1000)]
    assert matched(index, other)[0][0] < 1000


def test_what_nobody_holds_any_more_is_swept_while_others_write() -> None:
    index = BlockIndex()
    gone, stays = index.join("a"), index.join("b")
    for i in range(5):
        index.store(gone, 0, chain(10_000, seed=i), Tier.GPU, 0.0)
    index.leave(gone)
    assert len(index) == 50_000
    for i in range(50):
        index.store(stays, 0, chain(200, seed=100 + i), Tier.GPU, 1.0)
    assert len(index) == 10_000


def test_eight_producers_under_eviction_never_promise_more_than_is_true() -> None:
    """Writers, requests, eviction, clears and leavings in any order: counts agree, and no block is made up."""
    rng = np.random.default_rng(4)
    index = BlockIndex(2 << 20, grace_s=1)
    sessions = [chain(4000, seed=i) for i in range(12)]
    everything = np.concatenate(sessions)
    producers = [(index.join(i), set[int](), list[Speculation]()) for i in range(8)]
    for step in range(6000):
        i = int(rng.integers(8))
        holder, held, claims = producers[i]
        at, length = int(rng.integers(3990)), int(rng.choice([1, 2, 64, 500]))
        keys, action = sessions[rng.integers(12)][at : at + length], rng.random()
        if action < 0.6:
            index.store(holder, holder.epoch, keys, Tier.GPU, step / 10)
            held.update(keys.tolist())
        elif action < 0.8:
            index.remove(holder, holder.epoch, keys, Tier.GPU)
            held.difference_update(keys.tolist())
        elif action < 0.9:
            claims.append(index.speculate(holder, keys, "r", step / 10))
        elif action < 0.99 and claims:
            index.finish(claims.pop(), step / 10)
            index.expire(step / 10)
        elif action > 0.998:
            index.clear(holder)
            held.clear()
        elif action > 0.997:
            index.leave(holder)
            producers[i] = (index.join(i), set(), claims)
    assert index.evicted > 1000
    for _, _, claims in producers:
        for claim in claims:
            index.contradict(claim)
    index.expire(1e9)
    matches = [index.match(everything[i : i + 1]).device for i in range(0, len(everything), 40)]
    for i, (_, held, _) in enumerate(sorted(producers, key=lambda p: p[0].slot)):
        found = {everything.item(40 * at) for at, device in enumerate(matches) if device[i]}
        assert found <= held
        assert len(found) > len(held) / 400
    numbers = index._table.get_many(everything).astype(np.uint32)
    assert np.count_nonzero(numbers) == len(index)
    blocks = np.bincount(numbers[numbers > 0], minlength=len(index._sets.blocks))
    assert blocks.tolist() == index._sets.blocks.tolist()
    assert len(index._claims) == 0


def test_sets_of_holders_are_reused() -> None:
    index = BlockIndex()
    holders = [index.join(i) for i in range(8)]
    rng = np.random.default_rng(3)
    keys = chain(64)
    for _ in range(500):
        holder, some = holders[rng.integers(8)], keys[rng.random(64) < 0.1]
        if len(some):
            if rng.random() < 0.5:
                index.store(holder, 0, some, Tier.GPU, 0.0)
            else:
                index.remove(holder, 0, some, Tier.GPU)
    assert len(index._sets) <= 65


def test_a_bound_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes 1000 is below 2 MiB"):
        BlockIndex(1000)


def test_adapters_and_salts_do_not_share_blocks() -> None:
    index = BlockIndex()
    worker = index.join("w")
    ids = np.arange(64, dtype=np.uint32)
    roots = [token_root(model="m", adapter=a, salt=s) for a, s in (("", ""), ("s1", ""), ("", "s1"))]
    index.store(worker, 0, extend(roots[0], ids, 16), Tier.GPU, 0.0)
    assert [matched(index, extend(root, ids, 16))[0][0] for root in roots] == [4, 0, 0]


def test_an_empty_prompt_and_an_empty_pool_match_nothing() -> None:
    index = BlockIndex()
    assert index.match(chain(3)).holders == ()
    worker = index.join("w")
    index.store(worker, 0, chain(0), Tier.GPU, 0.0)
    assert matched(index, chain(0)) == [(0, 0)]
    assert index.match(chain(3), []).device.tolist() == []


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Tier), st.integers(0, 1), st.integers(1, 3000))))
def test_what_is_exported_makes_an_index_that_holds_the_same(stores: list[tuple[int, Tier, int, int]]) -> None:
    index, copy = BlockIndex(), BlockIndex()
    holders, copies = ([i.join(n) for n in range(4)] for i in (index, copy))
    for seed, (which, tier, group, length) in enumerate(stores):
        index.store(holders[which], holders[which].epoch, chain(length, seed), tier, 0.0, group)
    guess = index.speculate(holders[0], chain(50, 999), "r", 0.0)
    index.leave(holders[3])
    for lot in index.export():
        for holder, tier, group, keys in lot:
            to = next(c for c in copies if c.endpoint == holder.endpoint)
            copy.store(to, to.epoch, keys, tier, 0.0, group)
    index.contradict(guess)
    for group in (0, 1):
        assert copy.all_blocks(copies, group) == index.all_blocks(holders, group)
    for seed, (_, _, _, length) in enumerate(stores):
        keys = chain(length, seed)
        assert matched(copy, keys, *copies) == matched(index, keys, *holders)
