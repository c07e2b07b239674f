"""A small fleet in virtual time, to test policies: simple workers under the real scheduler with a real configuration.

A worker prefills one request after another at a fixed rate, keeps an LRU prefix cache of blocks, and decodes all its
requests side by side. It is scraped at an interval. The harness counts load the way the server does: requests and
uncached tokens at the pick, tokens back at the first token, the request back at its end. Where the gateway shows no
responses (`first_tokens_seen` false), the tokens come back at the end as well.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from epp.config import PickerConfig, load_default, read
from epp.endpoint import Endpoint, Pool
from epp.plugin import Outcome
from epp.request import Api, InferenceRequest
from epp.scheduler import Scheduler

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Chained block ids, what they stand for in tokens, and the length of the answer."""

    blocks: tuple[int, ...]
    block_tokens: int
    tokens: int
    answer_tokens: int

    def token_ids(self) -> NDArray[np.uint32]:
        """Equal block ids give equal token ids."""
        first = np.array(self.blocks, dtype=np.uint32) * np.uint32(self.block_tokens)
        ids = first[:, None] + np.arange(self.block_tokens, dtype=np.uint32)
        return ids.reshape(-1)[: self.tokens].astype(np.uint32, copy=False)


class Worker:
    def __init__(self, cache_tokens: int, rate: float, token_s: float) -> None:
        self.cache_tokens = cache_tokens
        self.rate = rate
        self.token_s = token_s
        self.cache: OrderedDict[int, int] = OrderedDict()
        self.cached = 0
        self.free_at = 0.0
        self.requests = 0
        self.hit_tokens = 0
        self.uncached_tokens = 0
        self.present: list[float] = []
        """First-token times of the requests here, to tell the waiting from the running."""

    def serve(self, prompt: Prompt, now: float) -> tuple[int, float, float]:
        """Returns cached tokens, the time of the first token and the time of the end."""
        hit = 0
        for block in prompt.blocks:
            if block not in self.cache:
                break
            hit += prompt.block_tokens
        hit = min(hit, prompt.tokens)
        for block in reversed(prompt.blocks):
            if block not in self.cache:
                self.cached += prompt.block_tokens
            self.cache[block] = prompt.block_tokens
            self.cache.move_to_end(block)
        while self.cached > self.cache_tokens:
            self.cached -= self.cache.popitem(last=False)[1]
        self.requests += 1
        self.hit_tokens += hit
        self.uncached_tokens += prompt.tokens - hit
        self.free_at = max(self.free_at, now) + (prompt.tokens - hit) / self.rate
        first = self.free_at + 0.02
        self.present.append(first)
        return hit, first, first + prompt.answer_tokens * self.token_s


class Fleet:
    """Workers, a pool, a scheduler, and a queue of things to happen."""

    def __init__(
        self,
        workers: int,
        *,
        config: str = "",
        cache_tokens: int = 3_000_000,
        rate: float = 8000.0,
        token_s: float = 0.01,
        scrape_s: float = 0.5,
        seed: int = 1,
        first_tokens_seen: bool = True,
    ) -> None:
        parsed: PickerConfig = read(config) if config else load_default()
        self.pool = Pool(Endpoint("10.0.0.1", 8000 + i) for i in range(workers))
        self.workers = {e: Worker(cache_tokens, rate, token_s) for e in self.pool.endpoints}
        for endpoint in self.pool.endpoints:
            endpoint.block_size, endpoint.cache_blocks = 16, cache_tokens // 16
        self.scheduler = Scheduler(parsed, random=Random(seed), clock=lambda: 0.0)
        self.now = 0.0
        self.first_token_s: list[float] = []
        self.picks: list[Endpoint] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._scrape_s = scrape_s
        self._first_tokens_seen = first_tokens_seen
        self._busy = 0
        self.at(0.0, self._scrape)

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, what))

    def run(self) -> None:
        """Until nothing but scrapes is left to happen."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def send(self, prompt: Prompt, then: Callable[[], None] | None = None) -> None:
        """Schedule, count and serve one request now; `then` runs when its answer is complete."""
        request = InferenceRequest(
            str(self._number),
            Api.COMPLETIONS,
            model="m",
            target_model="m",
            prompts=(prompt.token_ids(),),
            prompt_tokens=prompt.tokens,
            tokens_exact=True,
        )
        decision = self.scheduler.schedule(request, self.pool.candidates(self.now), self.now)
        assert not decision.reasons
        endpoint = decision.endpoints[0]
        expected = decision.estimate.prompt_tokens - decision.estimate.cached_tokens
        endpoint.count(requests=1, tokens=expected, unseen=1)
        self.scheduler.picked(request, decision, self.now)
        self.picks.append(endpoint)
        self._busy += 1
        sent = self.now
        hit, first, end = self.workers[endpoint].serve(prompt, sent)
        self.first_token_s.append(first - sent)
        seen = self._first_tokens_seen
        self.at(first if seen else end, lambda: endpoint.count(requests=0, tokens=-expected))

        def finish() -> None:
            endpoint.count(requests=-1, tokens=0, unseen=-min(endpoint.unseen, 1))
            self.workers[endpoint].present.remove(first)
            outcome = Outcome(200, first - sent if seen else None, end - sent, prompt.tokens, hit, prompt.answer_tokens)
            self.scheduler.finished(request, endpoint, outcome, self.now)
            self._busy -= 1
            if then is not None:
                then()

        self.at(end, finish)

    def _scrape(self) -> None:
        for endpoint, worker in self.workers.items():
            waiting = sum(first > self.now for first in worker.present)
            endpoint.set("waiting", waiting)
            endpoint.set("running", len(worker.present) - waiting)
            endpoint.set("kv_usage", 0.2)
            endpoint.set("scraped_at", self.now)
            endpoint.count(requests=0, tokens=0, unseen=-endpoint.unseen)
        if self._events:
            self.at(self.now + self._scrape_s, self._scrape)

    # --- what came of it ---

    @property
    def hit_share(self) -> float:
        """Prompt tokens found in a cache over all prompt tokens."""
        hit = sum(w.hit_tokens for w in self.workers.values())
        return hit / (hit + sum(w.uncached_tokens for w in self.workers.values()))

    def imbalance(self, what: Callable[[Worker], float]) -> float:
        """Greatest over mean."""
        values = [what(w) for w in self.workers.values()]
        return max(values) * len(values) / sum(values)


def mooncake_rows() -> Iterator[tuple[float, Prompt]]:
    """(seconds, prompt) of the conversation trace."""
    for line in _lines("mooncake_conversation_3000.jsonl.gz"):
        at, tokens, answer, runs = json.loads(line)
        yield at / 1000, Prompt(_ids(runs), 512, tokens, answer)


def agent_sessions() -> Iterator[list[Prompt]]:
    """The prompts of each session, in order; block ids made distinct between sessions."""
    for number, line in enumerate(_lines("agent_sessions_24.jsonl.gz")):
        prompts: list[Prompt] = []
        previous: Sequence[int] = ()
        for _, tokens, answer, keep, new in json.loads(line)["requests"]:
            previous = (*previous[:keep], *(i + 1_000_000 * number for i in _ids(new)))
            prompts.append(Prompt(tuple(previous), 64, min(tokens, 64 * len(previous)), answer))
        yield prompts


def _lines(name: str) -> list[str]:
    return gzip.decompress((DATA / name).read_bytes()).decode().splitlines()


def _ids(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(first + k for first, count in runs for k in range(count))
