"""Batches come in order, each once; a gap is asked for once; what cannot be had is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache.events.decoder import END_OF_REPLAY, Batch
from epp.kvcache.events.sequence import Action, Apply, Ask, Lost, Restarted, Sequence, SequenceSettings


def batch(ts: float) -> Batch:
    return Batch(ts, None, ())


class Publisher:
    """A worker's side: numbers, a ring, restarts."""

    def __init__(self, ring: int = 1000) -> None:
        self.ring: list[tuple[int, Batch]] = []
        self._size = ring
        self._clock = 0.0
        self._seq = 0
        self.processes = 0

    def publish(self) -> tuple[int, Batch]:
        self._clock += 1
        message = (self._seq, batch(self._clock))
        self._seq += 1
        self.ring = [*self.ring, message][-self._size :]
        return message

    def restart(self) -> None:
        self._seq, self.ring = 0, []
        self.processes += 1

    def replay(self, start: int) -> list[tuple[int, Batch | None]]:
        return [*((s, b) for s, b in self.ring if s >= start), (END_OF_REPLAY, None)]


def answered(sequence: Sequence, publisher: Publisher, actions: list[Action]) -> list[Action]:
    """`actions`, with every `Ask` answered at once and what follows from it."""
    out: list[Action] = []
    for action in actions:
        out.append(action)
        if isinstance(action, Ask):
            for seq, replayed in publisher.replay(action.start):
                out += answered(sequence, publisher, sequence.replayed(seq, replayed, 0.0))
    return out


def applied(actions: list[Action]) -> list[int]:
    return [a.seq for a in actions if isinstance(a, Apply)]


def test_a_late_subscriber_gets_what_was_published_before_it() -> None:
    publisher, sequence = Publisher(), Sequence()
    for _ in range(5):
        publisher.publish()
    actions = answered(sequence, publisher, sequence.connected(0.0))
    assert actions[0] == Ask(0)
    assert applied(actions) == [0, 1, 2, 3, 4]
    assert applied(sequence.live(*publisher.publish(), 1.0)) == [5]


def test_a_batch_that_comes_before_the_connection_is_told_of_does_not_lose_those_before_it() -> None:
    publisher, sequence = Publisher(), Sequence()
    for _ in range(5):
        publisher.publish()
    actions = answered(sequence, publisher, sequence.live(*publisher.publish(), 0.0))
    actions += answered(sequence, publisher, sequence.connected(0.1))
    assert applied(actions) == [0, 1, 2, 3, 4, 5]
    assert not [a for a in actions if isinstance(a, Lost | Restarted)]
    assert applied(sequence.live(*publisher.publish(), 1.0)) == [6]


def test_a_new_process_that_is_as_far_as_the_old_one_is_noticed_though_its_message_comes_first() -> None:
    publisher, sequence = Publisher(), Sequence()
    answered(sequence, publisher, sequence.connected(0.0))
    for _ in range(2):
        sequence.live(*publisher.publish(), 0.0)
    sequence.disconnected()
    publisher.restart()
    for _ in range(2):
        publisher.publish()
    assert sequence.live(*publisher.publish(), 1.0) == []
    actions = answered(sequence, publisher, sequence.connected(1.0))
    assert Restarted() in actions
    assert applied(actions) == [0, 1, 2]


def test_one_gap_is_one_request_and_live_batches_wait_for_its_end() -> None:
    publisher, sequence = Publisher(), Sequence()
    answered(sequence, publisher, sequence.connected(0.0))
    sequence.live(*publisher.publish(), 0.0)
    lost = [publisher.publish() for _ in range(3)]
    assert sequence.live(*publisher.publish(), 0.0) == [Ask(1)]
    assert sequence.live(*publisher.publish(), 0.0) == []
    assert sequence.held == 2
    for seq, missed in lost:
        assert applied(sequence.replayed(seq, missed, 0.0)) == [seq]
    assert applied(sequence.replayed(END_OF_REPLAY, None, 0.0)) == [4, 5]
    assert not sequence.asking


def test_a_replayed_batch_that_also_comes_live_is_applied_once() -> None:
    publisher, sequence = Publisher(), Sequence()
    late = [publisher.publish() for _ in range(3)]
    actions = answered(sequence, publisher, sequence.connected(0.0))
    assert applied(actions) == [0, 1, 2]
    assert [sequence.live(*message, 0.0) for message in late] == [[], [], []]
    assert applied(sequence.live(*publisher.publish(), 0.0)) == [3]


def test_a_ring_that_begins_later_is_a_known_loss_and_the_rest_is_kept() -> None:
    publisher, sequence = Publisher(ring=2), Sequence()
    for _ in range(6):
        publisher.publish()
    actions = answered(sequence, publisher, sequence.connected(0.0))
    assert Lost(0, 4) in actions
    assert applied(actions) == [4, 5]
    assert applied(sequence.live(*publisher.publish(), 0.0)) == [6]


def test_a_number_that_goes_back_is_a_restart() -> None:
    publisher, sequence = Publisher(), Sequence()
    answered(sequence, publisher, sequence.connected(0.0))
    for _ in range(4):
        sequence.live(*publisher.publish(), 0.0)
    publisher.restart()
    first = publisher.publish()
    assert sequence.live(*first, 0.0) == [Restarted(), Apply(*first)]


def test_a_restart_seen_late_is_replayed_from_its_beginning() -> None:
    publisher, sequence = Publisher(), Sequence()
    answered(sequence, publisher, sequence.connected(0.0))
    for _ in range(4):
        sequence.live(*publisher.publish(), 0.0)
    publisher.restart()
    publisher.publish()
    publisher.publish()
    actions = answered(sequence, publisher, sequence.live(*publisher.publish(), 0.0))
    assert actions[:2] == [Restarted(), Ask(0)]
    assert applied(actions) == [0, 1, 2]


def restarted_unheard(publications: int) -> tuple[Publisher, Sequence]:
    publisher, sequence = Publisher(), Sequence()
    answered(sequence, publisher, sequence.connected(0.0))
    for _ in range(4):
        sequence.live(*publisher.publish(), 0.0)
    publisher.restart()
    for _ in range(publications):
        publisher.publish()
    return publisher, sequence


def test_a_worker_that_restarted_while_the_connection_was_down_is_found_out_by_its_first_batch() -> None:
    publisher, sequence = restarted_unheard(0)
    assert sequence.connected(1.0) == [Ask(3)]
    first = publisher.publish()
    assert sequence.live(*first, 1.0) == [Restarted(), Ask(0)]
    actions = [*sequence.replayed(*first, 1.0), *sequence.replayed(END_OF_REPLAY, None, 1.0)]
    assert applied(actions) == [0]


@pytest.mark.parametrize("publications", [0, 1, 3, 4, 9])
def test_a_worker_that_restarted_while_the_connection_was_down_is_found_out_without_a_new_batch(
    publications: int,
) -> None:
    publisher, sequence = restarted_unheard(publications)
    actions = answered(sequence, publisher, sequence.connected(1.0))
    assert Restarted() in actions
    assert applied(actions) == list(range(publications))


def test_a_connection_that_comes_back_brings_what_was_missed() -> None:
    publisher, sequence = Publisher(), Sequence()
    answered(sequence, publisher, sequence.connected(0.0))
    for _ in range(4):
        sequence.live(*publisher.publish(), 0.0)
    publisher.publish()
    assert answered(sequence, publisher, sequence.connected(1.0)) == [Ask(3), Apply(*publisher.ring[4])]


def test_a_replay_that_nobody_answers_is_given_up_after_its_attempts() -> None:
    sequence = Sequence(SequenceSettings(answer_s=2.0, attempts=3))
    sequence.connected(0.0)
    message = (7, batch(1.0))
    assert sequence.live(*message, 0.5) == []
    assert [sequence.tick(t) for t in (1.0, 2.0, 3.0, 4.0)] == [[], [Ask(0)], [], [Ask(0)]]
    assert sequence.tick(6.0) == [Lost(0, 7), Apply(*message)]
    assert applied(sequence.live(8, batch(2.0), 6.0)) == [8]


def test_without_a_replay_socket_a_gap_is_lost_at_once() -> None:
    sequence = Sequence(SequenceSettings(replay=False))
    assert sequence.connected(0.0) == []
    assert sequence.live(3, batch(1.0), 0.0)[0] == Lost(0, 3)
    assert sequence.live(6, batch(2.0), 0.0)[0] == Lost(4, 2)


def test_what_is_held_is_bounded() -> None:
    sequence = Sequence(SequenceSettings(held=10))
    sequence.connected(0.0)
    for n in range(50):
        sequence.live(n, batch(n), 0.0)
    assert sequence.held == 10
    actions = sequence.replayed(END_OF_REPLAY, None, 0.0)
    assert actions[0] == Lost(0, 40)
    assert applied(actions) == list(range(40, 50))


@given(
    st.lists(st.sampled_from(["publish", "drop", "restart", "reconnect", "late", "silent"]), max_size=60),
    st.integers(1, 8),
)
def test_whatever_happens_each_batch_of_a_process_is_applied_once_in_order_or_told_lost(
    steps: list[str], ring: int
) -> None:
    """Against any mix of loss, restarts, reconnections, live messages after their replay and silent replays."""
    publisher, sequence = Publisher(ring), Sequence(SequenceSettings(answer_s=1.0, attempts=1))
    actions = answered(sequence, publisher, sequence.connected(0.0))
    delayed: list[tuple[int, Batch]] = []
    now = 0.0
    for step in steps:
        now += 10.0
        match step:
            case "publish":
                actions += answered(sequence, publisher, sequence.live(*publisher.publish(), now))
            case "drop":
                publisher.publish()
            case "restart":
                publisher.restart()
            case "reconnect":
                actions += answered(sequence, publisher, sequence.connected(now))
            case "late":
                delayed.append(publisher.publish())
                actions += answered(sequence, publisher, sequence.connected(now))
                for message in delayed:
                    actions += answered(sequence, publisher, sequence.live(*message, now))
                delayed = []
            case "silent":
                publisher.publish()
                asked = sequence.live(*publisher.publish(), now)
                actions += [a for a in asked if not isinstance(a, Ask)] + sequence.tick(now + 5)
    actions += answered(sequence, publisher, sequence.live(*publisher.publish(), now))
    expected = 0
    stamps = []
    for action in actions:
        match action:
            case Restarted():
                expected = 0
            case Lost():
                assert action.start == expected
                expected += action.count
            case Apply():
                assert action.seq == expected
                expected += 1
                stamps.append(action.batch.ts)
    assert stamps == sorted(set(stamps))
    assert isinstance(actions[-1], Apply)
    assert actions[-1].batch.ts == publisher.ring[-1][1].ts
