"""Which blocks a sequence holds: prefix-cache hits, new slots, hashes, release.

Rules, as vLLM V1 has them: only full blocks are cached; blocks are hashed in a chain, with the LoRA name in every block
and the cache salt in the first; at least one prompt token is always computed, so a fully cached prompt recomputes its
last block; a block enters the cache when the step that fills it is scheduled; a sequence frees its tail first.
"""

from __future__ import annotations

from hashlib import sha256

from epp.sim.block_pool import Block, BlockPool
from epp.sim.events import BlockStored, KVCacheEvent
from epp.sim.hash_chain import HashChainCache
from epp.sim.sequence import Sequence


class KVCacheManager:
    """`hash_seed` makes the root of every chain: workers with different seeds report different hashes for one text."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, hash_seed: str = ""
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.lora_ids: dict[str, int] = {}
        """Numbers of the adapters, from 1, as events carry them."""
        self._root = sha256(b"root:" + hash_seed.encode()).digest()
        self._chains = HashChainCache(block_size)

    def get_computed_blocks(self, sequence: Sequence) -> list[Block]:
        """The longest run of cached blocks from the start that leaves a token to compute."""
        if not self.enable_prefix_caching:
            return []
        self._hash_full_blocks(sequence)
        hits: list[Block] = []
        get = self.block_pool.get_cached_block
        for block_hash in sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]:
            block = get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def can_fit(self, sequence: Sequence, hits: list[Block]) -> bool:
        """Whether all known tokens of a waiting sequence would fit: the admission rule that stops over-admission."""
        return self._needed(sequence, sequence.num_tokens, hits) <= self.block_pool.num_free

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int, hits: list[Block] | None = None) -> bool:
        """Room for the hits of `sequence` and `num_new_tokens` more; False, with nothing changed, if there is none."""
        hits = hits or []
        start = sequence.num_computed_tokens + len(hits) * self.block_size
        if self._needed(sequence, start + num_new_tokens, hits) > self.block_pool.num_free:
            return False
        self.block_pool.touch(hits)
        if hits and sequence.report_cached_blocks:
            self._store_event(sequence, 0, len(hits))
        sequence.blocks += hits
        sequence.num_cached_blocks += len(hits)
        sequence.num_computed_tokens = start
        missing = -(-(start + num_new_tokens) // self.block_size) - len(sequence.blocks)
        sequence.blocks += self.block_pool.allocate(max(missing, 0))
        if self.enable_prefix_caching:
            self._cache_full_blocks(sequence, (start + num_new_tokens) // self.block_size)
        return True

    def free(self, sequence: Sequence) -> None:
        self.block_pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_cached_blocks = 0

    def take_events(self) -> list[KVCacheEvent]:
        events, self.block_pool.events = self.block_pool.events, []
        return events

    def _needed(self, sequence: Sequence, num_tokens: int, hits: list[Block]) -> int:
        """Free blocks used up by holding `num_tokens`: the new ones, and the hits that lie in the free queue now."""
        new = -(-num_tokens // self.block_size) - len(sequence.blocks) - len(hits)
        return max(new, 0) + sum(1 for block in hits if block.ref_cnt == 0)

    def _cache_full_blocks(self, sequence: Sequence, num_full: int) -> None:
        first = sequence.num_cached_blocks
        if num_full <= first:
            return
        self._hash_full_blocks(sequence)
        self.block_pool.cache(sequence.blocks[first:num_full], sequence.block_hashes[first:num_full])
        sequence.num_cached_blocks = num_full
        self._store_event(sequence, first, num_full)

    def _hash_full_blocks(self, sequence: Sequence) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        num_full = sequence.num_tokens // size
        if len(hashes) == num_full:
            return
        adapter = f"lora:{sequence.lora_name};".encode() if sequence.lora_name else b""
        if not hashes:
            salt = f"salt:{sequence.cache_salt};".encode() if sequence.cache_salt else b""
            sequence.block_hashes = self._chains.digests(self._root, adapter, salt, sequence.token_ids)
            return
        for i in range(len(hashes), num_full):
            tokens = sequence.token_ids[i * size : (i + 1) * size].tobytes()
            hashes.append(sha256(hashes[-1] + adapter + tokens).digest())

    def _store_event(self, sequence: Sequence, first: int, end: int) -> None:
        lora, salt = sequence.lora_name, sequence.cache_salt
        keys: list[list[str] | None] = [[lora] if lora else None] * (end - first)
        if first == 0 and salt:
            keys[0] = [*([lora] if lora else []), salt]
        self.block_pool.events.append(
            BlockStored(
                block_hashes=tuple(sequence.block_hashes[first:end]),
                parent_block_hash=sequence.block_hashes[first - 1] if first else None,
                token_ids=sequence.token_ids[first * self.block_size : end * self.block_size],
                block_size=self.block_size,
                lora_id=self.lora_ids.get(lora) if lora else None,
                lora_name=lora,
                extra_keys=tuple(keys),
            )
        )
