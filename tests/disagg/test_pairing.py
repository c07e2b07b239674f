"""The search for the soonest pair, against looking at each by hand; and what sending KV is thought to take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.disagg.pairing import WHOLE, choose
from epp.disagg.transfer import BOUNDS, OTHER_ZONE, SAME_HOST, SAME_RACK, TransferModel
from epp.endpoint import Endpoint

seconds = st.floats(0.0, 10.0, allow_nan=False)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[float], list[list[float]], list[list[bool]], float]:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    return (
        draw(st.lists(seconds, min_size=rows, max_size=rows)),
        draw(st.lists(seconds, min_size=columns, max_size=columns)),
        [draw(st.lists(seconds, min_size=columns, max_size=columns)) for _ in range(rows)],
        [draw(st.lists(st.booleans(), min_size=columns, max_size=columns)) for _ in range(rows)],
        draw(st.floats(0.0, 1.0)),
    )


@given(problems())
def test_the_choice_is_the_one_that_looking_at_each_pair_finds(problem: tuple[list[float], ...]) -> None:
    alone, prefill, between, possible, gain = problem
    shape = (len(alone), len(prefill))
    choice = choose(
        np.array(alone),
        np.array(prefill, dtype=float),
        np.array(between, dtype=float).reshape(shape),
        possible=np.array(possible, dtype=bool).reshape(shape),
        gain_s=float(gain),  # type: ignore[arg-type]
    )
    pairs = [
        (between[d][p] + prefill[p], d, p)  # type: ignore[index]
        for d in range(shape[0])
        for p in range(shape[1])
        if possible[d][p]  # type: ignore[index]
    ]
    best = min(pairs, default=(np.inf, -1, -1))
    assert choice.alone_s == min(alone)
    assert choice.pair_s == pytest.approx(best[0])
    if best[0] + gain <= min(alone):  # type: ignore[operator]
        assert between[choice.decode][choice.prefill] + prefill[choice.prefill] == pytest.approx(best[0])  # type: ignore[index]
    else:
        assert (choice.decode, choice.prefill) == (choice.alone, -1)


def test_beyond_the_whole_search_the_best_of_each_side_are_searched() -> None:
    random = np.random.default_rng(1)
    alone, prefill = random.uniform(5, 9, 4 * WHOLE), random.uniform(0.1, 5, 4 * WHOLE)
    between = np.broadcast_to(random.uniform(0.01, 1, 4 * WHOLE)[:, None], (4 * WHOLE, 4 * WHOLE))
    choice = choose(alone, prefill, between, possible=np.ones(between.shape, bool), gain_s=0)
    assert (choice.decode, choice.prefill) == (int(np.argmin(between[:, 0])), int(np.argmin(prefill)))


def endpoints(*labels: dict[str, str]) -> list[Endpoint]:
    return [Endpoint(f"10.0.0.{i + 1}", 8000, labels=each) for i, each in enumerate(labels)]


def test_workers_near_each_other_are_reached_sooner() -> None:
    host, rack, zone = "kubernetes.io/hostname", "topology.kubernetes.io/rack", "topology.kubernetes.io/zone"
    (to,) = endpoints({host: "h1", rack: "r1", zone: "a"})
    sources = endpoints({host: "h1"}, {host: "h2", rack: "r1"}, {host: "h3", zone: "a"}, {host: "h4", zone: "b"}, {})
    sources = [Endpoint(f"10.0.1.{i}", 8000, labels=e.labels) for i, e in enumerate(sources)]
    model = TransferModel(1000.0, 1e6, 0.0)
    (row,) = model.seconds(np.array([1000.0]), [to], sources).tolist()
    assert row == pytest.approx([SAME_HOST, SAME_RACK, 1.0, OTHER_ZONE, 1.0])


def test_a_start_and_the_tokens_that_are_lacking_make_the_seconds() -> None:
    model = TransferModel(160_000.0, 12.5e9, 0.005)
    far = [Endpoint(f"10.0.0.{i}", 8000) for i in range(4)]
    made = model.seconds(np.array([0.0, 100_000.0]), far[:2], far[2:])
    assert made.shape == (2, 2)
    assert made[0] == pytest.approx([0.005, 0.005])
    assert made[1] == pytest.approx([1.285, 1.285])


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200))
def test_what_is_learned_stays_within_bounds_whatever_is_seen(times: list[float]) -> None:
    model = TransferModel(1000.0, 1e6, 0.005)
    for value in times:
        model.observe(tokens=1000.0, seconds=value)
    assert BOUNDS[0] <= model.factor <= BOUNDS[1]


def test_a_link_four_times_slower_than_configured_is_found_out() -> None:
    model = TransferModel(1000.0, 1e6, 0.005)
    for _ in range(60):
        model.observe(tokens=2000.0, seconds=0.005 + 8.0)
    assert model.factor == pytest.approx(4.0, rel=0.05)
