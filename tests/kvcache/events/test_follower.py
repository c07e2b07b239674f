"""Whatever happens to a worker's events, the index is what the worker holds, or it is known not to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epp.kvcache.events.confidence import Confidence, Level, Verdict
from epp.kvcache.events.sequence import Ask
from tests.kvcache.events.worker import BLOCK, END, Frames, Picker, Worker, prompt_keys

SHARED = list(range(100, 100 + 3 * BLOCK))
PROMPTS = [SHARED + [1] * n for n in (1, BLOCK, 2 * BLOCK + 1)] + [list(range(20)), [9] * (3 * BLOCK), SHARED[:BLOCK]]


class FollowedWorker(RuleBasedStateMachine):
    """A small cache under load; messages get lost, late, replayed or not; the worker restarts and is reset."""

    @initialize(ring=st.integers(1, 8), replay=st.booleans(), layout=st.sampled_from(["map", "array"]))
    def start(self, ring: int, replay: bool, layout: str) -> None:
        self.now = 0.0
        self.worker = Worker(num_blocks=9, ring=ring, layout=layout)
        self.picker = Picker(replay=replay)
        self.late: list[Frames] = []
        self.unseen = 0
        """Batches that were published and not delivered, and that no later batch has shown to be missing."""
        self.reach(self.picker.follower.connected(0.0))

    def reach(self, asks: list[Ask]) -> None:
        self.picker.answer(self.worker, asks, self.now)

    @rule(prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4))
    def serve(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.worker.begin(prompt)
            self.deliver()
            self.worker.finish(0)

    @rule(prompt=st.sampled_from(PROMPTS), report=st.booleans())
    def begin(self, prompt: list[int], report: bool) -> None:
        self.worker.begin(prompt, report=report)

    @rule(token=st.integers(1, 2))
    def decode(self, token: int) -> None:
        self.worker.decode(token)

    @rule(which=st.integers(0, 5))
    def finish(self, which: int) -> None:
        self.worker.finish(which)

    @rule()
    def clear(self) -> None:
        self.worker.clear()

    @rule()
    def deliver(self) -> None:
        if frames := self.worker.publish():
            self.now += 10.0
            self.unseen = 0
            self.reach(self.picker.live(frames, self.now))
            self.check()

    @rule()
    def drop(self) -> None:
        self.unseen += self.worker.publish() is not None

    @rule()
    def delay(self) -> None:
        if frames := self.worker.publish():
            self.unseen += 1
            self.late.append(frames)

    @rule()
    def deliver_late(self) -> None:
        late, self.late = self.late, []
        for frames in late:
            self.reach(self.picker.live(frames, self.now))

    @rule()
    def deliver_unanswered(self) -> None:
        if frames := self.worker.publish():
            self.now += 10.0
            self.unseen = 0
            self.picker.live(frames, self.now)
            self.picker.follower.tick(self.now + 5.0)
            self.picker.follower.work(self.now)
            self.check()

    @rule(restarts=st.booleans(), answers=st.booleans())
    def reconnect(self, restarts: bool, answers: bool) -> None:
        self.picker.follower.disconnected()
        assert self.picker.follower.confidence.level is not Level.COMPLETE
        if restarts:
            self.late = []
            self.worker.restart()
            self.worker.begin(PROMPTS[0])
            self.worker.publish()
        asks = self.picker.follower.connected(self.now)
        if answers and asks:
            self.reach(asks)
            self.unseen = 0
            self.check()
        else:
            self.unseen = 1
            self.picker.follower.tick(self.now + 5.0)
            self.picker.follower.work(self.now)

    @precondition(lambda self: not self.unseen)
    @invariant()
    def check(self) -> None:
        """What was published is in the index, where the follower says that all of it is."""
        if self.picker.follower.confidence.level is not Level.COMPLETE or self.worker.manager.block_pool.events:
            return
        for prompt in PROMPTS:
            held = self.worker.holds(prompt)
            assert self.picker.match(prompt_keys(prompt)) == held
        assert len(self.picker.ledger) == self.worker.manager.block_pool.num_cached


FollowedWorker.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFollowedWorker = FollowedWorker.TestCase


def worker_with(*prompts: list[int], num_blocks: int = 12, ring: int = 1000) -> Worker:
    worker = Worker(num_blocks=num_blocks, ring=ring)
    for prompt in prompts:
        step(worker, prompt)
    return worker


def level(picker: Picker) -> str:
    return picker.follower.confidence.level.value


def step(worker: Worker, prompt: list[int]) -> Frames:
    """Serve one prompt; the batch it makes."""
    worker.begin(prompt)
    frames = worker.publish()
    worker.finish(0)
    assert frames
    return frames


def test_a_picker_that_starts_late_gets_all_by_one_replay() -> None:
    worker, picker = worker_with(*PROMPTS), Picker()
    assert level(picker) == "none"
    picker.answer(worker, picker.follower.connected(0.0))
    assert level(picker) == "complete"
    assert [picker.match(prompt_keys(p)) for p in PROMPTS] == [worker.holds(p) for p in PROMPTS]
    assert picker.follower.counters["replays_asked"] == picker.follower.counters["replays_answered"] == 1


def test_a_worker_that_has_published_nothing_is_known_to_hold_nothing() -> None:
    picker = Picker()
    picker.answer(Worker(), picker.follower.connected(0.0))
    assert picker.follower.confidence.level is Level.COMPLETE


def test_a_ring_that_begins_later_is_partial_and_its_blocks_count() -> None:
    worker, picker = worker_with(SHARED, PROMPTS[3], PROMPTS[4], num_blocks=40, ring=2), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    assert picker.follower.confidence.level is Level.PARTIAL
    assert picker.follower.confidence.factor == 0.9
    assert [picker.match(prompt_keys(p)) for p in (SHARED, PROMPTS[3], PROMPTS[4])] == [0, 5, 3]
    assert picker.follower.counters["lost_batches"] == 1


def test_a_clearing_makes_a_partial_index_complete() -> None:
    worker, picker = worker_with(SHARED, PROMPTS[3], ring=1), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    assert worker.clear()
    step(worker, PROMPTS[4])
    picker.live(worker.frames[2])
    assert picker.follower.confidence.level is Level.COMPLETE
    assert [picker.match(prompt_keys(p)) for p in (PROMPTS[3], PROMPTS[4])] == [0, 3]


def test_a_worker_known_to_be_empty_before_it_says_so_is_followed_on() -> None:
    worker, picker = worker_with(SHARED), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    assert worker.clear()
    picker.follower.emptied()
    assert picker.match(prompt_keys(SHARED)) == 0
    step(worker, PROMPTS[4])
    picker.live(worker.frames[1])
    assert [picker.match(prompt_keys(p)) for p in (SHARED, PROMPTS[4])] == [0, 3]
    assert level(picker) == "complete"


def test_one_gap_is_one_replay_and_a_removed_block_is_not_revived() -> None:
    worker, picker = Worker(num_blocks=6), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    picker.live(step(worker, PROMPTS[3]))
    step(worker, PROMPTS[4])  # evicts; lost
    asks = picker.live(step(worker, SHARED))
    assert picker.live(step(worker, PROMPTS[3])) == []
    picker.answer(worker, asks)
    assert [picker.match(prompt_keys(p)) for p in PROMPTS] == [worker.holds(p) for p in PROMPTS]
    counters = picker.follower.counters
    assert (counters["gaps"], counters["replays_asked"], counters["lost_batches"]) == (1, 2, 0)
    assert counters["batches"] == 4


def test_a_replay_that_nobody_answers_is_given_up_and_the_index_is_partial() -> None:
    worker, picker = Worker(), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    picker.live(step(worker, SHARED))
    step(worker, PROMPTS[4])
    asks = picker.live(step(worker, PROMPTS[3]), 1.0)
    assert len(asks) == 1
    assert picker.follower.tick(1.5) == picker.follower.tick(2.5) == []
    picker.follower.work(2.5)
    assert picker.match(prompt_keys(PROMPTS[3])) == 5
    assert picker.follower.confidence.level is Level.PARTIAL
    assert picker.follower.counters["replays_given_up"] == 1


def test_the_time_to_answer_begins_when_the_request_is_sent() -> None:
    worker, picker = Worker(), Picker()
    asks = picker.follower.connected(0.0)
    picker.follower.asked(100.0)
    picker.follower.tick(100.5)
    assert picker.follower.asking
    picker.answer(worker, asks)
    assert picker.follower.counters["replays_given_up"] == 0


def test_the_last_batch_of_a_stream_that_was_lost_is_found_by_asking_after_a_silence() -> None:
    worker, picker = Worker(), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    picker.live(step(worker, SHARED))
    step(worker, PROMPTS[4])
    assert picker.follower.tick(10.0) == []
    asks = picker.follower.tick(20.0)
    picker.answer(worker, asks, 20.0)
    assert picker.match(prompt_keys(PROMPTS[4])) == 3
    assert picker.follower.confidence.level is Level.COMPLETE
    assert picker.follower.tick(21.0) == []


def test_malformed_messages_and_events_of_other_kinds_are_counted_and_cost_nothing_else() -> None:
    worker, picker = Worker(), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    for frames in ([], [b"x"], [b"t", b"12345678", b"\xc1"]):
        picker.live(frames)
        assert picker.follower.replayed(frames, 0.0) == []
    picker.live(step(worker, SHARED))
    assert picker.match(prompt_keys(SHARED)) == 3
    assert picker.follower.counters["malformed_messages"] == 5


def test_work_is_done_in_slices_of_about_the_given_cost() -> None:
    worker = worker_with(*([n] * (2 * BLOCK + 1) for n in range(40)), num_blocks=200)
    picker = Picker()
    for ask in picker.follower.connected(0.0):
        for frames in worker.replay(ask.start):
            picker.follower.replayed(frames, 0.0)
    turns = 1
    while picker.follower.work(0.0, 100.0):
        turns += 1
    assert turns == 40 // 5 + 1  # five events of two blocks at a time; the end of the replay
    assert not picker.follower.busy
    assert len(picker.ledger) == 80


def test_lag_is_the_age_of_a_live_batch() -> None:
    worker, picker = Worker(), Picker()
    picker.follower.live(step(worker, SHARED), 0.0, 3.5)
    assert picker.follower.lag_s == 2.5


class TestObserved:
    """What responses say about the prediction."""

    def followed(self, ring: int = 1000) -> tuple[Worker, Picker]:
        worker, picker = worker_with(PROMPTS[4], SHARED, ring=ring), Picker()
        picker.answer(worker, picker.follower.connected(0.0), 1.0)
        return worker, picker

    def observe(self, picker: Picker, predicted: int, actual: int, picked_at: float = 0.0) -> Verdict:
        keys = prompt_keys(SHARED)
        return picker.follower.observed(predicted * BLOCK, actual * BLOCK, 5.0, keys=keys, picked_at=picked_at)

    def test_three_contradictions_make_a_complete_index_suspect_and_twelve_agreements_heal_it(self) -> None:
        _, picker = self.followed()
        confidence = picker.follower.confidence
        for _ in range(3):
            assert level(picker) == "complete"
            assert self.observe(picker, 3, 1) is Verdict.OVER
        assert level(picker) == "suspect"
        assert confidence.factor < 0.5
        for _ in range(12):
            assert level(picker) == "suspect"
            assert self.observe(picker, 3, 3) is Verdict.AGREED
        assert level(picker) == "complete"
        assert confidence.factor == pytest.approx(1.0, abs=0.05)

    def test_one_contradiction_makes_a_partial_index_suspect(self) -> None:
        _, picker = self.followed(ring=1)
        self.observe(picker, 3, 0)
        assert picker.follower.confidence.level is Level.SUSPECT

    def test_sixteen_agreements_heal_a_partial_index(self) -> None:
        _, picker = self.followed(ring=1)
        for _ in range(16):
            assert picker.follower.confidence.level is Level.PARTIAL
            self.observe(picker, 3, 3)
        assert picker.follower.confidence.level is Level.COMPLETE

    def test_agreeing_that_nothing_is_cached_proves_nothing(self) -> None:
        confidence = Confidence()
        confidence.heard()
        confidence.verified(yes=True)
        confidence.lost()
        for _ in range(50):
            confidence.observed(0, 0, BLOCK)
        assert confidence.level is Level.PARTIAL

    def test_one_block_is_no_contradiction(self) -> None:
        _, picker = self.followed()
        assert self.observe(picker, 3, 2) is self.observe(picker, 2, 3) is Verdict.AGREED

    def test_blocks_shown_to_be_missing_are_taken_out_if_no_event_came_since_the_pick(self) -> None:
        _, picker = self.followed()
        self.observe(picker, 3, 1, picked_at=2.0)
        assert picker.match(prompt_keys(SHARED)) == 1

    def test_blocks_that_the_request_itself_may_have_computed_again_stay(self) -> None:
        worker, picker = self.followed()
        picker.live(step(worker, [5] * BLOCK * 2), 3.0)
        self.observe(picker, 3, 1, picked_at=2.0)
        assert picker.match(prompt_keys(SHARED)) == 3

    def test_blocks_shown_to_be_there_fill_the_holes_of_a_partial_index(self) -> None:
        worker, picker = worker_with(SHARED, PROMPTS[4], ring=1), Picker()
        picker.answer(worker, picker.follower.connected(0.0))
        assert picker.match(prompt_keys(SHARED)) == 0
        assert self.observe(picker, 0, 3) is Verdict.UNDER
        assert picker.match(prompt_keys(SHARED)) == 3

    def test_a_complete_index_is_not_filled_from_answers(self) -> None:
        picker = Picker()
        picker.answer(Worker(), picker.follower.connected(0.0))
        picker.ledger.block_size = BLOCK
        self.observe(picker, 0, 3)
        assert picker.match(prompt_keys(SHARED)) == 0


def test_a_restart_found_at_reconnection_forgets_the_old_process() -> None:
    worker, picker = worker_with(SHARED), Picker()
    picker.answer(worker, picker.follower.connected(0.0))
    picker.follower.disconnected()
    assert level(picker) == "partial"
    worker.restart()
    picker.answer(worker, picker.follower.connected(1.0))
    assert picker.match(prompt_keys(SHARED)) == 0
    assert level(picker) == "complete"
    assert picker.follower.counters["restarts"] == 1


@pytest.mark.parametrize("replay", [False, True])
def test_numbers_that_go_on_after_a_break_prove_nothing_where_nobody_answers(replay: bool) -> None:
    worker, picker = Worker(), Picker(replay=replay)
    picker.answer(worker, picker.follower.connected(0.0))
    picker.live(step(worker, SHARED))
    assert level(picker) == "complete"
    picker.follower.disconnected()
    worker.restart()
    step(worker, PROMPTS[4])
    picker.follower.connected(1.0)
    picker.follower.tick(9.0)
    picker.live(step(worker, PROMPTS[3]), 9.0)  # the number that the old process would have used
    assert level(picker) == "partial"


def test_an_end_of_replay_that_nobody_asked_for_says_nothing() -> None:
    picker = Picker()
    assert picker.follower.replayed([b"", b"", END, b""], 0.0) == []
    picker.follower.work(0.0)
    assert picker.follower.confidence.level is Level.NONE
    assert np.isclose(picker.follower.confidence.factor, 0.0)
