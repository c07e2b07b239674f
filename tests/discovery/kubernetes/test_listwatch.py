"""The list-watch machine without an API server: every answer a server gives, and what is done next."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.discovery.kubernetes.listwatch import MAX_LINE_BYTES, WATCH_S, List, ListWatch, Trouble, Wait, Watch

Machine = ListWatch[str]


def machine() -> Machine:
    def read(obj: dict[str, Any]) -> str:
        if "value" not in obj:
            raise ValueError("no value")
        return str(obj["value"])

    return ListWatch(read, random=Random(1))


def obj(name: str, value: str = "x", version: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": version}, "value": value}


def page(*items: dict[str, Any], version: str = "10", token: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version, "continue": token}, "items": list(items)}


def event(kind: str, object_: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": object_}).encode() + b"\n"


def watching(*items: dict[str, Any]) -> Machine:
    """A machine that listed these and has a watch open since 0."""
    m = machine()
    m.listed(page(*items), 0)
    assert isinstance(m.step(0), Watch)
    m.watching()
    return m


def names(m: Machine) -> set[str]:
    return {key.partition("/")[2] for key in m.objects}


def expired() -> bytes:
    return event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})


def test_a_list_comes_first_then_a_watch_from_its_version() -> None:
    m = machine()
    assert m.step(0) == List()
    m.listed(page(obj("a"), version="7"), 0)
    assert m.synced
    action = m.step(0)
    assert isinstance(action, Watch)
    assert action.version == "7"
    assert WATCH_S[0] <= action.timeout_s <= WATCH_S[1]


def test_a_list_of_several_pages_counts_when_its_last_page_is_there() -> None:
    m = machine()
    m.listed(page(obj("a"), token="t1"), 0)
    assert not m.synced
    assert m.objects == {}
    assert m.step(0) == List("t1")
    m.listed(page(obj("b"), version="8"), 0)
    assert names(m) == {"a", "b"}


def test_a_page_token_that_expired_begins_the_list_anew_without_delay() -> None:
    m = machine()
    m.listed(page(obj("a"), token="t1"), 0)
    m.failed(410, 0)
    assert m.step(0) == List()
    m.listed(page(obj("b")), 0)
    assert names(m) == {"b"}


def test_an_empty_collection_is_known_to_be_empty() -> None:
    m = machine()
    m.listed({"metadata": {"resourceVersion": "3"}, "items": None}, 0)
    assert m.synced
    assert m.version == 1


def test_events_change_the_collection_and_its_version_only_where_something_changed() -> None:
    m = watching(obj("a", "1"))
    before = m.version
    m.received(event("MODIFIED", obj("a", "1", "11")))
    assert m.version == before
    m.received(event("ADDED", obj("b", "2", "12")) + event("MODIFIED", obj("a", "3", "13")))
    m.received(event("DELETED", obj("b", "2", "14")) + event("DELETED", obj("never", "2", "15")))
    assert m.objects == {"ns/a": "3"}
    assert m.version == before + 3


def test_a_watch_that_the_server_ends_goes_on_from_the_last_event_without_a_list() -> None:
    m = watching()
    m.received(event("ADDED", obj("a", version="21")))
    m.watch_ended(300)
    action = m.step(300)
    assert isinstance(action, Watch)
    assert action.version == "21"
    assert m.counters["lists"] == 1


def test_a_bookmark_moves_the_version_and_nothing_else() -> None:
    m = watching(obj("a"))
    before = m.version
    m.received(event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "99"}}))
    m.watch_ended(300)
    action = m.step(300)
    assert isinstance(action, Watch)
    assert action.version == "99"
    assert (m.version, names(m)) == (before, {"a"})


@pytest.mark.parametrize("how", ["status", "event"])
def test_410_in_either_form_lists_again_and_what_was_deleted_meanwhile_is_gone(how: str) -> None:
    m = watching(obj("a"), obj("b"))
    if how == "event":
        assert m.received(expired()) is False
        m.watch_ended(0)
    else:
        m.failed(410, 0)
    assert m.step(0) == List()
    assert names(m) == {"a", "b"}, "what was known serves on until the list is there"
    m.listed(page(obj("b"), obj("c"), version="50"), 0)
    assert names(m) == {"b", "c"}
    assert m.counters["expired"] == 1


def test_410_again_and_again_is_not_asked_at_full_speed() -> None:
    m = watching()
    asked = 0
    now = 0.0
    while now < 60:
        action = m.step(now)
        if isinstance(action, Wait):
            now = action.until
            continue
        asked += 1
        if isinstance(action, List):
            m.listed(page(), now)
        else:
            m.received(expired())
            m.watch_ended(now)
    assert asked < 40


@given(st.lists(st.integers(1, 200), max_size=20))
def test_lines_count_whole_however_they_are_cut(cuts: list[int]) -> None:
    m = watching()
    data = event("ADDED", obj("a", "ü" * 30, "11")) + b"\n" + event("ADDED", obj("b", "2", "12"))
    for size in [*cuts, len(data)]:
        m.received(data[:size])
        data = data[size:]
    assert names(m) == {"a", "b"}
    assert m.counters["unreadable"] == 0


@pytest.mark.parametrize("properly", [True, False])
def test_half_a_line_at_the_end_of_a_watch_is_dropped_and_told_again_by_the_server(properly: bool) -> None:
    m = watching()
    whole, half = event("ADDED", obj("a", "1", "11")), event("ADDED", obj("b", "1", "12"))[:40]
    m.received(whole + half)
    m.watch_ended(5, properly=properly)
    if not properly:
        m.listed(page(obj("a"), version="11"), 5)
    action = m.step(5)
    assert isinstance(action, Watch)
    assert action.version == "11"
    m.watching()
    m.received(event("ADDED", obj("b", "1", "12")))
    assert names(m) == {"a", "b"}


@pytest.mark.parametrize("how", ["cut", "unreachable"])
def test_a_server_that_broke_off_may_be_another_one_by_now_so_it_is_asked_for_the_list(how: str) -> None:
    """One restored from a backup counts from an older version on, and may have passed ours: no 410, no 504."""
    m = watching(obj("a"), obj("b"))
    if how == "cut":
        m.watch_ended(100, properly=False)
    else:
        m.failed(None, 100)
    assert m.step(101) == List()
    m.listed(page(obj("b"), version="8"), 101)
    assert names(m) == {"b"}


def test_a_line_of_a_megabyte_is_an_event_and_one_without_an_end_is_not() -> None:
    m = watching()
    assert m.received(event("ADDED", obj("big", "v" * (1 << 20), "11")))
    assert names(m) == {"big"}
    assert m.received(b"{" * (MAX_LINE_BYTES + 1)) is False
    assert m.step(0) == List()


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[]\n",
        b'{"type":"ADDED"}\n',
        b'{"type":"ADDED","object":null}\n',
        b'{"type":"ADDED","object":{"metadata":7}}\n',
        b'{"type":"ERROR","object":null}\n',
        b"[" * 200_000 + b"\n",
    ],
)
def test_a_line_that_is_no_event_costs_a_list_and_nothing_else(line: bytes) -> None:
    m = watching(obj("a"))
    assert m.received(line) is False
    m.watch_ended(0)
    assert names(m) == {"a"}
    assert m.step(0) == List()


def test_an_object_that_cannot_be_read_is_not_what_it_was_and_the_others_stay() -> None:
    m = watching(obj("a"), obj("b"))
    broken = obj("a", version="11")
    del broken["value"]
    assert m.received(event("MODIFIED", broken))
    assert names(m) == {"b"}
    assert m.counters["unreadable"] == 1
    m.received(event("MODIFIED", obj("a", "again", "12")))
    assert names(m) == {"a", "b"}


def test_events_without_a_version_keep_the_last_one() -> None:
    m = watching()
    m.received(event("ADDED", obj("a", version="11")) + event("ADDED", obj("b")))
    m.watch_ended(300)
    action = m.step(300)
    assert isinstance(action, Watch)
    assert action.version == "11"


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        (404, Trouble.NOT_FOUND),
        (403, Trouble.FORBIDDEN),
        (401, Trouble.UNAUTHORIZED),
        (None, Trouble.UNREACHABLE),
        (500, Trouble.FAILED),
        (429, Trouble.FAILED),
    ],
)
def test_a_refused_list_is_tried_again_later_and_its_reason_is_told_until_it_is_granted(
    status: int | None, trouble: Trouble
) -> None:
    m = machine()
    m.failed(status, 0)
    assert m.trouble is trouble
    action = m.step(0)
    assert isinstance(action, Wait)
    assert 0 < action.until <= 30
    assert m.step(action.until) == List()
    m.listed(page(obj("a")), action.until)
    assert not m.trouble
    assert names(m) == {"a"}


def test_delays_grow_are_spread_and_have_an_end() -> None:
    delays = []
    m, now = machine(), 0.0
    for _ in range(12):
        m.failed(503, now)
        action = m.step(now)
        assert isinstance(action, Wait)
        delays.append(action.until - now)
        now = action.until
    assert delays[0] <= 0.5
    assert all(15 <= delay <= 30 for delay in delays[8:])
    assert len(set(delays)) == len(delays)


def test_a_watch_that_lived_forgets_earlier_failures() -> None:
    m = machine()
    for _ in range(8):
        m.failed(503, 0)
    m.listed(page(), 100)
    m.step(100)
    m.watching()
    m.watch_ended(400)
    m.failed(503, 400)
    action = m.step(400)
    assert isinstance(action, Wait)
    assert action.until - 400 <= 0.5


def test_retry_after_is_kept_to_and_bounded() -> None:
    m = machine()
    m.failed(429, 0, retry_after_s=17)
    assert m.step(0) == Wait(17)
    m.failed(429, 20, retry_after_s=99_999)
    assert m.step(20) == Wait(140)


@pytest.mark.parametrize("status", [401, 429, 502, 503])
def test_a_watch_refused_for_the_moment_goes_on_from_where_it_was(status: int) -> None:
    m = watching(obj("a"))
    m.failed(status, 0)
    action = m.step(60)
    assert isinstance(action, Watch)
    assert action.version == "10"


@pytest.mark.parametrize("status", [400, 403, 500, 504])
def test_a_version_that_the_server_may_not_have_is_given_up(status: int) -> None:
    """504 is what a server restored from an older backup says: Too large resource version."""
    m = watching(obj("a"), obj("b"))
    m.failed(status, 0)
    assert m.step(60) == List()
    m.listed(page(obj("a"), version="4"), 60)
    assert names(m) == {"a"}
    action = m.step(60)
    assert isinstance(action, Watch)
    assert action.version == "4", "an older version is a version like any other"


def test_a_resource_that_vanishes_takes_its_objects_with_it_and_is_looked_for_again() -> None:
    m = watching(obj("a"))
    m.failed(404, 0)
    assert (m.objects, m.trouble) == ({}, Trouble.NOT_FOUND)
    assert isinstance(m.step(14), Wait)
    assert m.step(60) == List()


@pytest.mark.parametrize("answer", [{}, {"metadata": {}}, {"metadata": None, "items": []}, {"items": {}}])
def test_an_answer_that_is_no_list_counts_as_a_failure(answer: dict[str, Any]) -> None:
    m = watching(obj("a"))
    m.failed(410, 0)
    m.listed(answer, 0)
    assert names(m) == {"a"}
    assert m.trouble is Trouble.UNREACHABLE


def test_watches_that_end_at_once_and_bring_nothing_are_asked_for_ever_more_slowly() -> None:
    m = machine()
    m.listed(page(), 0)
    now, asked = 0.0, 0
    while now < 120:
        action = m.step(now)
        if isinstance(action, Wait):
            now = action.until
        else:
            asked += 1
            m.watching()
            m.watch_ended(now)
    assert asked < 20
