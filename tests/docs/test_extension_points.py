"""The picture in epp/README.md: its extension points are those that plugins have, in the order they are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest

from epp import plugin
from epp.config import read
from epp.request import Headers, RequestHead
from epp.scheduler import Scheduler
from tests.docs.pages import PAGES, ROOT
from tests.exchanges import Rig

HOUSE = next(page for page in PAGES if page.path.parts[0] == "epp")

KINDS = (plugin.Producer, plugin.ProfileHandler, plugin.Filter, plugin.Scorer, plugin.Picker, plugin.Plugin)
POINTS = [(kind, name) for kind in KINDS for name, value in vars(kind).items() if isfunction(value) and name[0] != "_"]
ONE_OF_EACH = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: approx-prefix-cache-producer
- type: decode-filter
- type: queue-scorer
- type: max-score-picker
- type: single-profile-handler
"""


def pictured() -> list[str]:
    """The extension points of the picture, by number."""
    found = re.findall(r"^.* (\d+)  ([A-Z]\w+\.\w+)", HOUSE.text, flags=re.M)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [name for _, name in found]


def test_the_picture_shows_every_extension_point() -> None:
    assert sorted(pictured()) == sorted(f"{kind.__name__}.{name}" for kind, name in POINTS)


def test_the_picture_has_the_order_in_which_plugins_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def noting(point: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            if point not in called:
                called.append(point)
            return method(*args)

        return noted

    for built in Scheduler(read(ONE_OF_EACH)).plugins.values():
        for kind, name in POINTS:
            if isinstance(built, kind):
                method = noting(f"{kind.__name__}.{name}", getattr(type(built), name))
                monkeypatch.setattr(type(built), name, method)
    picker = Rig(config=ONE_OF_EACH)
    body = b'{"model":"m","prompt":"hello"}'
    asked = picker.director.read(RequestHead("POST", "/v1/completions", Headers()), body)
    answer = picker.director.decide(asked, body, picker.clock.time)
    assert isinstance(answer, tuple)
    picker.director.landed(answer[1], complete=True, now=picker.clock.time)
    picker.remove(answer[1].endpoint)
    assert called == pictured()


def test_every_file_and_folder_of_the_picker_is_in_its_readme() -> None:
    there = {f"{p.name}/" if p.is_dir() else p.name for p in (ROOT / "epp").iterdir() if p.name[0] not in "._"}
    assert there - set(HOUSE.code()) == {"README.md"}
