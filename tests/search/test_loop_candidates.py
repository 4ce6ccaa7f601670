"""Loops in chunks, in parts and with values on the host: which candidates there are, and that the search takes them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rematplan as rp
from rematplan._plan import Plan
from rematplan.errors import InfeasibleBudget
from rematplan.naming import describe
from rematplan.search.candidates import in_loops
from rematplan.search.extrapolate import Figures
from rematplan.search.loops import fastest_mixture, in_chunks, mixtures, offloaded
from rematplan.search.mixing import Priced
from rematplan.search.problem import Problem
from rematplan.target.target import resolve

FEATURES, LAYERS, BATCH = 64, 12, 8192


class Tower(nnx.Module):
    """Layers that differ only in their parameters, applied by a loop."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(lambda r: nnx.Linear(FEATURES, FEATURES, rngs=r), in_axes=(0,))
        self.layers = make(rngs.split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        step = nnx.scan(lambda x, linear: jnp.sin(linear(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return step(x, self.layers)


@pytest.fixture(scope="module")
def work() -> rp.Workload:
    model = nnx.eval_shape(lambda: Tower(nnx.Rngs(0)))
    return rp.Workload(
        lambda model, x: (model(x) ** 2).mean(), model, jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32)
    )


@pytest.fixture(scope="module")
def problem(work: rp.Workload) -> Problem:
    return Problem(work, resolve("gpu-h100"), progress=lambda _: None)


def figures(required_bytes: int, seconds: float) -> Figures:
    return Figures(required_bytes, required_bytes, seconds, folded=False, measurements=())


def as_plan(problem: Problem, configuration) -> Plan:
    bodies = {i: b.graph for i, b in problem.traced.bodies.items()}
    regions, loops = describe(configuration, problem.graph, bodies)
    return Plan(regions=regions, loops=loops, fingerprint=problem.graph.fingerprint)


def test_a_mixture_lands_on_the_budget(work: rp.Workload, problem: Problem) -> None:
    levels = [c for c in in_loops(problem, most_levels=7) if c.grouping == "loop, whole body"]
    small, large = Priced(levels[0], figures(100, 2.0)), Priced(levels[-1], figures(400, 1.0))
    (mix,) = mixtures(problem, [small, large], budget_bytes=255, count=3)
    ((_, loop),) = mix.candidate.configuration.loops
    # of twelve iterations six keep more: seven would need 275 bytes
    assert [part.iterations for part in loop.parts] == [6, None]
    assert (mix.predicted_bytes, mix.predicted_seconds) == (250, 1.5)
    assert loop.parts[1].body == levels[-1].configuration.loops[0][1].parts[0].body
    checked = rp.verify(work, plan=as_plan(problem, mix.candidate.configuration))
    assert checked.passed, checked.differences
    assert fastest_mixture(problem, [small, large], budget_bytes=255) == pytest.approx(2.0 - 155 / 300)
    assert fastest_mixture(problem, [small, large], budget_bytes=400) == 1.0
    assert fastest_mixture(problem, [small, large], budget_bytes=99) is None
    assert mixtures(problem, [small, large], budget_bytes=110, count=3) == []  # not one iteration fits
    assert mixtures(problem, [small, large], budget_bytes=500, count=3) == []  # the larger fits as it is


def test_chunks_need_at_least_two_of_them(problem: Problem) -> None:
    loops = in_loops(problem, most_levels=7)
    chunks = [c.configuration.loops[0][1].parts[0].chunk for c in in_chunks(problem, loops)]
    assert chunks == [2, 3, 6]
    assert in_chunks(problem, []) == []


def test_values_are_offloaded_only_where_the_chip_has_a_link(work: rp.Workload, problem: Problem) -> None:
    found = offloaded(problem, in_loops(problem, most_levels=7))
    assert found
    for candidate in found:
        ((index, loop),) = candidate.configuration.loops
        (region,) = loop.parts[0].body.regions
        values = problem.traced.bodies[index].graph.values
        assert region.offloaded <= region.saved
        assert region.offloaded == {v for v in region.saved if values[v].bytes >= 1 << 20} != set()
    on_cpu = Problem(work, resolve("cpu"), progress=lambda _: None)
    assert offloaded(on_cpu, in_loops(on_cpu, most_levels=7)) == []


def test_an_offloading_plan_is_verified_and_survives_its_file(work: rp.Workload, problem: Problem) -> None:
    candidate = offloaded(problem, in_loops(problem, most_levels=7))[0]
    plan = as_plan(problem, candidate.configuration)
    again = Plan.load(plan.to_json())
    assert again.loops == plan.loops and again.loops[0].regions[0].offloaded
    checked = rp.verify(work, plan=again)
    assert checked.passed, checked.differences
    assert "(on the host)" in " ".join(str(dataclasses.replace(again, status="fits")).split())


@pytest.mark.slow
def test_the_smallest_plan_runs_in_chunks(work: rp.Workload) -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        rp.plan(work, budget="1MiB", target="cpu")
    plan = rp.plan(work, budget=int(1.01 * caught.value.minimum_bytes), target="cpu")
    assert plan.loops[0].chunk > 1
    per_block = next(r for r in plan.baselines if r["name"] == "per-block")
    assert plan.measured["required_bytes"] < 0.9 * per_block["required_bytes"]
    assert rp.verify(work, plan=plan).passed
    assert all("in chunks of" in " ".join(text.split()) for text in (str(plan), plan.code()))
