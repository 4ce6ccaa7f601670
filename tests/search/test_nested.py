"""Budgets that one level of regions does not reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import _jax_private, apply, workloads
from rematplan._plan import PlanRegion
from rematplan.errors import InfeasibleBudget, InputError
from rematplan.naming import describe, resolve
from rematplan.program import fold
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss
from rematplan.program.residuals import with_residuals
from rematplan.program.trace import trace


def depth(regions: tuple[PlanRegion, ...]) -> int:
    return max((1 + depth(r.inner) for r in regions), default=0)


@pytest.mark.slow
def test_a_deep_model_reaches_a_budget_that_one_level_does_not(tmp_path) -> None:
    work = workloads.mlp(blocks=27, features=32, batch=8192)
    with pytest.raises(InfeasibleBudget) as caught:
        rp.plan(work, budget="1MiB", target="cpu")
    plan = rp.plan(work, budget=int(1.01 * caught.value.minimum_bytes), target="cpu")
    assert depth(plan.regions) > 1
    one_level = [row["required_bytes"] for row in plan.baselines]
    # cube root against square root of the depth, parameters and gradients apart
    assert plan.measured["required_bytes"] < 0.8 * min(one_level)
    plan.save(tmp_path / "plan.json")
    again = rp.Plan.load(tmp_path / "plan.json")
    assert again.regions == plan.regions
    assert rp.measure(work, target="cpu", plan=again).required_bytes == plan.measured["required_bytes"]
    checked = rp.verify(work, plan=again)
    assert checked.passed, checked.differences
    assert "inside" in str(plan)
    assert "# Inside of region" in plan.code()


def test_names_of_inner_regions_are_the_plans_too() -> None:
    traced = traced_loss(workloads.mlp(blocks=4, features=4, batch=3))
    graph = traced.graph
    dot = next(op for op in graph.operations if op.primitive == "dot_general")
    inner = Region(dot.index, dot.index + 2, frozenset(dot.outputs))
    configuration = Configuration((Region(0, 6, inner=(inner,)),))
    regions, _ = describe(configuration, graph, {})
    plan = rp.Plan(regions=regions, fingerprint=graph.fingerprint)
    assert plan.saved == (graph.values[dot.outputs[0]].name,)
    assert resolve(rp.Plan.load(plan.to_json()), graph, {}) == configuration


def test_folding_carries_inner_regions_along() -> None:
    traced = traced_loss(workloads.mlp(blocks=4, features=4, batch=3))
    ends = [op.index for op in traced.graph.operations if op.primitive == "dot_general"][1:]
    first, second = (traced.graph.operations[end - 1].outputs[0] for end in ends[:2])
    folded = fold.fold(traced, dropped=(ends[0], ends[1]), stands_for={second: first})
    configuration = Configuration((Region(0, ends[2], inner=(Region(ends[1], ends[2]),)),))
    (region,) = folded.configuration(configuration).regions
    layer = ends[1] - ends[0]
    assert (region.start, region.stop) == (0, ends[2] - layer)
    assert [(r.start, r.stop) for r in region.inner] == [(ends[0], ends[2] - layer)]


def test_nesting_is_refused_under_a_remat_that_does_not_honour_it(monkeypatch) -> None:
    monkeypatch.setattr(_jax_private, "new_remat", lambda: True)
    traced = with_residuals(trace(lambda x: [jnp.sin(jnp.sin(x)).sum()], (jnp.ones(3),), differentiated=[0]))
    flat = Configuration((Region(0, 2),))
    assert jax.make_jaxpr(apply.configured(traced, flat))(jnp.ones(3))
    with pytest.raises(InputError, match="regions inside regions"):
        apply.configured(traced, Configuration((Region(0, 2, inner=(Region(0, 1),)),)))
