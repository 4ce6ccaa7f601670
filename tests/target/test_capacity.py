"""How many compile children a machine bears: by cores, free memory, and the limits of control groups."""

from __future__ import annotations

import os

import pytest

from rematplan.target import capacity
from rematplan.target.capacity import bearable
from rematplan.target.target import Kind

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "free", "expected"),
    [(8, 64 * GIB, 8), (8, 7 * GIB, 3), (8, 1 * GIB, 1), (1, 64 * GIB, 1), (4, None, 4), (8, 0, 1)],
)
def test_the_lesser_of_cores_and_memory(cores, free, expected):
    assert bearable(cores, free, 2 * GIB) == expected


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 cores and 100 GiB that the tests limit further."""
    monkeypatch.setattr(capacity, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(capacity, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {100 << 20} kB\n"})
    return tmp_path


def test_without_groups_the_whole_machine_counts(machine):
    assert capacity.cores() == 16
    assert capacity.free_bytes() == 100 * GIB


def test_the_second_version_of_control_groups(machine):
    """The nearest group sets no limits, the one around it does."""
    write(
        machine,
        {
            "proc/self/cgroup": "0::/batch/job\n",
            "cgroup/batch/memory.max": f"{12 * GIB}\n",
            "cgroup/batch/memory.current": f"{7 * GIB}\n",
            "cgroup/batch/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "cgroup/batch/cpu.max": "350000 100000\n",
            "cgroup/batch/job/memory.max": "max\n",
            "cgroup/batch/job/memory.current": "1\n",
            "cgroup/batch/job/cpu.max": "max 100000\n",
        },
    )
    assert capacity.free_bytes() == 7 * GIB  # limit - taken + files that can be dropped
    assert capacity.cores() == 3


def test_the_first_version_of_control_groups_inside_of_a_container(machine):
    """The path is that of the host; what is mounted is the container's own group."""
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}\n",
            "cgroup/memory/memory.stat": "total_inactive_file 0\n",
            "cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert capacity.free_bytes() == 3 * GIB
    assert capacity.cores() == 1  # half a core is one child


def test_no_limit_is_written_as_a_huge_number(machine):
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "1\n",
            "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert capacity.free_bytes() == 100 * GIB
    assert capacity.cores() == 16


def test_where_the_system_says_nothing_half_of_the_memory_counts(machine, monkeypatch):
    (machine / "proc/meminfo").unlink()
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert capacity.free_bytes() == 2 * GIB
    assert capacity.cores() == 6


def test_this_machine_bears_at_least_one_of_every_kind():
    assert all(1 <= capacity.children(kind) <= (os.cpu_count() or 1) for kind in Kind)
