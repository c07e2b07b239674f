"""The worker's `/metrics` page: vLLM 0.32's names, labels and text, from the engine's counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from epp.sim.engine import EngineCore
from epp.sim.stats import Histogram

Family: TypeAlias = tuple[str, str]
"""Its HELP and TYPE, and its sample lines."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class LoraInfo:
    """`vllm:lora_requests_info`: one series per combination seen, its value the time it was last true.

    As in vLLM 0.32 both lists name the running adapters, and old combinations stay for ever.
    """

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._seen: dict[str, float] = {}

    def update(self, running: Iterable[str], wall_time: float) -> None:
        names = ",".join(sorted(set(running)))
        if names or self._seen:
            self._seen[names] = wall_time

    def family(self) -> Family:
        return _family(
            "lora_requests_info",
            "gauge",
            "Running stats on lora requests.",
            [
                (f'max_lora="{self.max_loras}",running_lora_adapters="{names}",waiting_lora_adapters="{names}"', at)
                for names, at in self._seen.items()
            ],
        )


def render_metrics(cores: Sequence[EngineCore], model_name: str, lora_info: LoraInfo | None = None) -> str:
    """Prometheus text format 0.0.4; each family has series of every engine."""
    blocks = sum(core.config.num_gpu_blocks for core in cores)
    of_engines = [_families(core, engine, model_name, blocks) for engine, core in enumerate(cores)]
    page = ["".join([same[0][0], *(lines for _, lines in same)]) for same in zip(*of_engines, strict=True)]
    if lora_info is not None:
        page += lora_info.family()
    return "".join(page)


def _families(core: EngineCore, engine: int, model_name: str, all_blocks: int) -> list[Family]:
    labels = f'engine="{engine}",model_name="{_escape(model_name)}"'
    stats = core.stats
    waiting, running = len(core.scheduler.waiting), len(core.scheduler.running)
    level = core.sleep_level
    computed = stats.prompt_tokens - stats.prompt_tokens_cached

    def one(name: str, kind: str, text: str, value: float) -> Family:
        return _family(name, kind, text, [(labels, value)])

    def by(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> Family:
        return _family(name, kind, text, [(f'{labels},{label}="{key}"', value) for key, value in values.items()])

    return [
        one("num_requests_running", "gauge", "Number of requests in model execution batches.", running),
        one("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", waiting),
        by(
            "num_requests_waiting_by_reason",
            "gauge",
            "Number of waiting requests by reason.",
            "reason",
            {"capacity": waiting, "deferred": 0},
        ),
        by(
            "engine_sleep_state",
            "gauge",
            "Engine sleep state.",
            "sleep_state",
            {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2},
        ),
        one("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", core.kv.block_pool.usage),
        one(
            "prefix_cache_queries_total",
            "counter",
            "Prefix cache queries, in terms of number of queried tokens.",
            stats.prefix_cache_queries,
        ),
        one(
            "prefix_cache_hits_total",
            "counter",
            "Prefix cache hits, in terms of number of cached tokens.",
            stats.prefix_cache_hits,
        ),
        one("num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", stats.preemptions),
        one("prompt_tokens_total", "counter", "Number of prefill tokens processed.", stats.prompt_tokens),
        by(
            "prompt_tokens_by_source_total",
            "counter",
            "Number of prompt tokens by source.",
            "source",
            {"local_compute": computed, "local_cache_hit": stats.prompt_tokens_cached, "external_kv_transfer": 0},
        ),
        one("generation_tokens_total", "counter", "Number of generation tokens processed.", stats.generation_tokens),
        by(
            "request_success_total",
            "counter",
            "Count of successfully processed requests.",
            "finished_reason",
            {reason: stats.requests_by_reason[reason] for reason in FINISH_REASONS},
        ),
        *(_histogram(name, labels, histogram) for name, histogram in stats.histograms().items()),
        _family(
            "cache_config_info",
            "gauge",
            "Information of the LLMEngine CacheConfig",
            [(_cache_config_labels(core, engine, all_blocks), 1.0)],
        ),
    ]


def _cache_config_labels(core: EngineCore, engine: int, all_blocks: int) -> str:
    """Values are strings, also of what is a number or nothing. Every engine's series says the blocks of all."""
    config = core.config
    values = {
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": config.enable_prefix_caching,
        "engine": engine,
        "hash_block_size": None,
        "kv_cache_size_tokens": config.num_gpu_blocks * config.block_size,
        "num_cpu_blocks": None,
        "num_gpu_blocks": all_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
        "user_specified_block_size": True,
    }
    return ",".join(f'{key}="{value}"' for key, value in values.items())


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> Family:
    lines = [f"vllm:{name}{{{labels}}} {float(value)}\n" for labels, value in samples]
    return f"# HELP vllm:{name} {text}\n# TYPE vllm:{name} {kind}\n", "".join(lines)


def _histogram(name: str, labels: str, histogram: Histogram) -> Family:
    lines: list[str] = []
    total = 0
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        lines.append(f'vllm:{name}_bucket{{{labels},le="{bound}"}} {float(total)}\n')
    lines.append(f"vllm:{name}_count{{{labels}}} {float(total)}\nvllm:{name}_sum{{{labels}}} {histogram.sum}\n")
    return f"# HELP vllm:{name} Histogram.\n# TYPE vllm:{name} histogram\n", "".join(lines)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
