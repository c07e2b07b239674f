"""What is read from the metrics page of each engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from epp.endpoint import ENGINES, LoraState
from epp.signals.engines import BY_NAME, Reading, read

DATA = Path(__file__).parent / "data"


def gauges(reading: Reading) -> object:
    return reading.waiting, reading.running, reading.kv_usage


def test_every_engine_of_the_pool_has_its_metrics_named() -> None:
    assert set(BY_NAME) == set(ENGINES)


def test_a_loaded_vllm_is_read() -> None:
    """Page of vLLM 0.32 with three running and eight waiting requests; 256 blocks of which one is the null block."""
    reading = read((DATA / "vllm_under_load.txt").read_bytes(), "vllm")
    assert gauges(reading) == (8.0, 3.0, pytest.approx(0.40784, abs=1e-5))
    assert (reading.block_size, reading.cache_blocks, reading.malformed) == (32, 255, 0)
    assert reading.lora is None


def test_the_newest_lora_series_counts_whatever_the_order() -> None:
    """vLLM keeps the series of every set of adapters it had; in this page the newest is the first: none is running."""
    reading = read((DATA / "vllm_lora.txt").read_bytes(), "vllm")
    assert reading.lora == LoraState(frozenset(), frozenset(), 1)
    page = b"""vllm:num_requests_waiting 0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c,"} 1.8e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="x",waiting_lora_adapters=""} NaN
"""
    assert read(page, "vllm").lora == LoraState(frozenset({"a", "b"}), frozenset({"c"}), 4)


def test_two_engines_behind_one_port_have_their_blocks_counted_once() -> None:
    """Each of the two series says 512, the sum of both; each engine keeps one null block."""
    reading = read((DATA / "vllm_dp2.txt").read_bytes(), "vllm")
    assert (reading.block_size, reading.cache_blocks) == (32, 510)


def test_each_rank_has_a_reading_of_its_own_and_its_share_of_the_blocks() -> None:
    page = (DATA / "vllm_dp2.txt").read_bytes()
    page = page.replace(
        b'num_requests_waiting{engine="1",model_name="tiny"} 0', b'num_requests_waiting{engine="1",model_name="tiny"} 7'
    ).replace(
        b'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0',
        b'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5',
    )
    reading = read(page, "vllm", 2)
    assert gauges(reading) == (7.0, 0.0, 0.25)
    assert [gauges(rank) for rank in reading.by_rank] == [(0.0, 0.0, 0.5), (7.0, 0.0, 0.0)]
    assert [(rank.block_size, rank.cache_blocks) for rank in reading.by_rank] == [(32, 255)] * 2


def test_a_rank_that_the_page_does_not_have_is_unknown() -> None:
    reading = read((DATA / "vllm_dp2.txt").read_bytes(), "vllm", 3)
    assert [len(rank.unknown) for rank in reading.by_rank] == [0, 0, 3]


def test_engines_and_models_behind_one_port_are_added_up() -> None:
    """The series of one engine or one model alone was taken elsewhere."""
    values: dict[bytes, tuple[float, ...]] = {
        b"vllm:num_requests_waiting": (1, 2, 4, 8),
        b"vllm:num_requests_running": (10, 20, 40, 80),
        b"vllm:kv_cache_usage_perc": (0.1, 0.2, 0.3, 0.6),
    }
    series = ((0, b"m"), (1, b"m"), (0, b"n"), (1, b"n"))
    page = b"\n".join(
        b'%s{engine="%d",model_name="%s"} %g' % (name, engine, model, value)
        for name, of_series in values.items()
        for (engine, model), value in zip(series, of_series, strict=True)
    )
    assert gauges(read(page, "vllm")) == (15.0, 150.0, pytest.approx(0.3))


def test_the_old_name_of_kv_usage_is_read_too_and_the_new_one_goes_first() -> None:
    old = b"vllm:gpu_cache_usage_perc 0.7\nvllm:num_requests_waiting_total 3\nvllm:num_requests_running_total 4\n"
    assert gauges(read(old, "vllm")) == (3.0, 4.0, 0.7)
    assert read(old + b"vllm:kv_cache_usage_perc 0.2\n", "vllm").kv_usage == 0.2


def test_what_a_page_does_not_tell_is_unknown_and_not_zero() -> None:
    reading = read(b"vllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc NaN\n", "vllm")
    assert reading.waiting == 3.0
    assert math.isnan(reading.running)
    assert math.isnan(reading.kv_usage)
    assert reading.unknown == ["running", "kv_usage"]
    assert (reading.block_size, reading.cache_blocks) == (None, None)


@pytest.mark.parametrize("value", [b"-1", b"+Inf", b"-Inf", b"NaN", b"lots"])
def test_a_value_that_no_gauge_can_have_is_unknown(value: bytes) -> None:
    assert math.isnan(read(b"vllm:num_requests_running 1\nvllm:num_requests_waiting " + value, "vllm").waiting)


def test_label_values_that_are_no_numbers_are_unknown() -> None:
    page = b'vllm:num_requests_running 1\nvllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1'
    reading = read(page, "vllm")
    assert (reading.block_size, reading.cache_blocks) == (16, None)


SGLANG = b"""sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="1",dp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="1"} 5.0
sglang:num_running_reqs{model_name="m"} 3.0
sglang:token_usage{model_name="m"} 0.25
sglang:cache_config_info{page_size="64",num_pages="1000"} 1.0
"""
TRTLLM = b"""trtllm_num_requests_waiting 2
trtllm_num_requests_running 3
trtllm_kv_cache_utilization 0.25
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 1000
"""
TRITON = b"""nv_trt_llm_request_metrics{model="t",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="t",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="t",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="t"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="t"} 1000
"""


@pytest.mark.parametrize(
    ("engine", "page", "waiting", "block_size"),
    [("sglang", SGLANG, 7.0, 64), ("trtllm-serve", TRTLLM, 2.0, 32), ("triton-tensorrt-llm", TRITON, 2.0, 64)],
)
def test_other_engines_are_read_and_found_out(engine: str, page: bytes, waiting: float, block_size: int) -> None:
    expected = Reading(engine, waiting, 3.0, 0.25, None, block_size, 1000)
    for said in (engine, "auto", "vllm", "of-our-own"):
        assert read(page, said) == expected


@pytest.mark.parametrize(
    ("states", "asleep"), [((), False), ((1,), False), ((0,), True), ((0, 1), False), ((0, 0), True)]
)
def test_a_worker_sleeps_when_all_its_engines_say_so(states: tuple[int, ...], asleep: bool) -> None:
    lines = [b"vllm:num_requests_waiting 0"]
    for n, awake in enumerate(states):
        lines += [
            b'vllm:engine_sleep_state{engine="%d",sleep_state="awake"} %d' % (n, awake),
            b'vllm:engine_sleep_state{engine="%d",sleep_state="weights_offloaded"} %d' % (n, 1 - awake),
        ]
    assert read(b"\n".join(lines) + b"\n", "vllm").asleep is asleep


def test_a_page_of_no_known_engine_is_told_as_such() -> None:
    assert read(b"process_cpu_seconds_total 1\n", "auto").engine == ""
