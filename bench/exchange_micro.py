"""What a whole request and a response chunk cost inside the picker: ext_proc messages in, replies out, no sockets.

The picker is put together as `kvsteer serve` does, over endpoints with gauges of their own, with the default policy.
A request of 400 KB is a conversation seen before but for its last turn.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from bench import messages
from bench.backend import BODY, CHUNK
from bench.bodies import Conversation, small
from bench.scheduler_micro import make_pool
from bench.timing import EFFORT, cpu_us, each_us
from epp.config import load_default
from epp.director import Director
from epp.exchange import Exchange, Patience, Timer
from epp.figures import Figure, figure
from epp.gateway.ext_proc import BodyMode
from epp.gateway.ext_proc_events import Limits
from epp.gateway.server import tune_malloc
from epp.gateway.session import GrpcStatus
from epp.observe.decision_log import DecisionLog
from epp.observe.metrics import Metrics
from epp.scheduler import Scheduler
from epp.signals.health import Health

T = TypeVar("T")


class Still:
    """An event loop on which no time passes, and a writer that is never used: bodies here are read at once."""

    def now(self) -> float:
        return 100.0

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        raise AssertionError("a request waited")

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        raise AssertionError("a body was read off the loop")

    def send(self, messages: object) -> None:
        raise AssertionError("a reply came late")

    def finish(self, status: GrpcStatus, message: str = "") -> None:
        raise AssertionError(f"the stream ended: {status} {message}")


def make_director(endpoints: int) -> Director:
    pool = make_pool(endpoints)
    scheduler = Scheduler(load_default(), random=Random(1))
    return Director(
        pool=pool,
        scheduler=lambda: scheduler,
        health=Health(pool, random=Random(1)),
        metrics=Metrics(pool),
        decisions=DecisionLog(),
        wall=lambda: 1.8e9,
    )


def open_exchange(director: Director) -> Exchange:
    still = Still()
    return Exchange(director, still, Limits(), Patience(), still)  # type: ignore[arg-type]


def run(director: Director, sent: list[bytes]) -> Exchange:
    """One request up to its steering."""
    exchange = open_exchange(director)
    for message in sent:
        exchange.receive(message)
    return exchange


def figures() -> list[Figure]:
    tune_malloc()  # as the edge does at its start
    out = []
    for endpoints in (16, 544):
        director = make_director(endpoints)
        for mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX):
            short = messages.request(mode, small(1))
            cost = cpu_us(lambda d=director, s=short: run(d, s).closed())  # type: ignore[misc]
            out.append(figure(f"exchange/200 B, {mode.name}, {endpoints} endpoints", cost, "us"))
            cost = each_us([lambda d=director, t=turn: run(d, t).closed() for turn in _turns(mode)])  # type: ignore[misc]
            out.append(figure(f"exchange/400 KB, {mode.name}, {endpoints} endpoints", cost, "us"))
    director, short = make_director(16), messages.request(BodyMode.FULL_DUPLEX, small(1))
    answer = [messages.response_head(b"application/json"), messages.response_chunk(BODY)]
    answer.append(messages.response_chunk(b"", end=True))
    cost = cpu_us(lambda: _whole(director, short, answer))
    out.append(figure("exchange/200 B and its answer, FULL_DUPLEX, 16 endpoints", cost, "us"))
    exchange = run(make_director(16), messages.request(BodyMode.FULL_DUPLEX, small(1, stream=True)))
    exchange.receive(messages.response_head())
    chunk = messages.response_chunk(CHUNK)
    return [*out, figure("exchange/response chunk", cpu_us(lambda: exchange.receive(chunk)), "us")]


def _whole(director: Director, sent: list[bytes], answer: list[bytes]) -> None:
    """One request to its end."""
    exchange = run(director, sent)
    for message in answer:
        exchange.receive(message)
    exchange.half_closed()
    exchange.closed()


def _turns(mode: BodyMode) -> list[list[bytes]]:
    """A conversation of 400 KB and its next turns, another one for each mode."""
    conversation = Conversation(int(mode))
    return [messages.request(mode, conversation.body(0, turn)) for turn in range(max(3, EFFORT.times(30)))]
