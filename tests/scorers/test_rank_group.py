"""Groups of data-parallel ranks: what one rank has to do weighs on all of its group."""

from __future__ import annotations

from epp.endpoint import Candidates, Endpoint, Pool
from scorers.rank_group import RankGroup
from tests.pools import NOW, plugin, request


def pool_of(*loads: tuple[str, int], **labels: str) -> Pool:
    """Endpoints on hosts, with so many requests in flight; a host's label `group` by its name in `labels`."""
    pool = Pool()
    for rank, (host, in_flight) in enumerate(loads):
        label = {"group": labels[host]} if host in labels else {}
        endpoint = Endpoint(f"10.0.0.{ord(host)}", 8000, rank=rank, ranks=len(loads), labels=label)
        pool.update(add=[endpoint])
        endpoint.count(requests=in_flight, tokens=0)
    return pool


def scores(candidates: Candidates, **parameters: object) -> list[float]:
    return [round(score, 6) for score in plugin(RankGroup, **parameters).score(request(b"x"), candidates).tolist()]


def test_a_busy_rank_weighs_on_the_idle_ranks_of_its_host() -> None:
    pool = pool_of(("a", 8), ("a", 0), ("b", 3), ("b", 3))
    assert scores(pool.candidates(NOW)) == [0, 0, 1, 1]


def test_by_the_mean_alone_the_host_with_less_in_all_wins() -> None:
    pool = pool_of(("a", 6), ("a", 0), ("b", 4), ("b", 4))
    assert scores(pool.candidates(NOW), slowest=0.0) == [1, 1, 0, 0]
    assert scores(pool.candidates(NOW), slowest=1.0) == [0, 0, 1, 1]


def test_scores_fall_with_the_load_between_the_groups() -> None:
    pool = pool_of(("a", 0), ("b", 1), ("c", 4))
    assert scores(pool.candidates(NOW)) == [1, 0.75, 0]


def test_tokens_to_be_computed_weigh_as_requests() -> None:
    pool = pool_of(("a", 1), ("b", 0))
    pool.endpoints[1].count(requests=0, tokens=4096)
    assert scores(pool.candidates(NOW)) == [1, 0]
    assert scores(pool.candidates(NOW), tokens_per_request=8192) == [0, 1]


def test_groups_are_named_by_a_label_where_one_is_given() -> None:
    pool = pool_of(("a", 9), ("b", 0), ("c", 2), ("d", 3), a="one", b="one")
    assert scores(pool.candidates(NOW), label="group", slowest=1.0) == [0, 0, 1, 1]


def test_ranks_that_are_no_candidates_weigh_on_their_group() -> None:
    pool = pool_of(("a", 9), ("a", 0), ("b", 1))
    pool.endpoints[0].available = False
    assert scores(pool.candidates(NOW)) == [0, 1]


def test_groups_follow_the_pool() -> None:
    pool = pool_of(("a", 1), ("b", 0))
    scorer = plugin(RankGroup)
    assert scorer.score(request(b"x"), pool.candidates(NOW)).tolist() == [0, 1]
    pool.update(remove=pool.endpoints[:1])
    assert scorer.score(request(b"x"), pool.candidates(NOW)).tolist() == [1]
