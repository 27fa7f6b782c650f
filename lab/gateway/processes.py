"""How much processor time each process of a service has taken, and which part of the service it is.

Time is the kernel's clock of a process: user and system, of all its threads, those that have ended too, to the
nanosecond (`/proc/PID/stat` counts hundredths of a second, which many a load here does not reach). Linux alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GATEWAY, PROXY, ROUTER, SHELL, RANK, RAYLET = "gateway", "HTTP proxy", "router", "verifier's shell", "rank", "raylet"
OTHERS = "others"
ROLES = (GATEWAY, PROXY, ROUTER, SHELL, RANK, RAYLET, OTHERS)  # of our own service, in the order of a request's way
SERVER = "server"  # the first process of another one
# how the titles of a service's processes begin; Ray gives its workers theirs
_TITLES = (
    ("ray::ServeReplica:outrider:Gateway", GATEWAY),
    ("ray::ProxyActor", PROXY),
    ("ray::ServeReplica:outrider:Router", ROUTER),
    ("ray::ServeReplica:outrider:Verifier", SHELL),
    ("ray::Rank", RANK),
)
_OF_RAY = ("ray::", "gcs_server", "ray/dashboard", "ray/autoscaler", "_private/log_monitor")
MAX_TITLE = 32  # characters of another server's process


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Processor time of one process since its start."""

    role: str
    seconds: float


def role_of(command: str, *, is_first: bool = False) -> str:
    """Name the part of a service by its command line; a stranger's is its name."""
    for title, role in _TITLES:
        if command.startswith(title):
            return role
    if "raylet/raylet" in command.partition(" ")[0]:
        return RAYLET
    if any(part in command for part in _OF_RAY):
        return OTHERS
    if is_first:
        return SERVER
    word = command.partition(" ")[0].rpartition("/")[2]
    return (command if word.startswith("python") else word)[:MAX_TITLE] or OTHERS


def snapshot(first: int, *, without: Collection[int] = ()) -> dict[int, Spent]:
    """Return what a process and its descendants have taken, by pid.

    `without`: their own time, and that of their descendants, is left out. One that ends meanwhile is left out, too.
    """
    found: dict[int, Spent] = {}
    for pid in _family(first, set(without)):
        with contextlib.suppress(OSError):
            command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found[pid] = Spent(role=role_of(command, is_first=pid == first), seconds=processor_s(pid))
    return found


def spent_between(before: Mapping[int, Spent], after: Mapping[int, Spent]) -> dict[str, float]:
    """Return the seconds that each role took between two snapshots; a process that is new began at 0."""
    seconds: dict[str, float] = {}
    for pid, now in after.items():
        then = before.get(pid)
        spent_s = now.seconds - (0.0 if then is None else then.seconds)
        seconds[now.role] = seconds.get(now.role, 0.0) + spent_s
    return seconds


def processor_s(pid: int) -> float:
    """Return a process's processor time. Raises `OSError` if there is no such process."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it


def _family(first: int, without: set[int]) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    left = [first]
    while left:
        pid = left.pop()
        if pid not in without:
            yield pid
            left += children.get(pid, ())


def _parents() -> Iterator[tuple[int, int]]:
    """Yield every process with its parent."""
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # the name before may contain anything, parentheses too
                state_and_parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(folder.name), int(state_and_parent[1])
