"""Replicas that tell each other what they do: nothing is lost for good, counted twice, or left over."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.kvcache.blocks import Keys
from epp.shared.messages import VERSION, Batch, Load, Passage, decode_batch, encode
from epp.shared.replica import MAX_PEERS, End, Loads, Replica

HEARTBEAT_S, SILENCE_S = 1.0, 3.5


class Listening:
    """What a replica was told by the others."""

    def __init__(self) -> None:
        self.loads: dict[str, tuple[int, int]] = {}
        self.prompts: list[tuple[str, str, list[int]]] = []
        self.open = 0

    def remote_load(self, address: str, requests: int, tokens: int, now: float) -> None:
        assert requests >= 0
        assert tokens >= 0
        self.loads[address] = (requests, tokens)

    def learned(self, address: str, space: str, keys: Keys, now: float) -> End | None:
        self.prompts.append((address, space, keys.tolist()))
        self.open += 1
        ended: list[float] = []

        def end(now: float) -> None:
            assert not ended
            ended.append(now)
            self.open -= 1

        return end

    @property
    def busy(self) -> dict[str, tuple[int, int]]:
        return {address: load for address, load in self.loads.items() if any(load)}


class Several:
    """Replicas on one stream of messages, and a clock."""

    def __init__(self, count: int = 2) -> None:
        self.now = 100.0
        self.listening = [Listening() for _ in range(count)]
        self.replicas = [Replica(i + 1, self.listening[i], self.now) for i in range(count)]
        self.loads: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]

    def exchange(self, *, lost: bool = False) -> None:
        """Everyone sends what there is, everyone hears it, the senders too."""
        for replica, loads in zip(self.replicas, self.loads, strict=True):
            message = replica.outgoing(self.now, loads)
            if message is not None and not lost:
                for other in self.replicas:
                    other.heard(message, self.now)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.exchange()
            for replica in self.replicas:
                replica.tick(self.now)


def chain(start: int, count: int) -> Keys:
    return np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def test_a_pick_counts_at_the_other_after_one_exchange_and_its_end_after_another() -> None:
    two = Several()
    two.exchange()
    two.loads[0]["a:1"] = (1, 900)
    number = two.replicas[0].picked("a:1", [("p", chain(0, 100))])
    two.exchange()
    assert two.listening[1].busy == {"a:1": (1, 900)}
    assert two.listening[1].prompts == [("a:1", "p", chain(0, 100).tolist())]
    assert two.listening[0].loads == {}
    two.loads[0].clear()
    two.replicas[0].ended(number)
    two.replicas[0].ended(number)
    two.exchange()
    assert two.listening[1].busy == {}
    assert two.listening[1].open == 0


def test_of_a_growing_prompt_only_the_new_blocks_are_told() -> None:
    two = Several()
    two.replicas[0].picked("a:1", [("p", chain(0, 6400))])
    two.exchange()
    two.replicas[0].picked("b:1", [("p", chain(0, 6470))])
    message = two.replicas[0].outgoing(two.now, {})
    assert message is not None
    assert len(message) < 70 * 9 + 200
    two.replicas[1].heard(message, two.now)
    assert two.listening[1].prompts[-1] == ("b:1", "p", chain(0, 6470).tolist())


def test_what_another_told_is_not_told_again() -> None:
    two = Several()
    two.replicas[0].picked("a:1", [("p", chain(0, 6400))])
    two.exchange()
    two.replicas[1].picked("a:1", [("p", chain(0, 6400))])
    message = two.replicas[1].outgoing(two.now, {})
    assert message is not None
    assert len(message) < 200


def test_a_chain_longer_than_a_passage_is_told_from_its_beginning_on() -> None:
    two = Several()
    for told in (8192, 16384, 20000):
        two.replicas[0].picked("a:1", [("p", chain(0, 20000))])
        two.exchange()
        assert two.listening[1].prompts[-1] == ("a:1", "p", chain(0, told).tolist())


def test_after_a_lost_message_the_chain_is_told_anew() -> None:
    two = Several()
    two.wait(1)
    two.replicas[0].picked("a:1", [("p", chain(0, 640))])
    two.exchange(lost=True)
    two.replicas[0].picked("a:1", [("p", chain(0, 700))])
    two.exchange()
    assert two.listening[1].prompts == []
    assert two.replicas[1].counters["messages_missed"] >= 1
    assert two.replicas[1].counters["unknown_chains"] == 1
    two.wait(1)
    two.replicas[0].picked("a:1", [("p", chain(0, 700))])
    two.exchange()
    assert two.listening[1].prompts == [("a:1", "p", chain(0, 700).tolist())]


def test_a_load_whose_end_was_not_heard_goes_with_the_next_full_batch() -> None:
    two = Several()
    two.loads[0]["a:1"] = (3, 10)
    two.replicas[0].picked("a:1", [("p", chain(0, 3))])
    two.exchange()
    two.loads[0].clear()
    two.replicas[0].ended(1)
    two.exchange(lost=True)
    assert two.listening[1].busy == {"a:1": (3, 10)}
    two.wait(HEARTBEAT_S)
    assert two.listening[1].busy == {}
    assert two.listening[1].open == 0


def test_who_is_silent_is_forgotten_with_all_it_had_in_flight() -> None:
    three = Several(3)
    three.loads[0]["a:1"] = (3, 10)
    three.loads[1]["a:1"] = (1, 5)
    three.replicas[0].picked("a:1", [("p", chain(0, 3))])
    three.exchange()
    assert three.listening[2].busy == {"a:1": (4, 15)}
    dead = three.replicas.pop(0), three.listening.pop(0), three.loads.pop(0)
    three.wait(SILENCE_S + 1)
    assert three.listening[1].busy == {"a:1": (1, 5)}
    assert three.listening[1].open == 0
    assert three.replicas[1].counters["peers_lost"] == 1
    three.replicas.append(dead[0])
    three.loads.append(dead[2])
    three.wait(HEARTBEAT_S)
    assert three.listening[1].busy == {"a:1": (4, 15)}


def test_who_leaves_is_forgotten_at_once() -> None:
    two = Several()
    two.loads[0]["a:1"] = (3, 10)
    two.exchange()
    two.replicas[1].heard(two.replicas[0].leave(two.now), two.now)
    assert two.listening[1].busy == {}
    assert two.replicas[1].peers == 0


def test_a_failed_batch_is_made_good_by_the_next() -> None:
    two = Several()
    two.exchange()
    two.replicas[0].picked("a:1", [("p", chain(0, 640))])
    two.loads[0]["a:1"] = (1, 1)
    two.replicas[0].outgoing(two.now, two.loads[0])
    two.replicas[0].failed(two.now)
    two.exchange()
    assert two.listening[1].busy == {"a:1": (1, 1)}
    two.replicas[0].picked("a:1", [("p", chain(0, 640))])
    two.exchange()
    assert two.listening[1].prompts == [("a:1", "p", chain(0, 640).tolist())]


def test_nothing_new_is_nothing_to_send_until_the_next_heartbeat() -> None:
    two = Several()
    assert two.replicas[0].outgoing(two.now, {}) is not None
    assert two.replicas[0].outgoing(two.now + 0.9, {}) is None
    assert two.replicas[0].outgoing(two.now + 1.0, {}) is not None


def test_a_newcomer_asks_whoever_runs_for_longest_and_then_the_next() -> None:
    four = Several(3)
    four.wait(5)
    newcomer = Replica(9, Listening(), four.now)
    four.replicas.append(newcomer)
    four.loads.append({})
    four.replicas[0]._started = 0.0
    four.replicas[1]._started = 50.0
    four.wait(4)
    assert newcomer.asked == 1
    assert list(four.replicas[0].requests) == [9]
    newcomer.bootstrapped(done=False, now=four.now)
    four.wait(2)
    assert newcomer.asked == 2
    newcomer.bootstrapped(done=True, now=four.now)
    four.wait(60)
    assert newcomer.asked == 0
    assert [list(r.requests) for r in four.replicas[:3]] == [[9], [9], []]
    assert all(not r.counters["bootstraps_asked"] for r in four.replicas[:3] if r.origin == 1)


def test_a_snapshot_that_does_not_come_is_given_up() -> None:
    two = Several()
    two.replicas[0]._started = 0.0
    two.wait(4)
    assert two.replicas[1].asked == 1
    two.wait(25)
    assert two.replicas[1].counters["bootstraps_failed"] == 1
    assert two.replicas[1].asked == 0


def test_peers_are_bounded() -> None:
    listening = Listening()
    replica = Replica(1, listening, 0.0)
    for origin in range(2, MAX_PEERS + 12):
        replica.heard(encode(Batch(VERSION, origin, 1, 0.0, [Load("a:1", 1, 1)], [], [], [])), 0.0)
    assert replica.peers == MAX_PEERS
    assert listening.busy == {"a:1": (MAX_PEERS, MAX_PEERS)}
    assert replica.counters["peers_refused"] == 10


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00" * 100,
        b"\x93\x01",
        msgspec.msgpack.encode([VERSION + 1, 2, 1, 0.0, [], [], []]),
        msgspec.msgpack.encode([VERSION, 2, 1, 0.0, [["a:1", -1, 0]], [], []]),
        msgspec.msgpack.encode([VERSION, 2, 1, 0.0, [["a:1", 1 << 60, 0]], [], []]),
        msgspec.msgpack.encode([VERSION, 2, 1, 0.0, [], [[1, "a:1", [["p", b"1234567"]]]], []]),
        msgspec.msgpack.encode([VERSION, 2, 1, 0.0, [], [[1, "a:1", [["p", b"12345678" * 9000]]]], []]),
        b"\x91" * 5000,
    ],
    ids=["empty", "zeros", "cut", "version", "negative", "huge", "ragged", "long", "deep"],
)
def test_what_cannot_be_read_changes_nothing_and_is_counted(message: bytes) -> None:
    listening = Listening()
    replica = Replica(1, listening, 0.0)
    replica.heard(message, 0.0)
    assert replica.counters["messages_unreadable"] == 1
    assert (replica.peers, listening.loads, listening.prompts) == (0, {}, [])


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(message: bytes) -> None:
    Replica(1, Listening(), 0.0).heard(message, 0.0)


def test_a_later_version_may_append_fields() -> None:
    batch = msgspec.msgpack.encode([VERSION, 2, 1, 0.0, [["a:1", 1, 0, "more"]], [], [], None, False, 0, False, "more"])
    assert decode_batch(batch).loads[0].requests == 1


def test_keys_keep_their_64_bits() -> None:
    keys = np.array([0, 1, (1 << 64) - 1], dtype=np.uint64)
    batch = Batch(VERSION, 1, 1, 0.0, [], [], [])
    assert decode_batch(encode(batch)) == batch
    assert Passage("p", keys.tobytes()).array().tolist() == keys.tolist()


actions = st.lists(
    st.tuples(
        st.sampled_from(["pick", "pick", "end", "end", "send", "send", "send", "die", "fail", "wait"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["lost", "twice", "late", "now", "now", "now"]))),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(actions)
def test_in_any_order_with_loss_repetition_and_death_all_agree_in_the_end_and_nothing_is_left(
    actions: list[tuple[str, int, int, list[tuple[int, str]]]],
) -> None:
    group = Several(3)
    own: list[Counter[str]] = [Counter() for _ in range(3)]
    flights: list[tuple[int, str, int]] = []
    late: list[tuple[int, bytes]] = []

    def loads(i: int) -> Loads:
        return {a: (n, 10 * n) for a, n in own[i].items() if n}

    def end(flight: tuple[int, str, int]) -> None:
        i, address, number = flight
        own[i][address] -= 1
        group.replicas[i].ended(number)

    for what, i, number, fates in actions:
        group.now += 0.2
        if what == "pick":
            address = f"a:{number}"
            own[i][address] += 1
            start = 1000 * (number % 2)
            flights.append((i, address, group.replicas[i].picked(address, [("p", chain(start, 50 * number))])))
        elif what == "end" and flights:
            end(flights.pop(number % len(flights)))
        elif what == "send" and (message := group.replicas[i].outgoing(group.now, loads(i))):
            fate = dict(fates)
            for j in range(3):
                for _ in range({"lost": 0, "late": 0, "twice": 2, "now": 1}[fate.get(j, "now")]):
                    group.replicas[j].heard(message, group.now)
                if fate.get(j) == "late":
                    late.append((j, message))
        elif what == "fail" and group.replicas[i].outgoing(group.now, loads(i)):
            group.replicas[i].failed(group.now)
        elif what == "die":
            flights = [f for f in flights if f[0] != i]
            own[i].clear()
            group.listening[i] = Listening()
            group.replicas[i] = Replica(10 + i + group.replicas[i].origin, group.listening[i], group.now)
        elif what == "wait":
            group.now += 2
            for j, message in late:
                group.replicas[j].heard(message, group.now)
            late.clear()
        for replica in group.replicas:
            replica.tick(group.now)
    for i in range(3):
        group.loads[i] = dict(loads(i))
    group.wait(SILENCE_S + HEARTBEAT_S + 1)
    for i in range(3):
        others = sum((own[j] for j in range(3) if j != i), Counter[str]())
        assert group.listening[i].busy == {a: (n, 10 * n) for a, n in others.items() if n}
    for flight in flights:
        end(flight)
    for i in range(3):
        group.loads[i] = {}
    group.wait(HEARTBEAT_S)
    assert all(listening.busy == {} for listening in group.listening)
    assert all(listening.open == 0 for listening in group.listening)
