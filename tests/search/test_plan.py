"""Planning on this machine's CPU compiler: what is planned fits, is applied as planned, and is no worse than by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan import _compare, workloads
from rematplan.errors import CompilerError, InfeasibleBudget, InputError, PlanMismatch
from rematplan.planner.baselines import baselines
from rematplan.program.loss import traced_loss

SIZES = {"blocks": 6, "features": 64, "batch": 1024}


@pytest.fixture(scope="module")
def work() -> rp.Workload:
    return workloads.mlp(**SIZES)


@pytest.fixture(scope="module")
def comparison(work: rp.Workload):
    return rp.compare(work, target="cpu")


@pytest.fixture(scope="module")
def small_plan(work: rp.Workload, comparison) -> rp.Plan:
    plain = next(r.measurement for r in comparison.rows if r.name == "plain")
    return rp.plan(work, budget=int(0.7 * plain.required_bytes), target="cpu")


def test_a_plan_fits_and_measures_as_it_says(work: rp.Workload, small_plan: rp.Plan) -> None:
    assert small_plan.budget_bytes is not None and small_plan.regions
    again = rp.measure(work, target="cpu", plan=small_plan)
    assert again.required_bytes == small_plan.measured["required_bytes"] <= small_plan.budget_bytes


def test_a_plan_is_no_worse_than_any_hand_written_configuration(work: rp.Workload, comparison) -> None:
    for row in comparison.rows:
        plan = rp.plan(work, budget=row.measurement.required_bytes, target="cpu")
        assert plan.measured["required_bytes"] <= row.measurement.required_bytes, row.name
        assert plan.measured["seconds"] <= 1.01 * row.measurement.seconds, row.name


def test_a_budget_below_the_minimum_names_it_and_its_parts(work: rp.Workload) -> None:
    with pytest.raises(InfeasibleBudget, match="cannot be met") as caught:
        rp.plan(work, budget="100KiB", target="cpu")
    assert caught.value.minimum_bytes > 100 << 10
    assert sum(caught.value.parts.values()) == pytest.approx(caught.value.minimum_bytes, rel=0.01)
    feasible = rp.plan(work, budget=caught.value.minimum_bytes, target="cpu")
    assert feasible.measured["required_bytes"] <= caught.value.minimum_bytes


def test_percent_of_a_target_without_memory_is_refused(work: rp.Workload) -> None:
    with pytest.raises(InputError):
        rp.plan(work, budget="80%", target="cpu")


def test_an_applied_plan_computes_the_same_gradients(work: rp.Workload, small_plan: rp.Plan, tmp_path) -> None:
    small_plan.save(tmp_path / "plan.json")
    (model, *batch), _ = work.materialize()
    expected = nnx.value_and_grad(work.loss_fn)(model, *batch)
    found = nnx.value_and_grad(rp.remat(work.loss_fn, plan=tmp_path / "plan.json"))(model, *batch)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_plan_survives_its_file(small_plan: rp.Plan, tmp_path) -> None:
    small_plan.save(tmp_path / "plan.json")
    assert rp.Plan.load(tmp_path / "plan.json").to_json() == small_plan.to_json()
    with pytest.raises(InputError, match="exists"):
        small_plan.save(tmp_path / "plan.json")


def test_a_plan_for_another_depth_is_refused_with_what_changed(small_plan: rp.Plan) -> None:
    deeper = workloads.mlp(**{**SIZES, "blocks": 7})
    with pytest.raises(PlanMismatch, match="new: layers/6"):
        rp.measure(deeper, target="cpu", plan=small_plan)


def test_a_plan_applies_to_another_batch_size(small_plan: rp.Plan) -> None:
    smaller = workloads.mlp(**{**SIZES, "batch": 512})
    plain = rp.measure(smaller, target="cpu")
    assert rp.measure(smaller, target="cpu", plan=small_plan).required_bytes < plain.required_bytes


def test_the_frontier_gets_faster_with_every_byte(work: rp.Workload) -> None:
    points = rp.frontier(work, target="cpu", points=4).points
    needs = [p.measurement.required_bytes for p in points]
    times = [p.measurement.seconds for p in points]
    assert len(points) >= 2
    assert needs == sorted(set(needs)) and times == sorted(set(times), reverse=True)


@pytest.mark.slow
def test_a_loop_is_planned_inside() -> None:
    target = "gpu-h100"
    sizes = {"blocks": 4, "features": 32, "heads": 2, "length": 64, "batch": 8, "vocabulary": 64}
    work = workloads.scan_gpt(**sizes)
    budget = int(0.9 * rp.measure(work, target=target).required_bytes)
    plan = rp.plan(work, budget=budget, target=target)
    assert plan.loops and not plan.regions
    assert rp.measure(work, target=target, plan=plan).required_bytes == plan.measured["required_bytes"]
    assert plan.measured["required_bytes"] <= budget


def test_hand_written_configurations_follow_the_modules() -> None:
    graph = traced_loss(workloads.gpt(blocks=4, features=16, heads=2, length=8, batch=2, vocabulary=32)).graph
    found = {b.name: b.configuration for b in baselines(graph)}
    assert len(found["per-block"].regions) == 4 and len(found["every-3"].regions) == 2
    for region in found["per-block"].regions:
        assert len({op.module.split("/")[1] for op in graph.operations[region.start : region.stop]}) == 1
    assert found["all-but-last"].regions == found["per-block"].regions[:-1]


def test_a_comparison_without_a_single_row_is_an_error(work: rp.Workload, monkeypatch) -> None:
    monkeypatch.setattr(_compare, "_measure_all", lambda tasks, *_: ["it crashed"] * len(tasks))
    with pytest.raises(CompilerError, match=r"no configuration could be measured.*it crashed"):
        rp.compare(work, target="cpu")
