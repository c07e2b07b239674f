"""What the picker believes of its workers' caches is told as metrics, as JSON and as a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from epp.cli import main
from epp.config import read
from epp.endpoint import Endpoint, Pool
from epp.knowledge import Knowledge
from epp.kvcache.events.decoder import Batch, Removed, Stored
from epp.kvcache.tier import Tier
from epp.observe import caches
from epp.observe.metrics import Metrics
from epp.scheduler import Scheduler
from epp.sim.tokenizer import SHIPPED

CONFIG = f"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
models: [{{name: tiny, path: {SHIPPED}}}]
plugins:
- type: precise-prefix-cache-producer
  parameters: {{bind: "tcp://127.0.0.1:*"}}
- type: expected-ttft-scorer
"""
END = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


@dataclass
class Picker:
    """Two endpoints; the first publishes, the other's model is not known."""

    knowledge: Knowledge
    pool: Pool

    @property
    def summary(self) -> dict[str, Any]:
        return caches.summary(self.knowledge, self.pool)

    def metrics(self) -> dict[str, str]:
        """Every line of the page that is a number."""
        metrics = Metrics(self.pool, "p")
        metrics.sources["kv_events"] = lambda: caches.event_counters(self.knowledge)
        metrics.families.append(lambda: caches.families(self.knowledge))
        metrics.texts.append(lambda: caches.by_endpoint(self.knowledge, self.pool, "p"))
        lines = [line for line in metrics.render().decode().splitlines() if line[:1] != "#"]
        return dict(line.rsplit(" ", 1) for line in lines)


@asynccontextmanager
async def followed(config: str = CONFIG) -> AsyncIterator[Picker]:
    pool = Pool([Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000, name="second")])
    pool.endpoints[0].models = frozenset({"tiny"})
    knowledge = Knowledge(pool, lambda tokens: None)
    await knowledge.configure(Scheduler(read(config)))
    try:
        if knowledge.subscriber is not None:
            follower = knowledge.subscriber.follow(pool.endpoints[0], replay=True)
            assert follower is not None
            hashes, ids = np.arange(1, 11, dtype=np.uint64), np.arange(40, dtype=np.uint32)
            stored = Stored(hashes, None, ids, 4, "", (), Tier.GPU, 0, "", 0)
            copied = Stored(hashes[:6], None, ids[:24], 4, "", (), Tier.CPU, 0, "", 0)
            orphan = Stored(hashes[:3] + np.uint64(50), 49, ids[:12], 4, "", (), Tier.GPU, 0, "", 0)
            follower.connected(0.0)
            follower.replayed(END, 0.0)
            events = (stored, copied, Removed(hashes[8:], Tier.GPU, 0), orphan)
            follower.batch(0, Batch(100.0, 0, events), 0.0, 100.25)
            follower.work(0.0)
        yield Picker(knowledge, pool)
    finally:
        await knowledge.stop()


async def ask(summary: dict[str, Any], *options: str, columns: int = 160) -> Result:
    """`kvsteer index` at an admin port that gives this summary."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(summary)

    app = web.Application()
    app.add_routes([web.get("/debug/index", answer)])
    async with TestServer(app) as server:
        told = ["index", "--url", str(server.make_url("")), *options]
        return await asyncio.to_thread(CliRunner(env={"COLUMNS": str(columns)}).invoke, main, told)


async def test_the_summary_has_every_endpoint_by_tier_with_its_confidence() -> None:
    async with followed() as picker:
        summary = picker.summary
    assert json.loads(json.dumps(summary)) == summary
    first, second = summary["endpoints"]
    assert first["blocks"] == {"gpu": 8, "cpu": 6, "disk": 0, "peer": 0}
    assert (first["model"], first["confidence"], first["counts"], first["block_size"]) == ("tiny", "complete", 1.0, 4)
    assert (first["parked"], first["batches"], first["lag_s"]) == (3, 1, 0.25)
    assert (second["model"], second["confidence"], second["counts"]) == (None, "none", 0.0)
    assert sum(second["blocks"].values()) == 0


async def test_metrics_tell_of_events_blocks_and_confidence_by_endpoint() -> None:
    async with followed() as picker:
        found = picker.metrics()
    first, second = (f'model_server_pod="10.0.0.{n}:8000",name="p"' for n in (1, 2))
    assert found[f'kvsteer_index_blocks{{{first},tier="cpu"}}'] == "6.0"
    assert found[f"kvsteer_kv_events_confidence{{{first}}}"] == "1.0"
    assert found[f"kvsteer_kv_events_confidence{{{second}}}"] == "0.0"
    assert found[f"kvsteer_kv_events_lag_seconds{{{first}}}"] == "0.25"
    assert found[f"kvsteer_kv_events_lag_seconds{{{second}}}"] == "NaN"
    assert found[f"kvsteer_kv_events_parked_blocks{{{first}}}"] == "3.0"
    assert found["kvsteer_kv_events_batches_total"] == "1.0"
    assert found["kvsteer_kv_events_events_total"] == "4.0"
    assert float(found["kvsteer_index_bytes"]) > 0
    assert found['kvsteer_tokens_cache_lookups_total{kind="hit"}'].endswith(".0")


async def test_without_a_precise_producer_nothing_is_told() -> None:
    async with followed(CONFIG[: CONFIG.index("- type")] + "- type: expected-ttft-scorer") as picker:
        assert picker.summary == {"index": None, "endpoints": []}
        assert not [name for name in picker.metrics() if name.startswith(("kvsteer_index", "kvsteer_kv_events"))]
        result = await ask(picker.summary)
    assert result.exit_code == 1
    assert "no precise-prefix-cache-producer" in result.output


async def test_the_command_shows_a_row_an_endpoint() -> None:
    async with followed() as picker:
        result = await ask(picker.summary)
    assert result.exit_code == 0
    assert "10.0.0.1:8000" in result.output
    assert "gpu 8" in result.output
    assert "cpu 6" in result.output
    assert "complete" in result.output
    assert "10.0.0.2:8000" in result.output
    assert "none" in result.output


async def test_eighty_columns_are_enough_for_the_table() -> None:
    async with followed() as picker:
        result = await ask(picker.summary, columns=80)
    for whole in ("10.0.0.1:8000", "tiny", "confidence", "last batch", "over/under"):
        assert whole in result.output
    assert "\u2026" not in result.output


async def test_the_command_shows_all_of_one_endpoint_by_address_or_name() -> None:
    async with followed() as picker:
        one = await ask(picker.summary, "--endpoint", "10.0.0.1:8000")
        other = await ask(picker.summary, "--endpoint", "second")
        unknown = await ask(picker.summary, "--endpoint", "10.9.9.9:1")
    assert "lost batches" in one.output
    assert "10.0.0.2" not in one.output
    assert "10.0.0.2:8000" in other.output
    assert unknown.exit_code == 1
    assert "10.9.9.9:1 is not in the pool" in unknown.output


async def test_what_is_no_such_answer_is_said_in_a_line() -> None:
    answers: list[dict[str, Any]] = [{}, {"index": {}, "endpoints": []}, {"index": {"entries": 1}, "endpoints": [{}]}]
    for answer in answers:
        result = await ask(answer)
        assert result.exit_code == 1
        assert "not an answer that this version can read" in result.output
    refused = CliRunner().invoke(main, ["index", "--url", "http://127.0.0.1:1"])
    assert refused.exit_code == 1
