"""The block pool: order of eviction, holders, duplicates, the null block."""

from __future__ import annotations

import pytest

from epp.sim.block_pool import Block, BlockPool
from epp.sim.events import AllBlocksCleared, BlockRemoved


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_one_block_of_the_pool_is_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.num_usable == 3
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert pool.usage == 1.0
    with pytest.raises(ValueError, match="cannot allocate 1 blocks, 0 are free"):
        pool.allocate(1)


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_blocks_without_a_hash_are_taken_again_first_and_hashed_ones_last() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.cache(blocks[:2], [b"a", b"b"])
    pool.free(reversed(blocks))
    assert ids(pool.allocate(5)) == [3, 4, 5, 2, 1]
    assert pool.events == [BlockRemoved((b"b",)), BlockRemoved((b"a",))]


def test_touching_a_free_block_takes_it_out_of_the_order_of_eviction() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.cache(blocks, [b"a", b"b", b"c"])
    pool.free(reversed(blocks))
    pool.touch([blocks[2]])
    pool.touch([blocks[2]])
    assert ids(pool.allocate(2)) == [2, 1]
    pool.free([blocks[2]])
    assert pool.num_free == 0
    pool.free([blocks[2]])
    assert pool.num_free == 1
    assert pool.get_cached_block(b"c") is blocks[2]


def test_of_two_blocks_with_one_hash_the_second_is_hit_after_the_first_is_evicted() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.cache([first], [b"a"])
    pool.cache([second], [b"a"])
    assert pool.get_cached_block(b"a") is first
    pool.free([first])
    pool.allocate(1)
    assert pool.get_cached_block(b"a") is second
    pool.free([second])
    pool.allocate(1)
    assert pool.get_cached_block(b"a") is None
    assert pool.num_cached == 0
    assert pool.events == [BlockRemoved((b"a",))] * 2


def test_evicting_the_second_of_two_blocks_with_one_hash_leaves_the_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.cache([first, second], [b"a", b"a"])
    pool.free([second])
    pool.allocate(1)
    assert pool.get_cached_block(b"a") is first


def test_the_cache_is_cleared_only_while_no_block_is_held() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.cache(blocks, [b"a"])
    assert not pool.clear_cache()
    assert pool.get_cached_block(b"a") is not None
    pool.free(blocks)
    assert pool.clear_cache()
    assert pool.get_cached_block(b"a") is None
    assert pool.events == [AllBlocksCleared()]
    pool.allocate(2)
    assert pool.events == [AllBlocksCleared()]
