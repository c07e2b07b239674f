"""The rules of leader election by a Lease, without an API server: two replicas and one stored object."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epp.shared.lease import Election, Lease, Timing

WALL = 1_764_547_200.0


class Store:
    """One Lease under optimistic concurrency."""

    def __init__(self) -> None:
        self.lease: Lease | None = None

    def put(self, wanted: Lease) -> Lease | None:
        """The Lease as stored; None: a conflict."""
        if wanted.version != (self.lease.version if self.lease else ""):
            return None
        self.lease = replace(wanted, version=str(int(wanted.version or "0") + 1))
        return self.lease


def turn(election: Election, store: Store, now: float) -> bool:
    """One look at the Lease, and a write where it is due; whether it leads now."""
    election.observe(store.lease, now)
    wanted = election.wanted(now, WALL + now)
    if wanted is not None and (stored := store.put(wanted)) is not None:
        election.wrote(stored, now)
    return election.leads(now)


def test_the_first_takes_the_lease_and_keeps_it_while_it_renews() -> None:
    store, a, b = Store(), Election("a"), Election("b")
    for now in range(0, 100, 2):
        assert turn(a, store, now)
        assert not turn(b, store, now + 0.5)
    assert store.lease is not None
    assert (store.lease.holder, store.lease.transitions) == ("a", 0)


def test_a_lease_that_is_not_renewed_is_taken_after_its_duration_by_the_own_clock() -> None:
    store, a, b = Store(), Election("a"), Election("b")
    assert turn(a, store, 0)
    assert not turn(b, store, 1)  # b sees it first here: its clock starts now
    assert not turn(b, store, 15.9)
    assert turn(b, store, 16)
    assert store.lease is not None
    assert store.lease.transitions == 1


def test_whoever_comes_late_waits_a_whole_duration_however_old_the_times_in_the_lease_are() -> None:
    store, a, b = Store(), Election("a"), Election("b")
    turn(a, store, 0)
    assert not turn(b, store, 1000)
    assert not turn(b, store, 1014)
    assert turn(b, store, 1015)


def test_a_leader_that_cannot_renew_stops_to_lead_before_anyone_can_take_over() -> None:
    store, a = Store(), Election("a")
    turn(a, store, 0)
    assert a.leads(9.9)
    assert not a.leads(10)
    assert a.timing.renew_deadline_s < a.timing.duration_s


def test_a_leader_that_was_away_and_finds_its_lease_untouched_leads_again() -> None:
    store, a = Store(), Election("a")
    turn(a, store, 0)
    assert not a.leads(60)
    assert turn(a, store, 60)


def test_a_leader_that_was_away_does_not_lead_on_after_another_took_over() -> None:
    store, a, b = Store(), Election("a"), Election("b")
    turn(a, store, 0)
    turn(b, store, 0)
    assert turn(b, store, 20)
    assert not turn(a, store, 21)


def test_of_two_that_find_the_lease_free_one_succeeds() -> None:
    store, a, b = Store(), Election("a"), Election("b")
    wishes = []
    for election in (a, b):
        election.observe(store.lease, 0)
        wishes.append((election, election.wanted(0, WALL)))
    for election, wanted in wishes:
        assert wanted is not None
        if (stored := store.put(wanted)) is not None:
            election.wrote(stored, 0)
    assert [e.leads(0) for e in (a, b)] == [True, False]


def test_a_released_lease_is_taken_at_once() -> None:
    store, a, b = Store(), Election("a"), Election("b")
    turn(a, store, 0)
    turn(b, store, 1)
    released = a.release(WALL)
    assert released is not None
    stored = store.put(released)
    assert stored is not None
    a.wrote(stored, 2)
    assert not a.leads(2)
    assert turn(b, store, 3)
    assert a.release(WALL) is None


def test_a_restarted_process_is_another_one() -> None:
    store = Store()
    turn(Election("pod_1"), store, 0)
    assert not turn(Election("pod_2"), store, 1)


def test_a_lease_is_written_and_read_as_kubernetes_has_it() -> None:
    a = Election("a")
    wanted = a.wanted(0, WALL + 0.25)
    assert wanted is not None
    spec = wanted.spec()
    assert spec == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": "2025-12-01T00:00:00.250000Z",
        "renewTime": "2025-12-01T00:00:00.250000Z",
        "leaseTransitions": 0,
    }
    assert Lease.read({"metadata": {"resourceVersion": "7"}, "spec": spec}) == replace(wanted, version="7")
    assert Lease.read({"spec": {"leaseDurationSeconds": "x", "leaseTransitions": None}}) == Lease(duration_s=0.0)


@pytest.mark.parametrize("times", [(15, 15, 2), (15, 10, 10), (15, 10, 0)])
def test_timings_that_would_let_two_lead_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="retry < renew deadline < duration"):
        Timing(*times)
