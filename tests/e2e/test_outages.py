"""Workers and pickers that die, behind the real Envoy with the shipped settings."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import pytest

from epp.envoy_options import Profile
from tests.e2e.backend import echo
from tests.e2e.envoy import until
from tests.e2e.serving import running_stack

BODY = b'{"model":"m","prompt":"x"}'
DEAD = "127.0.0.1:9"
"""The discard port: nothing listens."""

both_profiles = pytest.mark.parametrize("profile", Profile)


@both_profiles
async def test_a_dead_worker_costs_no_request_its_answer(profile: Profile) -> None:
    async with running_stack(profile, dead=(DEAD,)) as stack:
        answers = await asyncio.gather(*(stack.ask(BODY) for _ in range(100)))
        assert {a.status for a in answers} == {200}
        await stack.idle()


async def test_fail_open_serves_buffered_requests_as_soon_as_the_picker_is_killed() -> None:
    async with running_stack(Profile.FAST) as stack:
        assert (await stack.ask(BODY)).status == 200
        await stack.picker.kill()
        assert {(await stack.ask(BODY)).status for _ in range(20)} == {200}


async def test_fail_open_serves_full_duplex_requests_once_the_kill_was_noticed() -> None:
    async with running_stack(Profile.GATEWAY) as stack:
        assert (await stack.ask(BODY)).status == 200
        await stack.picker.kill()
        await stack.picker_is_left()
        assert {(await stack.ask(BODY)).status for _ in range(20)} == {200}


@both_profiles
async def test_fail_closed_answers_an_error_when_the_picker_is_killed(profile: Profile) -> None:
    async with running_stack(profile, listed=False) as stack:
        assert (await stack.ask(BODY)).status == 200
        served = sum(w.requests for w in stack.workers)
        await stack.picker.kill()
        assert min([(await stack.ask(BODY)).status for _ in range(5)]) >= 500
        assert sum(w.requests for w in stack.workers) == served


@both_profiles
async def test_a_picker_told_to_stop_finishes_what_runs_and_leaves_in_time(profile: Profile) -> None:
    async with running_stack(profile, args=("--drain-delay", "0", "--grace", "20")) as stack:
        slow = echo(chunks=10, pause=0.1, content_type="text/event-stream")
        streams = [asyncio.create_task(stack.ask(BODY, **slow)) for _ in range(100)]
        await until(stack.running, lambda n: n == 100)
        stack.picker.terminate()
        answers = await asyncio.gather(*streams)
        assert {a.status for a in answers} == {200}
        assert {a.body.endswith(b"data: [DONE]\n\n") for a in answers} == {True}
        async with asyncio.timeout(20):
            assert await stack.picker.process.wait() == 0


async def test_a_second_signal_ends_what_still_runs_and_a_hangup_ends_nothing() -> None:
    async with running_stack(Profile.FAST, args=("--drain-delay", "3600", "--grace", "3600")) as stack:
        stack.picker.process.send_signal(signal.SIGHUP)
        slow = asyncio.create_task(stack.ask(BODY, **echo(chunks=600, pause=0.1, content_type="text/event-stream")))
        await until(stack.running, lambda n: n == 1)
        stack.picker.terminate()
        await until(lambda: asyncio.to_thread(stack.picker.log.read_text), lambda text: "draining" in text)
        stack.picker.terminate()
        async with asyncio.timeout(20):
            assert await stack.picker.process.wait() == 0
        slow.cancel()
        assert "1 requests that still run are ended" in stack.picker.log.read_text()


@pytest.mark.parametrize(("profile", "delay"), [(Profile.GATEWAY, "3"), (Profile.FAST, "0")])
async def test_a_picker_that_stops_under_load_costs_no_request_its_answer(profile: Profile, delay: str) -> None:
    async with running_stack(profile, args=("--drain-delay", delay, "--grace", "20")) as stack:
        statuses: list[int] = []

        async def answered() -> int:
            return len(statuses)

        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                statuses.append((await stack.ask(BODY, **echo(pause=0.02))).status)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        try:
            await until(answered, lambda n: n > 50)
            stack.picker.terminate()
            async with asyncio.timeout(25):
                assert await stack.picker.process.wait() == 0
            served = len(statuses)
            await until(answered, lambda n: n > served + 50)
        finally:
            stop.set()
            for task in clients:
                with suppress(asyncio.CancelledError):
                    await task
        assert set(statuses) == {200}
