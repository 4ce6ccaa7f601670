"""How many compile children this machine bears: its cores, and its free memory by what one child takes.

Comes in: a kind of target. Goes out: a number of children, at least one. Both limits are those of this process: CPU
affinity and the quotas of control groups (containers, batch systems) count where the system has them; where it says
nothing of free memory, half of what is built in counts.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path

from rematplan.target.target import Kind

MIB = 1 << 20
# What to reckon with for one child: about twice the most that was seen, because larger programs take more, and a child that
# has compiled several keeps some of it. Seen were, as the kernel counts it (VmHWM, jaxlib 0.10.2, libtpu 0.0.52), for the GPT:
# TPU v5e 500 MiB for probes of 6 blocks and 877 of 24, 1089 for a full compile of 6 and 1304 after a second; H100 564 for 12;
# CPU 579 for 24.
CHILD_BYTES = {Kind.TPU: 2560 * MIB, Kind.GPU: 1152 * MIB, Kind.CPU: 1152 * MIB, Kind.LOCAL: 1152 * MIB}
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 of control groups writes a number of this size for no limit


@functools.cache  # the children that run later would count as memory that is taken
def children(kind: Kind) -> int:
    """How many compile children of that kind may run at once in this process."""
    return bearable(cores(), free_bytes(), CHILD_BYTES[kind])


def bearable(core_count: int, free: int | None, child_bytes: int) -> int:
    """The lesser of a child for each core and what the free memory holds, but at least one."""
    by_memory = core_count if free is None else free // child_bytes
    return max(1, min(core_count, by_memory))


def cores() -> int:
    """Cores that this process may use: those of its affinity, and no more than its control group's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([count, *(math.floor(quota) for quota in _cpu_quotas(_GROUPS, _memberships(_PROC)))]))


def free_bytes() -> int | None:
    """Memory that this process may still take; None if the system does not say."""
    known = [n for n in (_available(_PROC), *_left_in_groups(_GROUPS, _memberships(_PROC))) if n is not None]
    return max(0, min(known)) if known else _half_of_the_machine()


def _available(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _half_of_the_machine() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return None


def _memberships(proc: Path) -> dict[str, str]:
    """By controller the path of this process's control group; version 2 has one for all, under the empty name."""
    found: dict[str, str] = {}
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _folders(root: Path, path: str) -> Iterable[Path]:
    """A group and those around it: each of them may set a limit. Inside of a container the path may lie outside."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return (root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _left_in_groups(root: Path, groups: dict[str, str]) -> Iterable[int]:
    """What every group's limit leaves; the files that a group has read can be dropped, and are not counted as taken."""
    for folder in _folders(root, groups.get("", "/")):
        limit, taken = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and taken is not None:
            yield limit - taken + _statistic(folder / "memory.stat", "inactive_file")
    for folder in _folders(root / "memory", groups.get("memory", "/")):
        limit, taken = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and taken is not None and limit < _UNLIMITED:
            yield limit - taken + _statistic(folder / "memory.stat", "total_inactive_file")


def _cpu_quotas(root: Path, groups: dict[str, str]) -> Iterable[float]:
    """Cores' worth of time that every group allows."""
    for folder in _folders(root, groups.get("", "/")):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)
    for folder in _folders(root / "cpu", groups.get("cpu", "/")):
        allowed, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if allowed is not None and period:
            yield allowed / period


def _statistic(file: Path, name: str) -> int:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    """A file's number; None if there is no such file, or it says that there is no limit ("max", -1)."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
