"""A worker for tests: vLLM's block pool as the emulator keeps it, its events as messages, and what it really holds."""

from __future__ import annotations

from collections.abc import Sequence as Series

import numpy as np

from epp.kvcache.blocks import Keys, block_extras, extend, token_root
from epp.kvcache.events.decoder import Ids
from epp.kvcache.events.follower import Follower, FollowerSettings
from epp.kvcache.events.ledger import Ledger
from epp.kvcache.events.sequence import Ask, SequenceSettings
from epp.kvcache.index import BlockIndex
from epp.sim.events import EventEncoder
from epp.sim.kv_cache_manager import KVCacheManager
from epp.sim.sequence import Sequence

BLOCK = 4
MODEL = "m"
END = (-1).to_bytes(8, "big", signed=True)
Frames = list[bytes]


def ids(tokens: Series[int]) -> Ids:
    return np.array(tokens, dtype=np.uint32)


def prompt_keys(tokens: Series[int], *, adapter: str = "", salt: str = "", block_size: int = BLOCK) -> Keys:
    """Keys as the request side works them out."""
    extras = {0: block_extras([salt])} if salt else None
    return extend(token_root(model=MODEL, adapter=adapter, salt=""), ids(tokens), block_size, extras)


class Worker:
    """`frames` of every batch since the last (re)start that the ring still holds, by sequence number."""

    def __init__(self, *, num_blocks: int = 12, ring: int = 1000, layout: str = "map") -> None:
        self._num_blocks, self._ring = num_blocks, ring
        self._encode = EventEncoder("map" if layout == "map" else "array")
        self._clock = 0.0
        self.restart()

    def restart(self) -> None:
        self.manager = KVCacheManager(self._num_blocks, BLOCK, hash_seed=str(self._clock))
        self.running: list[Sequence] = []
        self.seq = 0
        self.frames: dict[int, Frames] = {}

    def begin(self, tokens: Series[int], *, adapter: str = "", salt: str = "", report: bool = False) -> int:
        """Schedule a request; its cached tokens, -1 if it does not fit.

        `report`: have its hits told again, but not one alone, which looks like a second copy.
        """
        sequence = Sequence("r", tokens, lora_name=adapter or None, cache_salt=salt or None)
        hits = self.manager.get_computed_blocks(sequence)
        if not self.manager.can_fit(sequence, hits):
            return -1
        cached = len(hits) * BLOCK
        sequence.report_cached_blocks = report and len(hits) != 1
        assert self.manager.allocate_slots(sequence, len(tokens) - cached, hits)
        sequence.num_computed_tokens = len(tokens)
        self.running.append(sequence)
        return cached

    def decode(self, token: int) -> None:
        """One more token for every running request that has room."""
        for sequence in self.running:
            sequence.token_ids.append(token)
            if self.manager.allocate_slots(sequence, 1):
                sequence.num_computed_tokens += 1
            else:
                sequence.token_ids.pop()

    def finish(self, which: int) -> None:
        if self.running:
            self.manager.free(self.running.pop(which % len(self.running)))

    def clear(self) -> bool:
        return self.manager.block_pool.clear_cache()

    def publish(self) -> Frames | None:
        """The batch of this step, if anything happened."""
        events = self.manager.take_events()
        if not events:
            return None
        self._clock += 1.0
        frames = [b"kv@x", self.seq.to_bytes(8, "big"), self._encode(events, self._clock)]
        self.frames[self.seq] = frames
        self.frames.pop(self.seq - self._ring, None)
        self.seq += 1
        return frames

    def replay(self, start: int) -> list[Frames]:
        return [*([b"", *f] for seq, f in self.frames.items() if seq >= start), [b"", b"", END, b""]]

    def holds(self, tokens: Series[int], *, adapter: str = "", salt: str = "") -> int:
        """Leading blocks of the prompt in the cache: what the index should say."""
        sequence = Sequence("q", tokens, lora_name=adapter or None, cache_salt=salt or None)
        self.manager._hash_full_blocks(sequence)
        present = [self.manager.block_pool.get_cached_block(h) is not None for h in sequence.block_hashes]
        return present.index(False) if False in present else len(present)


class Picker:
    """An index with one follower."""

    def __init__(self, *, replay: bool = True, attempts: int = 1) -> None:
        self.index = BlockIndex()
        self.holder = self.index.join("e")
        self.ledger = Ledger(self.index, self.holder, MODEL)
        sequence = SequenceSettings(replay=replay, attempts=attempts, answer_s=1.0)
        self.follower = Follower(self.ledger, FollowerSettings(sequence))

    def live(self, frames: Frames | None, now: float = 0.0) -> list[Ask]:
        asks = self.follower.live(frames, now, 0.0) if frames else []
        self.follower.work(now)
        return asks

    def answer(self, worker: Worker, asks: list[Ask], now: float = 0.0) -> None:
        """Replays are answered at once and whole."""
        for ask in asks:
            for frames in worker.replay(ask.start):
                self.answer(worker, self.follower.replayed(frames, now), now)
        self.follower.work(now)

    def match(self, keys: Keys) -> int:
        return int(self.index.match(keys, [self.holder]).device[0])
