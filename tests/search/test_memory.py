"""What planning leaves behind: searches live with their workload, and go with it."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rematplan as rp
from rematplan.search.planning import Search


def of_arrays():
    w, x, captured = jnp.ones((4, 8, 8)), jnp.ones((2, 8)), jnp.full((8,), 2.0)

    def loss(w, x):
        with jax.named_scope("~layers/0~"):
            return jax.lax.scan(lambda h, row: (jnp.sin(jax.nn.relu(h @ row) * captured), None), x, w)[0].sum()

    return rp.Workload(loss, w, x), [w, x, captured, loss]


def of_a_model():
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    return rp.Workload(lambda model, x: jnp.sin(model(x)).sum(), model, x), [model, x]


def plan(work: rp.Workload) -> object:
    return rp.plan(work, budget="1GiB", target="cpu")


def frontier(work: rp.Workload) -> object:
    return rp.frontier(work, target="cpu", points=2)


def measure(work: rp.Workload) -> object:
    return rp.measure(work, target="local")


@pytest.mark.parametrize("make", [of_arrays, of_a_model])
@pytest.mark.parametrize("verb", [plan, frontier, measure])
def test_a_planned_workload_and_its_arrays_are_freed(make, verb):
    def planned() -> list[weakref.ref]:
        work, held = make()
        verb(work)
        return [weakref.ref(each) for each in (work, *held)]

    left = planned()
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


def test_what_was_found_for_one_budget_serves_the_next(monkeypatch):
    work, _ = of_arrays()
    made = []
    monkeypatch.setattr(Search, "__init__", counted(Search.__init__, made))
    for _ in range(2):
        plan(work)
    rp.plan(work, budget="1GiB", target="cpu", own_regions="replace")
    assert len(made) == 2  # one for each way of planning
    again, _ = of_arrays()
    plan(again)
    assert len(made) == 3


def counted(function, calls):
    def counting(self, *args, **options):
        calls.append(self)
        return function(self, *args, **options)

    return counting
