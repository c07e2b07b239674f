import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from epp.kvcache.table import U64s, U64Table


def u64(numbers: list[int]) -> U64s:
    return np.array(numbers, dtype=np.uint64)


def random_keys(count: int, seed: int = 1) -> U64s:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)


def contents(table: U64Table, keys: U64s) -> dict[int, int]:
    return {k: v for k, v in zip(keys.tolist(), table.get_many(keys).tolist(), strict=True) if v}


STAND_IN = 0x9E3779B97F4A7C15
"""The number under which a table keeps the key 0."""
keys = st.integers(0, 40) | st.integers(0, (1 << 64) - 1).filter(lambda key: key != STAND_IN)
values = st.integers(1, (1 << 64) - 1)
BULK = random_keys(4000, seed=2)


class TableIsADict(RuleBasedStateMachine):
    """Any order of operations gives what a dict gives, over many growths and while growing."""

    @initialize()
    def begin(self) -> None:
        self.table = U64Table()
        self.truth: dict[int, int] = {}
        self.seen: set[int] = {0, 1}

    @rule(key=keys, value=values)
    def put(self, key: int, value: int) -> None:
        self.table.put(key, value)
        self.truth[key] = value
        self.seen.add(key)

    @rule(key=keys)
    def pop(self, key: int) -> None:
        assert self.table.pop(key) == self.truth.pop(key, 0)

    @rule(items=st.lists(st.tuples(keys, values), max_size=60))
    def put_many(self, items: list[tuple[int, int]]) -> None:
        self.table.put_many(u64([k for k, _ in items]), u64([v for _, v in items]))
        self.truth.update(items)
        self.seen.update(self.truth)

    @rule(some=st.lists(keys, max_size=60))
    def pop_many(self, some: list[int]) -> None:
        self.table.pop_many(u64(some))
        for key in some:
            self.truth.pop(key, None)

    @rule(start=st.integers(0, 3000), count=st.integers(1, 1000), put=st.booleans())
    def bulk(self, start: int, count: int, put: bool) -> None:
        some = BULK[start : start + count]
        if put:
            self.table.put_many(some, some)
            self.truth.update(zip(some.tolist(), some.tolist(), strict=True))
        else:
            self.table.pop_many(some)
            for key in some.tolist():
                self.truth.pop(key, None)

    @rule()
    def settle(self) -> None:
        self.table.settle()
        assert not self.table.growing

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.truth.clear()

    @invariant()
    def same(self) -> None:
        assert len(self.table) == len(self.truth)
        some = u64(sorted(self.seen))
        everything = np.concatenate([some, BULK])
        assert contents(self.table, everything) == self.truth
        assert [self.table.get(k) for k in some.tolist()] == [self.truth.get(k, 0) for k in some.tolist()]


TestTableIsADict = TableIsADict.TestCase
TestTableIsADict.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_an_entry_costs_at_most_32_bytes_once_a_table_has_settled() -> None:
    table = U64Table()
    some = random_keys(200_000)
    for at in range(0, len(some), 100):
        table.put_many(some[at : at + 100], some[at : at + 100])
        if len(table) > 10_000 and not table.growing:
            assert table.nbytes / len(table) <= 32
    table.settle()
    assert table.nbytes / len(table) <= 32
    assert contents(table, some) == dict(zip(some.tolist(), some.tolist(), strict=True))


def test_a_table_that_is_always_renewed_neither_grows_nor_slows_down() -> None:
    """Removals leave nothing behind: after a hundred times as many entries as it holds, all searches are as short."""
    table, some = U64Table(), random_keys(100_000)
    table.put_many(some[:1000], some[:1000])
    size = table.nbytes
    for at in range(1000, 100_000, 50):
        table.pop_many(some[at - 1000 : at - 950])
        table.put_many(some[at : at + 50], some[at : at + 50])
    table.settle()
    assert len(table) == 1000
    assert table.nbytes <= 1.6 * size
    table.pop_many(some)
    assert len(table) == 0
    assert not table._new.passed.any()
    assert not table._new.keys.any()


def test_one_by_one_renewal_leaves_nothing_behind_either() -> None:
    table, some = U64Table(), random_keys(20_000).tolist()
    for i, key in enumerate(some):
        table.put(key, i + 1)
        if i >= 500:
            assert table.pop(some[i - 500]) == i - 499
    for key in some:
        table.pop(key)
    assert len(table) == 0
    assert not table._new.passed.any()


@pytest.mark.parametrize("step", [1, 16, 1 << 32, 1 << 60])
def test_keys_in_sequence_are_spread(step: int) -> None:
    """Some engines number their blocks; a table must not put them all into one bucket."""
    table = U64Table()
    some = np.arange(1, 4001, dtype=np.uint64) * np.uint64(step) if step < 1 << 60 else random_keys(4000)
    table.put_many(some, some)
    assert table._new.passed.max() < 64
    assert contents(table, some) == dict(zip(some.tolist(), some.tolist(), strict=True))


def test_of_equal_keys_the_last_counts() -> None:
    table = U64Table()
    table.put_many(u64([5, 5, 0, 0, 5]), u64([1, 2, 3, 4, 6]))
    assert table.get_many(u64([5, 0, 7])).tolist() == [6, 4, 0]
    table.put_many(u64([5, 5]), u64([7, 8]))
    assert (table.get(5), len(table)) == (8, 2)
    table.pop_many(u64([5, 5, 0, 9]))
    assert len(table) == 0


def test_entries_that_wrap_round_from_the_last_bucket_survive_growth() -> None:
    table = U64Table()
    table.put_many(random_keys(10_000, seed=5), random_keys(10_000, seed=6))
    table.pop_many(random_keys(100, seed=5))
    table.settle()
    some = random_keys(2_000_000, seed=7)
    last = some[table._new.homes(some) == table.buckets - 1][:40]
    assert len(last) == 40
    table.put_many(last, last)
    assert not table.growing
    assert table._new.keys[:20].all()  # they have gone round
    rest = random_keys(20_000, seed=8)
    grew = False
    for at in range(0, len(rest), 20):
        table.put_many(rest[at : at + 20], rest[at : at + 20])
        grew |= table.growing
        assert table.get_many(last).tolist() == last.tolist()
    assert grew
    table.pop_many(last)
    assert not table.get_many(last).any()
    assert len(table) == 29_900


def test_a_large_table_gives_its_memory_back_as_it_grows() -> None:
    """Its pages are the system's; what was moved reads as zeros and nothing of the rest is lost."""
    table, some = U64Table(), random_keys(200_000)
    most = 0.0
    for at in range(0, len(some), 500):
        table.put_many(some[at : at + 500], some[at : at + 500])
        if at > 100_000:
            most = max(most, table.nbytes / len(table))
    assert table._new.paged
    assert table.get_many(some).tolist() == some.tolist()
    assert most < 33
    table.pop_many(some)
    assert len(table) == 0


def test_scans_go_through_all_entries() -> None:
    table, some = U64Table(), random_keys(5000)
    table.put_many(some, some)
    table.settle()
    seen: set[int] = set()
    for _ in range(-(-table.buckets // 100)):
        found, found_values = table.scan(100)
        assert found.tolist() == found_values.tolist()
        seen |= set(found.tolist())
    assert seen == set(some.tolist())


def test_a_table_of_nothing_answers() -> None:
    table = U64Table()
    assert table.get_many(u64([])).tolist() == []
    assert table.get_many(u64([0, 1])).tolist() == [0, 0]
    table.put_many(u64([]), u64([]))
    table.pop_many(u64([]))
    assert (table.get(0), table.pop(3), len(table)) == (0, 0, 0)
