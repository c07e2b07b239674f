"""How fast KV events go from the wire into the index: decoding, ledger and index, without sockets.

One worker's messages as vLLM 0.32 sends them, a batch each: prompts of 64 blocks of 16 tokens stored at once and
removed block by block, or single blocks as decoding fills them, as many in a batch as there are running requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import msgspec
import numpy as np

from bench.timing import EFFORT
from epp.figures import Figure, figure
from epp.kvcache.events.follower import Follower, FollowerSettings
from epp.kvcache.events.ledger import Ledger
from epp.kvcache.events.sequence import SequenceSettings
from epp.kvcache.index import BlockIndex

BLOCK, RUN, RUNNING = 16, 64, 32
ROUNDS = 5
Frames = list[bytes]


def figures() -> list[Figure]:
    runs, steps = EFFORT.times(400), EFFORT.times(200)
    return [
        figure("events/a block of a 64-block event, wire to index", _us_each(_runs(runs), RUN * runs), "us"),
        figure("events/a single-block event, wire to index", _us_each(_decoding(steps), RUNNING * steps), "us"),
        figure("events/a removal, wire to index", _us_each(_removals(steps), RUNNING * steps, skip=steps), "us"),
    ]


class _Publisher:
    """Numbers batches; engine hashes are random, 64 bits."""

    def __init__(self) -> None:
        self._seq = count()
        self._random = np.random.default_rng(1)

    def batch(self, events: Sequence[object]) -> Frames:
        seq = next(self._seq)
        return [b"kv@10.0.0.1:8000@m", seq.to_bytes(8, "big"), msgspec.msgpack.encode([float(seq), events, 0])]

    def hashes(self, number: int) -> list[int]:
        return [int(h) for h in self._random.integers(1, 1 << 63, number)]

    def stored(self, hashes: list[int], parent: int | None) -> dict[str, object]:
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": self._random.integers(0, 150_000, BLOCK * len(hashes)).tolist(),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(hashes),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


def _runs(batches: int) -> list[Frames]:
    publisher = _Publisher()
    return [publisher.batch([publisher.stored(publisher.hashes(RUN), None)]) for _ in range(batches)]


def _decoding(steps: int) -> list[Frames]:
    publisher = _Publisher()
    parents: list[int | None] = [None] * RUNNING
    messages = []
    for _ in range(steps):
        hashes = publisher.hashes(RUNNING)
        events = [publisher.stored([h], p) for h, p in zip(hashes, parents, strict=True)]
        messages.append(publisher.batch(events))
        parents = list(hashes)
    return messages


def _removals(steps: int) -> list[Frames]:
    """Blocks stored, RUNNING a batch, and then removed one an event."""
    publisher = _Publisher()
    blocks = [publisher.hashes(RUNNING) for _ in range(steps)]
    stored = [publisher.batch([publisher.stored(hashes, None)]) for hashes in blocks]
    gone = [
        publisher.batch(
            [{"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU", "group_idx": 0} for h in hashes]
        )
        for hashes in blocks
    ]
    return stored + gone


def _us_each(messages: list[Frames], of: int, *, skip: int = 0) -> float:
    """Microseconds of CPU for each of the `of` things in the messages after the first `skip`; best of some rounds."""
    best = float("inf")
    for _ in range(min(EFFORT.rounds, ROUNDS)):
        index = BlockIndex(1 << 30)
        ledger = Ledger(index, index.join("worker"), "m")
        follower = Follower(ledger, FollowerSettings(SequenceSettings(replay=False)))
        follower.connected(0.0)
        _apply(follower, messages[:skip])
        started = time.thread_time()
        _apply(follower, messages[skip:])
        best = min(best, time.thread_time() - started)
        assert follower.counters["batches"] == len(messages)
        assert not ledger.counters["unknown_removals"]
    return best / of * 1e6


def _apply(follower: Follower, messages: list[Frames]) -> None:
    for frames in messages:
        follower.live(frames, 0.0, 0.0)
        follower.work(0.0)
