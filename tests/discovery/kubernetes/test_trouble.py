"""An API server in trouble: whatever it does, the endpoints known serve on, and are right again when it is back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from epp.discovery.kubernetes.credentials import FileToken
from tests.discovery.kubernetes.following import pool_of, settle
from tests.kube.objects import V1, pod, pool
from tests.kube.server import Api, running_api
from tests.virtual_loop import in_virtual_time


def truth(api: Api) -> set[str]:
    """Names of the pods that should be endpoints."""
    pods = api.store.all(api.store.kind("Pod"), "default")
    return {
        p["metadata"]["name"]
        for p in pods
        if p["metadata"]["labels"]["app"] == "vllm"
        and p["status"]["conditions"][0]["status"] == "True"
        and not p["metadata"].get("deletionTimestamp")
    }


def fill(api: Api, pods: int = 3) -> None:
    api.store.put("InferencePool", pool(8000), V1)
    for i in range(pods):
        api.store.put("Pod", pod(f"w-{i}", f"127.0.0.{i + 2}"))


def shuffle(api: Api) -> None:
    """One pod goes, one comes, one changes."""
    api.store.delete(api.store.kind("Pod"), "default", "w-0", grace_s=0)
    api.store.put("Pod", pod("w-9", "127.0.0.99"))
    api.store.put("Pod", pod("w-1", "127.0.0.3", ready=False))


async def down(api: Api, within: Callable[[], None]) -> None:
    await api.stop()
    within()
    await settle(20)
    await api.start()


async def cut(api: Api, within: Callable[[], None]) -> None:
    api.cut_watches()
    within()


async def half_a_line(api: Api, within: Callable[[], None]) -> None:
    api.faults.cut_after = 100
    within()


async def long_lines(api: Api, within: Callable[[], None]) -> None:
    api.faults.padding = 700_000
    within()


async def expired_as_event(api: Api, within: Callable[[], None]) -> None:
    """The watches end by plan, and while no new ones are granted the history is forgotten."""
    api.faults.refuse["watch", "*"] = 503
    api.end_watches()
    within()
    api.store.put("ConfigMap", {"metadata": {"name": "c", "labels": {"at": str(api.store.version)}}})
    api.store.compact()
    await settle(5)
    api.faults.refuse.clear()


async def expired_as_status(api: Api, within: Callable[[], None]) -> None:
    api.faults.expired_as_event = False
    await expired_as_event(api, within)


async def window_overrun(api: Api, within: Callable[[], None]) -> None:
    """More changes at once than the history holds, under an open watch."""
    within()
    for i in range(50):
        api.store.put("ConfigMap", {"metadata": {"name": f"c-{i}", "labels": {"at": str(api.store.version)}}})


async def restored_from_a_backup(api: Api, within: Callable[[], None]) -> None:
    """Older versions, as after etcd was restored: they are smaller than what the client has seen."""
    backup = api.store.snapshot()
    for i in range(30):
        api.store.put("ConfigMap", {"metadata": {"name": f"c-{i}"}})
    api.store.put("Pod", pod("lost", "127.0.0.50"))
    await settle(0.1)
    await api.stop()
    api.store.restore(backup)
    within()
    await api.start()


async def dead_connection(api: Api, within: Callable[[], None]) -> None:
    """The watches are there, and bring nothing, for ever."""
    api.faults.mute = True
    within()
    await settle(1)
    api.faults.watch_limit_s = 1e9
    await settle(200)
    api.faults.mute = False


async def busy(api: Api, within: Callable[[], None]) -> None:
    api.faults.refuse["*", "*"] = 429
    api.cut_watches()
    within()
    await settle(30)
    api.faults.refuse.clear()


async def internal_errors(api: Api, within: Callable[[], None]) -> None:
    api.faults.refuse["*", "*"] = 500
    api.cut_watches()
    within()
    await settle(300)
    api.faults.refuse.clear()


async def forbidden_for_a_while(api: Api, within: Callable[[], None]) -> None:
    api.faults.refuse["*", "*"] = 403
    api.cut_watches()
    within()
    await settle(300)
    api.faults.refuse.clear()


async def slow(api: Api, within: Callable[[], None]) -> None:
    api.faults.delay_s = 20
    api.cut_watches()
    within()


async def no_bookmarks(api: Api, within: Callable[[], None]) -> None:
    """Quiet for hours, and the history moves on elsewhere: the version that the client holds grows too old."""
    api.faults.bookmark_s = 1e9
    for i in range(60):
        api.store.put("ConfigMap", {"metadata": {"name": f"c-{i}", "labels": {"at": str(api.store.version)}}})
        await settle(10)
    within()


TROUBLES = [
    down,
    cut,
    half_a_line,
    long_lines,
    expired_as_event,
    expired_as_status,
    window_overrun,
    restored_from_a_backup,
    dead_connection,
    busy,
    internal_errors,
    forbidden_for_a_while,
    slow,
    no_bookmarks,
]


@pytest.mark.parametrize("trouble", TROUBLES)
@in_virtual_time
async def test_endpoints_are_right_again_after(trouble: Callable[[Api, Callable[[], None]], Awaitable[None]]) -> None:
    async with running_api(window=40) as api:
        fill(api)
        async with pool_of(api) as followed:
            await settle()
            assert followed.names == {"w-0", "w-1", "w-2"}
            await trouble(api, lambda: shuffle(api))
            await settle(90)
            assert truth(api) == {"w-2", "w-9"}
            assert followed.names == {"w-2", "w-9"}
            assert followed.source.trouble == ""


@pytest.mark.parametrize("trouble", [down, busy, internal_errors, forbidden_for_a_while])
@in_virtual_time
async def test_endpoints_serve_on_during(trouble: Callable[[Api, Callable[[], None]], Awaitable[None]]) -> None:
    async with running_api() as api:
        fill(api)
        async with pool_of(api) as followed:
            await settle()
            seen = []

            async def look() -> None:
                while True:
                    seen.append(followed.names)
                    await asyncio.sleep(1)

            looking = asyncio.create_task(look())
            await trouble(api, lambda: None)
            looking.cancel()
            assert len(seen) >= 19
            assert all(names == {"w-0", "w-1", "w-2"} for names in seen)


@in_virtual_time
async def test_a_proper_end_of_a_watch_costs_no_list_and_bookmarks_keep_a_quiet_one_current() -> None:
    async with running_api(window=40) as api:
        fill(api)
        api.faults.watch_limit_s = 300
        async with pool_of(api) as followed:
            for i in range(200):
                api.store.put("ConfigMap", {"metadata": {"name": f"c-{i}"}})
                await settle(30)
            assert api.requests["list", "pods"] == 1
            assert api.requests["watch", "pods"] >= 15
            assert followed.source.counters["kubernetes_expired"] == 0


@in_virtual_time
async def test_a_server_that_does_not_page_and_one_that_does_give_the_same() -> None:
    async with running_api() as api:
        fill(api, 0)
        for i in range(1203):
            api.store.put("Pod", pod(f"w-{i}", f"127.0.{i // 250}.{i % 250 + 1}"))
        async with pool_of(api) as followed:
            await settle()
            assert len(followed.specs) == 1203
            assert api.requests["list", "pods"] == 3
            api.faults.no_limit = True
            api.store.put("ConfigMap", {"metadata": {"name": "later"}})
            api.store.compact()
            api.cut_watches()
            await settle()
            assert len(followed.specs) == 1203
            assert api.requests["list", "pods"] == 4


@in_virtual_time
async def test_retry_after_is_kept_to() -> None:
    async with running_api() as api:
        fill(api)
        api.faults.once.extend([(429, "60")] * 2)
        async with pool_of(api) as followed:
            await settle(58)
            assert followed.names == set()
            assert sum(api.requests.values()) == 0
            await settle(10)
            assert len(followed.names) == 3


@in_virtual_time
async def test_a_rotated_token_is_read_again_when_the_old_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    async with running_api() as api:
        fill(api)
        api.faults.tokens = {"one"}
        async with pool_of(api, token=FileToken(file)) as followed:
            await settle()
            api.faults.tokens = {"two"}
            api.cut_watches()
            await settle(5)
            assert followed.names == {"w-0", "w-1", "w-2"}, "while it is refused, what is known serves"
            file.write_text("two")
            shuffle(api)
            await settle(40)
            assert followed.names == {"w-2", "w-9"}


HOURS = 48


@in_virtual_time
async def test_two_days_of_trouble_end_with_the_truth_and_without_growth(tmp_path: Path) -> None:
    """Changes twice a minute, trouble of every kind in between, tokens that rotate hourly: looked at each hour."""
    random, loop = Random(48), asyncio.get_running_loop()
    file = tmp_path / "token"
    file.write_text("t-0")
    async with running_api(window=40) as api:
        fill(api, 5)
        api.kubelet_s = 20
        api.faults.tokens = {"t-0"}
        async with pool_of(api, token=FileToken(file)) as followed:
            await settle()
            tasks, objects, sizes = len(asyncio.all_tasks()), list[int](), set[int]()
            for hour in range(1, HOURS + 1):
                until = hour * 3600.0
                while loop.time() < until - 600:
                    _change(api, random)
                    await settle(random.uniform(1, 60))
                    if random.random() < 0.2:
                        await random.choice(TROUBLES)(api, lambda: _change(api, random))
                        sizes.add(len(followed.specs))
                _heal(api)
                api.faults.tokens = {f"t-{hour}"}
                file.write_text(f"t-{hour}")
                await settle(max(until - loop.time(), 600))
                assert followed.names == truth(api), f"hour {hour}"
                assert followed.source.trouble == "", f"hour {hour}"
                assert len(asyncio.all_tasks()) <= tasks + 2, f"hour {hour}"
                if hour % 8 == 0:
                    gc.collect()
                    objects.append(len(gc.get_objects()))
            assert len(sizes) > 3, "the pool was never the same for long"
            counters = followed.source.counters
            assert min(counters[f"kubernetes_{name}"] for name in ("lists", "watches", "expired", "failures")) > 50
            assert max(objects[1:]) < 1.1 * objects[0], objects


def _change(api: Api, random: Random) -> None:
    """Something that a cluster does."""
    store = api.store
    names = sorted(p["metadata"]["name"] for p in store.all(store.kind("Pod"), "default"))
    name = f"w-{random.randrange(12)}"
    what = random.random()
    if name in names and what < 0.3:
        store.delete(store.kind("Pod"), "default", name, grace_s=random.choice([0, 30]))
    elif name not in names or not _is_ending(api, name):
        labels = {"app": random.choice(["vllm"] * 4 + ["other"])}
        store.put("Pod", pod(name, f"127.0.0.{2 + int(name[2:])}", ready=random.random() < 0.8, labels=labels))
    if what > 0.97:
        store.put("InferencePool", pool(random.choice([8000, 8001])), V1)


def _is_ending(api: Api, name: str) -> bool:
    return bool(api.store.get(api.store.kind("Pod"), "default", name)["metadata"].get("deletionTimestamp"))


def _heal(api: Api) -> None:
    faults = api.faults
    faults.refuse.clear()
    faults.delay_s, faults.padding, faults.cut_after, faults.mute = 0.0, 0, None, False
    faults.bookmark_s, faults.watch_limit_s, faults.expired_as_event = 60.0, 1800.0, True
