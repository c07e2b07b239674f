"""Scraping fake workers on loopback: what reaches the pool, and what a worker at fault does to the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from urllib.parse import unquote

import pytest

from epp.discovery.membership import EndpointSpec, Membership
from epp.endpoint import Endpoint, Pool
from epp.signals.outcome import Outcome
from epp.signals.scraper import Scraper, ScrapeSettings, parse_models

DATA = Path(__file__).parent / "data"
PAGE = b"vllm:num_requests_waiting 2\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"


class FakeWorker:
    """Serves `pages` by path over HTTP/1.1 keep-alive; a page of None is accepted and never answered."""

    def __init__(self, **pages: bytes | None) -> None:
        self.pages: dict[str, bytes | None] = {"/metrics": PAGE}
        self.pages.update({"/" + path: page for path, page in pages.items()})
        self.status = "200 OK"
        self.connections = 0
        self.scrapes = 0
        self.asked: list[str] = []
        self.waiting_now = 0
        self.answer = asyncio.Event()
        self.answer.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.asked.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode())
                path = self.asked[-1].partition("?")[0]
                page = self.pages.get(path, b"")
                self.scrapes += path == "/metrics"
                self.waiting_now += 1
                if page is None:
                    await asyncio.Event().wait()
                await self.answer.wait()
                self.waiting_now -= 1
                status = self.status if path in self.pages else "404 Not Found"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Length: {len(page or b'')}\r\n\r\n".encode() + (page or b"")
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(worker: FakeWorker, port: int = 0) -> AsyncIterator[Endpoint]:
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await worker(reader, writer)
        except asyncio.CancelledError:
            pass

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    try:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers)


@asynccontextmanager
async def scraping(*endpoints: Endpoint, timeout_s: float = 5.0, forget_s: float = 30.0) -> AsyncIterator[Run]:
    run = Run(ScrapeSettings(interval_s=0.01, timeout_s=timeout_s, models_interval_s=0.02, forget_s=forget_s))
    run.pool.update(add=endpoints)
    run.scraper.changed(endpoints, [])
    try:
        yield run
    finally:
        await run.scraper.stop()


class Run:
    """A scraper over a pool, with a clock set by hand."""

    def __init__(self, settings: ScrapeSettings) -> None:
        self.now = 100.0
        self.pool = Pool()
        self.outcomes: list[tuple[Endpoint, Outcome]] = []
        self.scraper = Scraper(
            settings,
            clock=lambda: self.now,
            random=Random(1),
            listener=lambda endpoint, now, outcome: self.listener(endpoint, outcome),
        )

    def listener(self, endpoint: Endpoint, outcome: Outcome) -> None:
        self.outcomes.append((endpoint, outcome))

    async def outcome(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """Wait for an outcome that is reported from now on."""
        seen = len(self.outcomes)
        await until(lambda: (endpoint, outcome) in self.outcomes[seen:])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_worker_is_scraped_into_its_row() -> None:
    worker = FakeWorker()
    worker.pages["/metrics"] = (DATA / "vllm_under_load.txt").read_bytes()
    worker.pages["/v1/models"] = (DATA / "v1_models_lora.json").read_bytes()
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await until(lambda: endpoint.models is not None)
        candidates = run.pool.candidates(100.0)
        assert candidates.column("waiting")[0] == 8
        assert candidates.column("running")[0] == 3
        assert candidates.column("scraped_at")[0] == 100.0
        assert (endpoint.block_size, endpoint.cache_blocks, endpoint.engine) == (32, 255, "vllm")
        assert endpoint.models == frozenset({"tiny", "ad1", "ad2"})
        assert endpoint.parents == {"ad1": "tiny", "ad2": "tiny"}


async def test_one_connection_is_kept() -> None:
    worker = FakeWorker()
    async with serving(worker) as endpoint, scraping(endpoint):
        await until(lambda: worker.scrapes >= 5)
        assert worker.connections == 1


async def test_a_hung_worker_delays_nobody_and_goes_stale() -> None:
    """One worker that accepted and never answered stalled all scraping elsewhere."""
    good = [FakeWorker() for _ in range(3)]
    hung = FakeWorker(metrics=None)
    async with (
        serving(hung) as bad,
        serving(good[0]) as a,
        serving(good[1]) as b,
        serving(good[2]) as c,
        scraping(bad, a, b, c, timeout_s=600.0) as run,
    ):
        await until(lambda: min(worker.scrapes for worker in good) >= 10)
        assert hung.scrapes == 1
        assert run.pool.candidates(101.0).fresh(2.0).tolist() == [False, True, True, True]


async def test_a_hung_scrape_times_out_and_is_tried_again() -> None:
    worker = FakeWorker(metrics=None)
    async with serving(worker) as endpoint, scraping(endpoint, timeout_s=0.05) as run:
        await run.outcome(endpoint, Outcome.TIMEOUT)
        worker.pages["/metrics"] = PAGE
        await run.outcome(endpoint, Outcome.GOOD)
        assert endpoint.get("waiting") == 2


async def test_three_hundred_slow_workers_are_asked_all_at_once() -> None:
    """An HTTP client's pool of 100 connections was the limit elsewhere."""
    worker = FakeWorker()
    worker.answer.clear()
    async with AsyncExitStack() as stack:
        many = [await stack.enter_async_context(serving(worker)) for _ in range(300)]
        run = Run(ScrapeSettings(interval_s=0.01, timeout_s=60.0))
        run.scraper.changed(many, [])
        try:
            await until(lambda: worker.waiting_now == 300)
            assert run.scraper.interval_s == 300 / 200.0
        finally:
            await run.scraper.stop()


RANKS = b"".join(
    b'vllm:num_requests_%s{engine="%d",model_name="m"} %d\n' % (gauge, engine, value)
    for gauge, values in ((b"waiting", (4, 0)), (b"running", (8, 1)))
    for engine, value in enumerate(values)
)


async def test_a_page_of_several_ranks_is_read_once_and_shared_out() -> None:
    worker = FakeWorker(**{"metrics": RANKS, "v1/models": b'{"data":[{"id":"m"}]}'})
    async with serving(worker) as at:
        ranks = [Endpoint(at.host, at.port, rank=rank, ranks=2) for rank in range(2)]
        async with scraping(*ranks) as run:
            await until(lambda: len(run.outcomes) >= 8 and ranks[1].models is not None)
            assert [e.get("waiting") for e in ranks] == [4, 0]
            assert [e.get("running") for e in ranks] == [8, 1]
            assert len(run.outcomes) // 2 <= worker.scrapes < len(run.outcomes)
            run.scraper.changed([], ranks[:1])
            seen = len(run.outcomes)
            await until(lambda: len(run.outcomes) >= seen + 3)
            assert {endpoint for endpoint, _ in run.outcomes[seen + 1 :]} == {ranks[1]}
            run.scraper.changed([], ranks[1:])
            seen = len(run.outcomes)
            await asyncio.sleep(0.05)
            assert len(run.outcomes) == seen


async def test_nothing_piles_up_on_a_slow_worker() -> None:
    worker = FakeWorker()
    worker.answer.clear()
    async with serving(worker) as endpoint, scraping(endpoint):
        await until(lambda: worker.waiting_now == 1)
        await asyncio.sleep(0.1)
        assert (worker.waiting_now, worker.connections) == (1, 1)


async def test_a_pick_made_while_a_scrape_is_under_way_is_seen_by_the_next() -> None:
    worker = FakeWorker()
    worker.answer.clear()
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        endpoint.acquire(1, now=0.0)
        await until(lambda: worker.waiting_now == 1)
        endpoint.acquire(1, now=0.0)
        unseen: list[int] = []
        run.listener = lambda endpoint, outcome: unseen.append(endpoint.unseen)  # type: ignore[method-assign]
        worker.answer.set()
        await until(lambda: len(unseen) >= 2)
        assert unseen[:2] == [1, 0]


async def test_a_failed_scrape_keeps_the_values_until_they_are_too_old_to_mean_anything() -> None:
    worker = FakeWorker()
    async with serving(worker) as endpoint, scraping(endpoint, forget_s=30.0) as run:
        await run.outcome(endpoint, Outcome.GOOD)
        worker.status = "503 Service Unavailable"
        await run.outcome(endpoint, Outcome.STATUS)
        assert endpoint.get("waiting") == 2
        assert endpoint.get("scraped_at") == 100.0
        run.now = 131.0
        await run.outcome(endpoint, Outcome.STATUS)
        assert [math.isnan(endpoint.get(name)) for name in ("waiting", "running", "kv_usage")] == [True] * 3
        assert run.scraper.counters["status"] >= 2


async def test_a_pool_of_one_whose_metrics_stopped_still_serves() -> None:
    """All stale was taken for none usable elsewhere, and answered 500."""
    worker = FakeWorker()
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await run.outcome(endpoint, Outcome.GOOD)
        worker.status = "500 Internal Server Error"
        run.now = 1000.0
        await run.outcome(endpoint, Outcome.STATUS)
        candidates = run.pool.candidates(1000.0)
        assert len(candidates.select(candidates.fresh(2.0))) == 1


async def test_a_missing_gauge_is_unknown_and_counted() -> None:
    worker = FakeWorker(metrics=b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n")
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await run.outcome(endpoint, Outcome.GOOD)
        assert math.isnan(endpoint.get("kv_usage"))
        assert endpoint.get("waiting") == 0
        assert run.scraper.counters["unknown_kv_usage"] >= 1


async def test_a_page_without_known_metrics_is_not_a_good_scrape() -> None:
    worker = FakeWorker(metrics=b"<html>hello</html>")
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        endpoint.acquire(1, now=0.0)
        await run.outcome(endpoint, Outcome.UNREADABLE)
        assert endpoint.unseen == 1
        assert endpoint.get("scraped_at") == -math.inf


async def test_a_page_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.signals.scraper.MAX_PAGE_BYTES", 1000)
    worker = FakeWorker(metrics=PAGE + b"#" * 1000)
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await run.outcome(endpoint, Outcome.UNREADABLE)


async def test_an_answer_that_is_not_http_is_told_and_tried_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-what\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server, scraping(endpoint) as run:
        await until(lambda: len(run.outcomes) >= 2)
        assert {outcome for _, outcome in run.outcomes} == {Outcome.UNREADABLE}


async def test_metrics_at_the_other_path_are_found() -> None:
    worker = FakeWorker()
    del worker.pages["/metrics"]
    worker.pages["/prometheus/metrics"] = b"trtllm_num_requests_waiting 4\n"
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await run.outcome(endpoint, Outcome.GOOD)
        assert (endpoint.engine, endpoint.get("waiting")) == ("trtllm-serve", 4)


async def test_once_vllm_is_known_only_the_wanted_families_are_asked_for() -> None:
    worker = FakeWorker()
    worker.pages["/metrics/"] = PAGE.replace(b"num_requests_waiting 2", b"num_requests_waiting 7")
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await until(lambda: endpoint.get("waiting") == 7)
        assert worker.scrapes == 1
        assert unquote(worker.asked[-1]).startswith("/metrics/?name[]=vllm:cache_config_info&name[]=vllm:")
        assert run.scraper.counters[Outcome.GOOD] >= 2


@pytest.mark.parametrize("narrow", [b"", PAGE.partition(b"\n")[0], None])
async def test_where_the_narrow_page_tells_less_the_whole_one_is_read_in_the_same_scrape(narrow: bytes | None) -> None:
    """vLLM with several API servers answers an empty page, other servers know no such path."""
    worker = FakeWorker()
    if narrow is not None:
        worker.pages["/metrics/"] = narrow
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        await until(lambda: worker.scrapes >= 4)
        assert {outcome for _, outcome in run.outcomes} == {Outcome.GOOD}
        assert sum(path.startswith("/metrics/") for path in worker.asked) == 1
        assert endpoint.get("kv_usage") == 0.5


async def test_after_a_restart_the_narrow_page_is_tried_again() -> None:
    old, new = FakeWorker(), FakeWorker()
    new.pages["/metrics/"] = PAGE
    async with serving(FakeWorker()) as free:
        endpoint = Endpoint(free.host, free.port)
    async with scraping(endpoint) as run:
        async with serving(old, endpoint.port):
            await until(lambda: old.scrapes >= 3)
        await run.outcome(endpoint, Outcome.REFUSED)
        async with serving(new, endpoint.port):
            await until(lambda: sum(path.startswith("/metrics/") for path in new.asked) >= 2)


async def test_a_worker_that_starts_later_is_found() -> None:
    async with serving(FakeWorker()) as free:
        port = free.port
    endpoint = Endpoint("127.0.0.1", port)
    async with scraping(endpoint) as run:
        await run.outcome(endpoint, Outcome.REFUSED)
        async with serving(FakeWorker(), port):
            await run.outcome(endpoint, Outcome.GOOD)
        assert run.scraper.counters["refused"] >= 1


async def test_scraping_follows_a_changed_port() -> None:
    """The old port was scraped on elsewhere."""
    old, new = FakeWorker(), FakeWorker()
    async with serving(old) as a, serving(new) as b:
        run = Run(ScrapeSettings(interval_s=0.01))
        members = Membership(run.pool, lambda: run.now, [run.scraper.changed])
        try:
            members.publish("hand", [EndpointSpec("127.0.0.1", a.port)])
            await until(lambda: old.scrapes >= 1)
            members.publish("hand", [EndpointSpec("127.0.0.1", b.port)])
            scrapes = old.scrapes
            await until(lambda: new.scrapes >= 5)
            assert old.scrapes <= scrapes + 1
        finally:
            await run.scraper.stop()


async def test_a_fault_in_the_listener_does_not_end_scraping() -> None:
    def listener(endpoint: Endpoint, outcome: Outcome) -> None:
        raise RuntimeError("no")

    worker = FakeWorker()
    async with serving(worker) as endpoint, scraping(endpoint) as run:
        run.listener = listener  # type: ignore[method-assign]
        await until(lambda: run.scraper.counters["faults"] >= 2)


async def test_models_that_cannot_be_read_leave_what_was_known() -> None:
    worker = FakeWorker()
    worker.pages["/v1/models"] = b'{"data":[{"id":"m"},{"id":7},3]}'
    async with serving(worker) as endpoint, scraping(endpoint) as run:

        def turn() -> bool:
            run.now += 1.0
            return False

        await until(lambda: turn() or endpoint.models is not None)
        assert endpoint.models == frozenset({"m"})
        worker.pages["/v1/models"] = b"oops"
        await until(lambda: turn() or run.scraper.counters["models_failed"] >= 1)
        assert endpoint.models == frozenset({"m"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"data":{}}', b'{"data":null}', b"[" * 100_000, b"\xff"])
def test_a_models_answer_of_another_shape_is_no_answer(body: bytes) -> None:
    assert parse_models(body) is None
