"""Amounts of memory in every spelling, from the command line and from code."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rematplan.budgets import budget_bytes, budget_or_memory
from rematplan.errors import InputError
from rematplan.target.target import resolve

GIB = 1 << 30


@pytest.mark.parametrize(
    "nothing", [0, "0", "0%", "0GiB", "0 MB", "0.0%", "+0b", " 00 KiB ", "0_0", np.int64(0), "0.00"]
)
def test_nothing_may_be_kept_free(nothing):
    assert budget_bytes("1GiB", target=resolve("tpu-v5e"), reserve=nothing) == GIB
    assert budget_bytes("1GiB", target=resolve("cpu"), reserve=nothing) == GIB


@pytest.mark.parametrize("reserve", ["0G", "0 bananas", "-0GiB", "-1", "", "%", "0x0", ".", False, None, "1%%"])
def test_what_is_no_amount_is_not_nothing(reserve):
    with pytest.raises(InputError):
        budget_bytes("1GiB", target=resolve("tpu-v5e"), reserve=reserve)


@pytest.mark.parametrize("zero", [0, "0", "0%", "0GiB", np.int64(0)])
def test_a_budget_of_nothing_is_refused(zero):
    with pytest.raises(InputError, match="zero"):
        budget_bytes(zero, target=resolve("tpu-v5e"))


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint64])
def test_whole_numbers_of_any_kind(kind):
    found = budget_bytes(kind(GIB), target=resolve("cpu"), reserve=kind(1 << 20))
    assert (found, type(found)) == (GIB - (1 << 20), int)
    assert budget_or_memory(kind(GIB), target=resolve("cpu")) == GIB


@pytest.mark.parametrize("budget", [True, np.bool_(True), 1e9, np.float32(1e9), None, jnp.ones(3), b"1GiB"])
def test_other_things_are_no_budget(budget):
    with pytest.raises(InputError, match="is not an amount of memory"):
        budget_bytes(budget, target=resolve("cpu"))


@pytest.mark.parametrize("reserve", ["0%", "0GiB"])
def test_on_the_command_line(cli, reserve):
    words = ("mlp", "blocks=2", "batch=64", "features=32", "--target", "cpu", "--reserve", reserve)
    assert cli("plan", *words, "--budget", "10MiB", "--json").code == 0
