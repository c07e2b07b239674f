"""The picker's metrics: bounded, readable by Prometheus, cheap to count."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from epp.endpoint import Endpoint, Pool
from epp.observe.metrics import MAX_MODELS, Histogram, Metrics


def parse(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            out.setdefault(sample.name, []).append((sample.labels, sample.value))
    return out


def test_a_page_carries_the_counts_under_the_names_dashboards_know() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    metrics = Metrics(Pool([endpoint]), "agents")
    stats = metrics.model("alias", "base")
    stats.requests += 2
    stats.running += 1
    stats.errors["429"] += 1
    stats.ttft.observe(0.03)
    metrics.reasons["decision-deadline"] += 1
    endpoint.acquire(500, now=0.0)
    page = parse(metrics.render())
    labels = {"model_name": "alias", "target_model_name": "base"}
    assert page["inference_objective_request_total"] == [(labels, 2.0)]
    assert page["inference_objective_running_requests"] == [({"model_name": "alias"}, 1.0)]
    assert page["inference_objective_request_error_total"] == [({**labels, "error_code": "429"}, 1.0)]
    assert page["inference_objective_request_ttft_seconds_count"] == [(labels, 1.0)]
    assert page["kvsteer_reasons_total"] == [({"reason": "decision-deadline"}, 1.0)]
    assert page["inference_pool_ready_pods"] == [({"name": "agents"}, 1.0)]
    assert page["kvsteer_endpoint_in_flight_tokens"][0][1] == 500.0


def test_unknown_gauges_are_left_out_of_the_averages() -> None:
    known, unknown = Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)
    metrics = Metrics(Pool([known, unknown]))
    assert "inference_pool_average_queue_size" not in parse(metrics.render())
    known.set("waiting", 4)
    assert parse(metrics.render())["inference_pool_average_queue_size"][0][1] == 4.0


def test_model_names_from_clients_are_bounded() -> None:
    metrics = Metrics(Pool())
    for n in range(MAX_MODELS * 3):
        metrics.model(f"m{n}", f"m{n}").requests += 1
    assert len(metrics.models) == MAX_MODELS + 1
    assert metrics.models["other", "other"].requests == MAX_MODELS * 2


def test_names_that_no_worker_serves_do_not_crowd_out_the_ones_served() -> None:
    pool = Pool([Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)])
    pool.endpoints[0].models = frozenset({"real", "adapter"})
    metrics = Metrics(pool)
    for n in range(MAX_MODELS):
        metrics.model(f"made-up-{n}", f"made-up-{n}").requests += 1
    metrics.model("alias", "real").requests += 1
    metrics.model("", "").requests += 1
    assert {key: stats.requests for key, stats in metrics.models.items()} == {
        ("other", "other"): MAX_MODELS,
        ("alias", "real"): 1,
        ("", ""): 1,
    }


def test_a_name_too_long_for_a_label_is_counted_under_other() -> None:
    metrics = Metrics(Pool())
    metrics.model("m" * 1_000_000, "m" * 1_000_000).requests += 1
    assert list(metrics.models) == [("other", "other")]


def test_a_histogram_puts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.0


def test_numbers_of_other_parts_appear_under_their_source() -> None:
    metrics = Metrics(Pool())
    metrics.sources["edge"] = lambda: {"streams": 7, "streams_open": 2, "statuses": {"OK": 5, "IN-VAIN": 1}}
    page = parse(metrics.render())
    assert page["kvsteer_edge_streams_total"] == [({}, 7.0)]
    assert page["kvsteer_edge_streams_open"] == [({}, 2.0)]
    assert page["kvsteer_edge_statuses_total"] == [({"kind": "ok"}, 5.0), ({"kind": "in_vain"}, 1.0)]
