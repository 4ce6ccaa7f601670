"""Budgets as people write them, less what is kept free."""

from __future__ import annotations

import pytest

from rematplan.budgets import budget_bytes
from rematplan.errors import InputError
from rematplan.target import compiler
from rematplan.target.target import resolve
from rematplan.workloads import mlp

GIB = 1 << 30


@pytest.mark.parametrize(
    ("budget", "reserve", "expected"),
    [("12GiB", 0, 12 * GIB), ("12GiB", "1GiB", 11 * GIB), (12 * GIB, 5, 12 * GIB - 5), ("12GiB", "0", 12 * GIB)],
)
def test_what_is_kept_free_is_taken_off(budget, reserve, expected):
    assert budget_bytes(budget, target=resolve("tpu-v5e"), reserve=reserve) == expected


def test_a_share_of_the_memory_may_be_kept_free():
    memory = resolve("tpu-v5e").memory_bytes
    assert memory is not None
    assert budget_bytes("100%", target=resolve("tpu-v5e"), reserve="25%") == memory - memory // 4


def test_a_reserve_that_leaves_nothing_is_refused():
    with pytest.raises(InputError, match=r"reserve of 2\.00 GiB leaves nothing of the budget of 1\.00 GiB"):
        budget_bytes("1GiB", target=resolve("tpu-v5e"), reserve="2GiB")


def test_a_topology_of_several_devices_says_that_the_program_is_of_one():
    step = mlp(blocks=1, features=128, batch=64).step()
    for name, expected in (("gpu-h100", 0), ("gpu-h100:8", 1)):
        target = resolve(name)
        program = compiler.lower(step.function, step.leaves, target=target)
        for _ in range(2):  # also of what is found in the cache
            warnings = compiler.measure(program, target=target).warnings
            assert sum("8 devices, and the program is of one" in w for w in warnings) == expected
