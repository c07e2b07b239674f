"""Hot reload: a good change is taken, a bad one is refused, what stayed the same keeps its state."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from random import Random

import pytest

from epp.config import load
from epp.reload import ConfigWatcher
from epp.scheduler import Scheduler
from tests.config.test_plugin_file import PLUGIN

GOOD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: round-robin-picker\n"
MORE = GOOD + "- type: queue-scorer\n"


class Server:
    """Holds a scheduler, as the picker does."""

    def __init__(self, path: Path) -> None:
        self.scheduler = Scheduler(load(path), random=Random(1))
        self.replaced: asyncio.Queue[Scheduler] = asyncio.Queue()
        self.watcher = ConfigWatcher(path, lambda: self.scheduler, self.replace, interval_s=0.01)

    def replace(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.replaced.put_nowait(scheduler)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return Server(path)


async def test_a_good_change_is_taken_and_unchanged_plugins_keep_their_state(server: Server) -> None:
    before = server.scheduler
    server.watcher.path.write_text(MORE)
    assert await server.watcher.check()
    assert set(server.scheduler.plugins) == {*before.plugins, "queue-scorer"}
    assert server.scheduler.plugins["round-robin-picker"] is before.plugins["round-robin-picker"]
    assert (server.watcher.taken, server.watcher.refused) == (1, 0)


async def test_an_unchanged_file_is_left_alone(server: Server) -> None:
    before = server.scheduler
    assert not await server.watcher.check()
    assert server.scheduler is before


async def test_a_bad_file_is_refused_with_its_errors_and_the_old_one_stays(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.scheduler
    server.watcher.path.write_text(GOOD + "- type: nothing\n- typ: x\n")
    with caplog.at_level(logging.ERROR):
        assert not await server.watcher.check()
    assert server.scheduler is before
    assert "config.yaml:5: plugins[1].type" in caplog.text
    assert "config.yaml:6: plugins[2].typ" in caplog.text
    assert not await server.watcher.check()  # the same bad file is not read again and again
    assert server.watcher.refused == 1
    server.watcher.path.write_text(MORE)
    assert await server.watcher.check()


async def test_a_file_that_vanished_is_refused_and_taken_when_it_is_back(server: Server) -> None:
    server.watcher.path.unlink()
    assert not await server.watcher.check()
    server.watcher.path.write_text(MORE)
    assert await server.watcher.check()


async def test_a_swapped_link_as_in_a_mounted_config_map_is_seen(tmp_path: Path) -> None:
    for name, text in (("v1", GOOD), ("v2", MORE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "config.yaml").symlink_to("data/config.yaml")
    server = Server(tmp_path / "config.yaml")
    (tmp_path / "new").symlink_to("v2")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert await server.watcher.check()
    assert "queue-scorer" in server.scheduler.plugins


async def test_a_plugin_whose_constructor_raises_is_refused(server: Server) -> None:
    folder = server.watcher.path.parent
    (folder / "mine.py").write_text(
        PLUGIN + "\n    def __init__(self, *args):\n        raise OSError('no model here')\n"
    )
    before = dict(server.scheduler.handle.plugins)
    server.watcher.path.write_text(GOOD + "- type: mine:ByPort\n  parameters: {port: 1}\n")
    assert not await server.watcher.check()
    assert server.scheduler.handle.plugins == before


async def test_the_task_sees_changes_by_itself_and_a_trigger_takes_a_changed_plugin_file(server: Server) -> None:
    folder = server.watcher.path.parent
    (folder / "mine.py").write_text(PLUGIN)
    task = asyncio.create_task(server.watcher.run())
    try:
        server.watcher.path.write_text(GOOD + "- type: mine:ByPort\n  parameters: {port: 1}\n")
        async with asyncio.timeout(10):
            first = (await server.replaced.get()).plugins["mine:ByPort"]
        (folder / "mine.py").write_text(PLUGIN + "\n# changed\n")
        server.watcher.trigger()
        async with asyncio.timeout(10):
            second = (await server.replaced.get()).plugins["mine:ByPort"]
        assert type(second) is not type(first)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_endless_file_in_its_place_is_refused_after_its_first_megabyte(server: Server) -> None:
    path = server.watcher.path
    path.unlink()
    path.symlink_to("/dev/zero")
    assert not await server.watcher.check()
    assert server.watcher.refused == 1
