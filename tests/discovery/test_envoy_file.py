"""The pool as a file that Envoy follows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment

from epp.discovery.envoy_file import ENVOY_POOL, EnvoyFile
from epp.endpoint import Endpoint, Pool


def listed(path: Path) -> list[tuple[str, int]]:
    """The addresses in the file, read by Envoy's own definitions."""
    (resource,) = json.loads(path.read_text())["resources"]
    assert resource.pop("@type") == "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    assignment: Any = ClusterLoadAssignment.from_dict(resource)
    assert assignment.cluster_name == ENVOY_POOL
    sockets = [e.endpoint.address.socket_address for group in assignment.endpoints for e in group.lb_endpoints]
    return [(socket.address, socket.port_value) for socket in sockets]


def test_the_file_follows_the_pool(tmp_path: Path) -> None:
    first, second = Endpoint("10.0.0.1", 8000), Endpoint("fd00::2", 8001)
    pool = Pool([first])
    file = EnvoyFile(tmp_path / "pool.json", pool)
    file.changed()
    assert listed(file.path) == [("10.0.0.1", 8000)]
    pool.update(add=[second], remove=[first])
    file.changed([second], [first])
    assert listed(file.path) == [("fd00::2", 8001)]
    assert [p.name for p in tmp_path.iterdir()] == ["pool.json"]


def test_an_empty_list_is_made_where_none_is_and_an_old_one_is_left(tmp_path: Path) -> None:
    pool = Pool([])
    file = EnvoyFile(tmp_path / "pool.json", pool)
    file.create()
    assert listed(file.path) == []
    file.path.write_text("old")
    file.create()
    assert file.path.read_text() == "old"


def test_a_file_that_cannot_be_written_is_logged_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = EnvoyFile(tmp_path / "missing" / "pool.json", Pool([]))
    with caplog.at_level(logging.ERROR):
        file.changed()
    assert (file.written, file.failed) == (0, 1)
    assert "missing/pool.json" in caplog.text
    with pytest.raises(FileNotFoundError):
        file.create()
