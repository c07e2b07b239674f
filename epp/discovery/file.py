"""File discovery: endpoints from a YAML file that may be replaced while the picker runs.

    endpoints:
      - address: 10.0.0.1        # an IP address
        ports: 8000-8007         # a port, a range, or a list of them: the host's data-parallel ranks, in this order
        name: worker-0           # default: ADDRESS:PORT
        role: decode             # label llm-d.ai/role
        dataParallelSize: 8      # ranks behind each port (vllm serve --data-parallel-size); default 1
        engine: vllm             # label llm-d.ai/engine-type; default: found out from its metrics
        labels: {zone: a}

The file is watched by its inode, size and time of change, through symbolic links (so a mounted ConfigMap works).
Replace it by renaming a new one over it; one written in place is taken once it has not changed for a poll. A file that
cannot be read, or has anything wrong in it, is refused whole, with a line that says where, and what was known stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epp.decoding import decode
from epp.discovery.membership import SHORT_LABELS, EndpointSpec, Publish, expand, parse_host, parse_ports, parse_ranks
from epp.document import Node, Problem, Problems, UnreadableFile, join, parse, read_file, show, unknown

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


class EndpointFileError(ValueError):
    """A file that cannot be used; `str()` gives one line per problem: `FILE:LINE: endpoints[0].ports: ...`."""

    def __init__(self, path: Path, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(f"{path}:{problem}" for problem in problems))


class FileDiscovery:
    """Publishes what the file says, at once and whenever it changed."""

    def __init__(self, path: str | Path, *, poll_s: float = 0.5) -> None:
        self.path = Path(path)
        self.name = f"file {path}"
        self.synced = False
        self.trouble = ""
        self.counters = Counter({"file_loaded": 0, "file_refused": 0})
        self._poll_s = poll_s
        self._task: asyncio.Task[None] | None = None

    async def start(self, publish: Publish) -> None:
        """Raises EndpointFileError when the first reading fails: nothing is known yet that could stay."""
        stamp = _stamp(self.path)
        publish(await asyncio.to_thread(load, self.path))
        self.counters["file_loaded"] += 1
        self.synced = True
        self._task = asyncio.create_task(self._watch(publish, stamp))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self, publish: Publish, taken: Stamp | None) -> None:
        last = taken
        while True:
            await asyncio.sleep(self._poll_s)
            stamp, before = _stamp(self.path), last
            last = stamp
            if stamp == taken or stamp != before:
                continue
            taken = stamp
            try:
                specs = await asyncio.to_thread(load, self.path)
                publish(specs)
            except Exception as error:
                self.counters["file_refused"] += 1
                self.trouble = f"{self.path} is refused"
                log.error("the endpoint file is refused, the endpoints known before stay: %s", error)
            else:
                self.trouble = ""
                self.counters["file_loaded"] += 1


def load(path: Path) -> list[EndpointSpec]:
    """Read the file. Raises EndpointFileError for everything wrong with it."""
    try:
        text = read_file(path)
    except UnreadableFile as error:
        raise EndpointFileError(path, (Problem(1, "", str(error)),)) from None
    problems = Problems()
    root = parse(text, problems)
    specs = _endpoints(root, problems) if root is not None else []
    if problems.found:
        raise EndpointFileError(path, problems.sorted())
    return specs


@dataclass(frozen=True, slots=True)
class _Entry:
    address: str
    ports: Any
    name: str = ""
    role: str = ""
    engine: str = ""
    data_parallel_size: int = 1
    labels: dict[str, str] = field(default_factory=dict)


def _endpoints(root: Node, problems: Problems) -> list[EndpointSpec]:
    if not isinstance(root.value, dict) or "endpoints" not in root.value:
        problems.add(root, "endpoints", "is required: a list of endpoints")
        return []
    for key, line in root.keys.items():
        if key != "endpoints":
            problems.add(line, key, unknown("key", key, ["endpoints"]))
    entries = root.value["endpoints"]
    if not isinstance(entries.value, list):
        problems.add(entries, "endpoints", f"must be a list, got {show(entries)}")
        return []
    specs: list[EndpointSpec] = []
    lines: dict[tuple[str, int], int] = {}
    for index, node in enumerate(entries.value):
        path = f"endpoints[{index}]"
        for spec in _entry(node, path, problems):
            if (line := lines.setdefault((spec.host, spec.port), node.line)) != node.line:
                problems.add(node, path, f"port {spec.port} of {spec.host} is already there on line {line}")
            specs.append(spec)
    return specs


def _entry(node: Node, path: str, problems: Problems) -> list[EndpointSpec]:
    entry: _Entry | None = decode(_Entry, node, path, problems)
    if entry is None:
        return []
    assert isinstance(node.value, dict)
    labels = dict(entry.labels)
    key = "address"
    try:
        host = parse_host(entry.address)
        key = "ports"
        ports = _ports(entry.ports)
        key = "dataParallelSize"
        ranks = parse_ranks(str(entry.data_parallel_size))
        for key, value in (("role", entry.role), ("engine", entry.engine)):
            label, check = SHORT_LABELS[key]
            if value and label in labels:
                raise ValueError(f"the label {label} says it too")
            if value:
                labels[label] = check(value)
    except ValueError as error:
        problems.add(node.keys.get(key, node.line), join(path, key), str(error))
        return []
    return expand(host, ports, entry.name, labels, ranks)


def _ports(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    ports = tuple(port for item in items for port in parse_ports(str(item)))
    if not ports:
        raise ValueError("must name at least one port")
    if len(set(ports)) != len(ports):
        raise ValueError("a port is given twice")
    return ports


def _stamp(path: Path) -> Stamp | None:
    """None when the file is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
