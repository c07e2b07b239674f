"""What each serving engine's metrics are called, and how to read one page of them.

In: a page of metrics and the engine it is thought to be. Out: a `Reading`: queue, batch, KV usage, adapters, blocks.

Several series of one gauge mean several engines behind one port (vLLM's internal data parallelism has an `engine`
label) or several models in one process. A request sent to the port may land in any of them, so the port's load is all
of theirs: waiting and running are summed, KV usage is the mean. Where the picker chooses the engine, each has a reading
of its own (`Reading.by_rank`). What a page does not say is unknown (NaN or None), never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from epp.endpoint import LoraState
from epp.signals.prometheus_text import Page, Sample, read_page


@dataclass(frozen=True, slots=True)
class Metric:
    """One family, narrowed to the series that carry these labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """Where an engine keeps what we want. Of several metrics in one place the first that is there counts."""

    name: str
    waiting: tuple[Metric, ...]
    running: tuple[Metric, ...]
    kv_usage: tuple[Metric, ...]
    rank_label: str = "engine"
    """Tells the series of data-parallel ranks behind one port apart."""
    path: str = "/metrics"
    narrow_path: str = ""
    """Where the same page can be had for chosen families, by `?name[]=`."""
    awake: Metric | None = None
    """1 while the engine serves, 0 while it sleeps, its cache dropped."""
    lora: str = ""
    cache_info: str = ""
    """An info metric whose labels `block_size_label` and `blocks_label` hold the numbers as text ...."""
    block_size_label: str = ""
    blocks_label: str = ""
    null_blocks: int = 0
    """Blocks of each engine that never hold KV (vLLM keeps one null block)."""
    block_size: Metric | None = None
    """... or two plain gauges."""
    blocks: Metric | None = None

    @property
    def names(self) -> list[str]:
        """Every family this engine is read from."""
        metrics = [*self.waiting, *self.running, *self.kv_usage, self.awake, self.block_size, self.blocks]
        return sorted({m.name for m in metrics if m} | {name for name in (self.lora, self.cache_info) if name})

    @property
    def narrow_url(self) -> str:
        """Path and query of the narrow page, "" when there is none."""
        return f"{self.narrow_path}?{urlencode([('name[]', name) for name in self.names])}" if self.narrow_path else ""


def _triton(kind: str) -> Metric:
    return Metric("nv_trt_llm_kv_cache_block_metrics", (("kv_cache_block_type", kind),))


BY_NAME: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            waiting=(Metric("vllm:num_requests_waiting"), Metric("vllm:num_requests_waiting_total")),
            running=(Metric("vllm:num_requests_running"), Metric("vllm:num_requests_running_total")),
            # gpu_cache_usage_perc until vLLM 0.10.
            kv_usage=(Metric("vllm:kv_cache_usage_perc"), Metric("vllm:gpu_cache_usage_perc")),
            awake=Metric("vllm:engine_sleep_state", (("sleep_state", "awake"),)),
            lora="vllm:lora_requests_info",
            # /metrics is answered by a route that ignores the query; with the slash it is prometheus-client's own
            # application. Measured on 0.32: 1.7 KB instead of 48 KB, 0.3 ms of the worker's CPU instead of 3.2 ms. With
            # several API servers it answers an empty page.
            narrow_path="/metrics/",
            cache_info="vllm:cache_config_info",
            block_size_label="block_size",
            blocks_label="num_gpu_blocks",
            null_blocks=1,
        ),
        Engine(
            "sglang",
            waiting=(Metric("sglang:num_queue_reqs"),),
            running=(Metric("sglang:num_running_reqs"),),
            kv_usage=(Metric("sglang:token_usage"),),
            rank_label="dp_rank",
            cache_info="sglang:cache_config_info",
            block_size_label="page_size",
            blocks_label="num_pages",
        ),
        Engine(
            "trtllm-serve",
            waiting=(Metric("trtllm_num_requests_waiting"),),
            running=(Metric("trtllm_num_requests_running"),),
            kv_usage=(Metric("trtllm_kv_cache_utilization"),),
            path="/prometheus/metrics",
            block_size=Metric("trtllm_kv_cache_tokens_per_block"),
            blocks=Metric("trtllm_kv_cache_max_blocks"),
        ),
        Engine(
            "triton-tensorrt-llm",
            waiting=(Metric("nv_trt_llm_request_metrics", (("request_type", "waiting"),)),),
            running=(Metric("nv_trt_llm_request_metrics", (("request_type", "scheduled"),)),),
            kv_usage=(_triton("fraction"),),
            block_size=_triton("tokens_per"),
            blocks=_triton("max"),
        ),
    )
}

OTHER_PATH = BY_NAME["trtllm-serve"].path
"""Where metrics may be when they are not at `/metrics`."""

_REPLICA_LABELS = ("tp_rank", "pp_rank", "pid")
"""Series that differ in these alone are one engine told by several of its processes (SGLang), not several engines."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one page says of an endpoint. `engine` is "" when no known engine's metrics are on it."""

    engine: str
    waiting: float = math.nan
    running: float = math.nan
    kv_usage: float = math.nan
    lora: LoraState | None = None
    block_size: int | None = None
    cache_blocks: int | None = None
    """Blocks that can hold KV, all engines of the port together."""
    asleep: bool = False
    """Every engine says that it sleeps."""
    malformed: int = 0
    by_rank: tuple[Reading, ...] = ()
    """What the page says of each data-parallel rank, where several were asked for."""

    @property
    def unknown(self) -> list[str]:
        """The gauges the page does not tell."""
        return [name for name in ("waiting", "running", "kv_usage") if math.isnan(getattr(self, name))]

    @property
    def told(self) -> tuple[bool, ...]:
        """Which of the things that a page may tell this one does."""
        gauges = (self.waiting, self.running, self.kv_usage)
        others = (self.lora, self.block_size, self.cache_blocks)
        return (*(not math.isnan(gauge) for gauge in gauges), *(other is not None for other in others))


NOTHING = Reading("")


def read(page: bytes, engine: str, ranks: int = 1) -> Reading:
    """Read a page as that engine's; where it is another's, or `engine` is none of ours ("auto"), find out whose.

    With several `ranks`, the reading also has one of each.
    """
    malformed = 0
    for candidate in sorted(BY_NAME.values(), key=lambda e: e.name != engine):
        found = read_page(page, candidate.names)
        reading = _read_as(candidate, found)
        malformed += reading.malformed
        if len(reading.unknown) < 3:
            return replace(reading, by_rank=_by_rank(candidate, found, reading, ranks)) if ranks > 1 else reading
    return replace(NOTHING, malformed=malformed)


def _by_rank(engine: Engine, page: Page, whole: Reading, ranks: int) -> tuple[Reading, ...]:
    """Ranks share adapters and the blocks' size and number; the rest is what each one's own series say."""
    blocks = None if whole.cache_blocks is None else whole.cache_blocks // ranks or None
    shared = replace(whole, cache_blocks=blocks)
    return tuple(
        replace(
            shared,
            waiting=_sum(_series(page, _of_rank(engine, engine.waiting, rank))),
            running=_sum(_series(page, _of_rank(engine, engine.running, rank))),
            kv_usage=_mean(_series(page, _of_rank(engine, engine.kv_usage, rank))),
        )
        for rank in range(ranks)
    )


def _of_rank(engine: Engine, metrics: Sequence[Metric], rank: int) -> list[Metric]:
    return [replace(metric, labels=(*metric.labels, (engine.rank_label, str(rank)))) for metric in metrics]


def _read_as(engine: Engine, page: Page) -> Reading:
    block_size, cache_blocks = _cache(engine, page)
    return Reading(
        engine.name,
        waiting=_sum(_series(page, engine.waiting)),
        running=_sum(_series(page, engine.running)),
        kv_usage=_mean(_series(page, engine.kv_usage)),
        lora=_lora(page.samples.get(engine.lora, ())),
        block_size=block_size,
        cache_blocks=cache_blocks,
        asleep=_asleep(engine, page),
        malformed=page.malformed,
    )


def _series(page: Page, metrics: Sequence[Metric]) -> list[float]:
    """The values of the first metric that is there: one per engine and model; NaN, infinity and negatives left out."""
    for metric in metrics:
        values: dict[frozenset[tuple[str, str]], float] = {}
        for sample in page.samples.get(metric.name, ()):
            if 0 <= sample.value < math.inf and all(sample.labels.get(k) == v for k, v in metric.labels):
                key = frozenset(item for item in sample.labels.items() if item[0] not in _REPLICA_LABELS)
                values[key] = max(sample.value, values.get(key, 0.0))
        if values:
            return list(values.values())
    return []


def _asleep(engine: Engine, page: Page) -> bool:
    states = _series(page, (engine.awake,)) if engine.awake else []
    return bool(states) and not any(states)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    return min(math.fsum(values) / len(values), 1.0) if values else math.nan


def _lora(samples: Sequence[Sample]) -> LoraState | None:
    """vLLM adds a series for every set of adapters it ever had; its value is when that was true: the newest counts."""
    newest = max((s for s in samples if not math.isnan(s.value)), key=lambda s: s.value, default=None)
    if newest is None:
        return None
    return LoraState(
        running=_names(newest.labels.get("running_lora_adapters", "")),
        waiting=_names(newest.labels.get("waiting_lora_adapters", "")),
        max_adapters=_positive(newest.labels.get("max_lora", "")) or 0,
    )


def _cache(engine: Engine, page: Page) -> tuple[int | None, int | None]:
    """Block size and usable blocks.

    With internal data parallelism vLLM's front end adds up the blocks of its engines and every engine's series repeats
    that sum (seen in 0.32), hence the greatest, less one null block per engine.
    """
    if engine.block_size and engine.blocks:
        sizes, counts = _series(page, (engine.block_size,)), _series(page, (engine.blocks,))
        return (int(max(sizes, default=0)) or None, int(sum(counts)) or None)
    infos = page.samples.get(engine.cache_info, ())
    block_size = max((_positive(s.labels.get(engine.block_size_label, "")) or 0 for s in infos), default=0)
    blocks = max((_positive(s.labels.get(engine.blocks_label, "")) or 0 for s in infos), default=0)
    return block_size or None, max(blocks - engine.null_blocks * len(infos), 0) or None


def _names(text: str) -> frozenset[str]:
    return frozenset(name for part in text.split(",") if (name := part.strip()))


def _positive(text: str) -> int | None:
    """Label values are text, and "None" where the engine does not know."""
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) <= 18 else None
