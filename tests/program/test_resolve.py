"""Plans by name -> configurations: what was changed by hand and cannot be done is refused, with a sentence that says why."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import apply
from rematplan._plan import Plan, PlanLoop, PlanRegion
from rematplan.errors import PlanMismatch
from rematplan.naming import describe, resolve
from rematplan.program.configuration import Configuration, LoopPart, LoopPlan, Region, in_every_iteration
from rematplan.program.loss import traced_loss
from rematplan.workloads import mlp

LENGTH = 8


def loss(w, x):
    h = jnp.sin(x @ w[0])
    return jax.lax.scan(lambda h, row: (jnp.exp(jnp.sin(h @ row)), None), h, w)[0].sum()


@pytest.fixture(scope="module")
def traced():
    return traced_loss(rp.Workload(loss, jnp.ones((LENGTH, 4, 4)), jnp.ones((2, 4))))


def bodies_of(traced):
    return {index: body.graph for index, body in traced.bodies.items()}


def resolved(traced, regions=(), loops=()):
    plan = Plan(regions=tuple(regions), loops=tuple(loops), fingerprint=traced.graph.fingerprint)
    return resolve(Plan.load(plan.to_json()), traced.graph, bodies_of(traced))


def body_region(traced, *saved: str) -> PlanRegion:
    (body,) = traced.bodies.values()
    return PlanRegion(body.graph.operations[0].name, body.graph.operations[-1].name, saved, prevent_cse=False)


def around(traced, *saved: str, **more) -> PlanRegion:
    return PlanRegion(traced.graph.operations[0].name, traced.graph.operations[-1].name, saved, **more)


@pytest.mark.parametrize(
    "counts",
    [(3,), (3, 4), (3, 6), (None, 1), (9,), (8, None)],
    ids=["one part", "too few", "too many", "nothing left", "one too long", "nothing for the last"],
)
def test_parts_that_do_not_add_up_to_the_loop_are_refused(traced, counts):
    loops = [PlanLoop("scan", (body_region(traced),), count) for count in counts]
    with pytest.raises(PlanMismatch, match=f"loop 'scan' take .* of the {LENGTH} iterations"):
        resolved(traced, loops=loops)


@pytest.mark.parametrize("counts", [(None,), (LENGTH,), (3, None), (3, 5)])
def test_parts_that_add_up_are_taken(traced, counts):
    loops = [PlanLoop("scan", (body_region(traced),), count) for count in counts]
    ((_, loop),) = resolved(traced, loops=loops).loops
    assert len(loop.parts) == len(counts)
    assert (loop.body is not None) == (len(counts) == 1)  # all iterations are one loop, however they were counted


def test_a_configuration_with_iterations_left_over_is_never_run_as_if_they_were_all(traced):
    ((index, body),) = traced.bodies.items()
    region = Configuration((Region(0, len(body.equations)),))
    few = Configuration(loops=((index, LoopPlan((LoopPart(region, iterations=3),))),))
    with pytest.raises(PlanMismatch, match="iterations"):
        jax.make_jaxpr(apply.configured(traced, few))(jnp.ones((LENGTH, 4, 4)), jnp.ones((2, 4)))


def test_what_an_inner_region_computes_is_saved_by_that_one_alone():
    traced = traced_loss(mlp(blocks=4, features=4, batch=3))
    graph = traced.graph
    dots = [op for op in graph.operations if op.primitive == "dot_general"]
    inner = PlanRegion(dots[1].name, graph.operations[dots[2].index - 1].name)
    outer = PlanRegion(graph.operations[0].name, graph.operations[dots[3].index - 1].name, (dots[1].name,))
    assert resolved(traced, [outer]).regions[0].saved == frozenset(dots[1].outputs)
    with pytest.raises(PlanMismatch, match="saves what a region inside of it computes"):
        resolved(traced, [dataclasses.replace(outer, inner=(inner,))])
    # also where it stands deeper
    middle = PlanRegion(inner.first, inner.last, inner=(inner,))
    with pytest.raises(PlanMismatch, match="saves what a region inside of it computes"):
        resolved(traced, [dataclasses.replace(outer, inner=(middle,))])
    own = dataclasses.replace(outer, saved=(), inner=(dataclasses.replace(inner, saved=(dots[1].name,)),))
    assert resolved(traced, [own]).regions[0].inner[0].saved == frozenset(dots[1].outputs)


def test_one_name_for_a_value_and_for_another_in_a_loops_body_is_refused(traced):
    loops = [PlanLoop("scan", (body_region(traced, "dot_general"),))]
    with pytest.raises(PlanMismatch, match=r"'dot_general' in a region around the loop 'scan'.*keep both"):
        resolved(traced, [around(traced, "dot_general")], loops)
    with pytest.raises(PlanMismatch, match="keep both"):  # whichever of the regions around it
        resolved(traced, [around(traced, inner=(around(traced, "dot_general"),))], loops)
    parts = [PlanLoop("scan", (body_region(traced),), 3), PlanLoop("scan", (body_region(traced, "dot_general"),))]
    with pytest.raises(PlanMismatch, match="keep both"):  # and in whichever part
        resolved(traced, [around(traced, "dot_general")], parts)
    before = PlanRegion(traced.graph.operations[0].name, "sin", ("dot_general",))
    assert resolved(traced, [before], loops).loops  # beside it they are two
    assert resolved(traced, [around(traced, "sin")], loops).regions


@pytest.mark.parametrize(
    ("region", "complaint"),
    [
        ({"saved": ("dot_general",), "policy": "dots_saveable"}, "both a policy and names"),
        ({"policy": "dots"}, "the policy 'dots', which is none of everything_saveable"),
        ({"policy": "save_only_these_names"}, "which is none of"),
    ],
)
def test_a_policy_is_one_that_jax_has_and_stands_alone(traced, region, complaint):
    with pytest.raises(PlanMismatch, match=complaint):
        resolved(traced, [dataclasses.replace(around(traced), **region)])


def test_policies_are_part_of_a_plan(traced):
    ((index, body),) = traced.bodies.items()
    by_policy = Region(0, len(body.equations), policy="dots_saveable", prevent_cse=False)
    configuration = Configuration(
        (Region(0, 2, policy="nothing_saveable"),), ((index, in_every_iteration(Configuration((by_policy,)))),)
    )
    regions, loops = describe(configuration, traced.graph, bodies_of(traced))
    assert (regions[0].policy, loops[0].regions[0].policy) == ("nothing_saveable", "dots_saveable")
    assert resolved(traced, regions, loops) == configuration


def test_plans_that_would_lose_something_are_not_written(traced):
    ((index, _),) = traced.bodies.items()
    nested = Configuration(loops=((0, in_every_iteration(Configuration())),))
    with pytest.raises(ValueError, match="loops in the bodies of loops"):
        describe(Configuration(loops=((index, in_every_iteration(nested)),)), traced.graph, bodies_of(traced))
