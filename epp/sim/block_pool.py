"""The paged KV cache's blocks: who holds them, which are free, which are cached under which hash.

The order of the free queue is the eviction order, kept as vLLM 0.32 keeps it: blocks are taken from the front; a freed
block that carries a hash goes to the back (least recently used is evicted first), one without a hash to the front
(it can never be hit). Block 0 is the null block and never handed out, so `num_blocks - 1` are usable. Two blocks may
carry the same hash (a fully cached prompt recomputes its last block): the first is the one that is hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from epp.sim.events import AllBlocksCleared, BlockRemoved, KVCacheEvent


class Block:
    __slots__ = ("block_hash", "block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={digest})"


class BlockPool:
    """Raises ValueError on a size that leaves no usable block, and on an allocation larger than what is free."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"the pool needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self.events: list[KVCacheEvent] = []
        """What happened since the last engine step took them."""
        self._free = OrderedDict((i, Block(i)) for i in range(1, num_blocks))
        self._cached: dict[bytes, Block] = {}
        self._duplicates: dict[bytes, list[Block]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Distinct hashes that a new prompt could hit."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the usable blocks held by sequences, 0..1; a block that is only cached counts as free."""
        return 1 - self.num_free / self.num_usable

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        return self._cached.get(block_hash)

    def allocate(self, count: int) -> list[Block]:
        """Take `count` blocks from the front of the free queue, evicting what they cached."""
        if count > self.num_free:
            raise ValueError(f"cannot allocate {count} blocks, {self.num_free} are free")
        blocks = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a holder to cached blocks; those that were free leave the free queue."""
        free = self._free
        for block in blocks:
            if block.ref_cnt == 0:
                del free[block.block_id]
            block.ref_cnt += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop a holder of each block; `blocks` in eviction order (a sequence frees its tail first)."""
        free = self._free
        unhashed: list[Block] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    unhashed.append(block)
                else:
                    free[block.block_id] = block
        for block in reversed(unhashed):
            free[block.block_id] = block
            free.move_to_end(block.block_id, last=False)

    def cache(self, blocks: Sequence[Block], hashes: Sequence[bytes]) -> None:
        """Register full blocks under their hashes."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.block_hash = block_hash
            if self._cached.setdefault(block_hash, block) is not block:
                self._duplicates.setdefault(block_hash, []).append(block)

    def clear_cache(self) -> bool:
        """Forget every hash; refused (False) while any block is held, as the engine would read stale entries."""
        if self.num_free != self.num_usable:
            return False
        for block in self._free.values():
            block.block_hash = None
        self._cached.clear()
        self._duplicates.clear()
        self.events.append(AllBlocksCleared())
        return True

    def _evict(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        block.block_hash = None
        others = self._duplicates.get(block_hash)
        if self._cached[block_hash] is not block:
            assert others is not None
            others.remove(block)
        elif others:
            self._cached[block_hash] = others.pop(0)
        else:
            del self._cached[block_hash]
        if others is not None and not others:
            del self._duplicates[block_hash]
        # Announced even if a duplicate stays behind: vLLM does so too, and a consumer has to live with it.
        self.events.append(BlockRemoved((block_hash,)))
