"""CPU time of other processes, kernel time of their own system calls included (Linux).

In: a process id. Out: seconds of CPU its threads have used. `/proc/PID/task/*/schedstat` counts nanoseconds; where the
kernel does not keep it, `/proc/PID/stat` counts ticks of 10 ms. A thread that ends takes its schedstat with it, so the
processes measured here are those whose threads live as long as they do.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds(pid: int, proc: Path = PROC) -> float:
    """Raises OSError when there is no such process, or no /proc."""
    process = proc / str(pid)
    nanoseconds = sum(int(_first_word(task / "schedstat")) for task in (process / "task").iterdir())
    return nanoseconds / 1e9 if nanoseconds else _ticks(process) / os.sysconf("SC_CLK_TCK")


def _first_word(path: Path) -> str:
    try:
        return path.read_text().split()[0]
    except FileNotFoundError:  # a thread that ended just now, or a kernel without schedstat
        return "0"


def _ticks(process: Path) -> int:
    # The second field is the command's name in parentheses and may hold anything; user and system time are 14 and 15.
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
