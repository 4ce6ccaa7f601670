"""The whole flow on published models: trace, inspect, measure, plan, apply, verify."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import rematplan as rp

sys.path.insert(0, str(Path(__file__).parent))
import published

pytestmark = pytest.mark.real

CASES = {  # layers, share of what the plain step needs, where the layers lie, other module paths that save something
    "mamba": (2, 0.7, "backbone/layers/", {"backbone/layers/1/mixer/norm", "backbone/embedder"}),
    "gcn": (4, 0.86, "convs/", {"norms/1", "dropout"}),
}
TOLERANCE = 1e-5  # float32, relative to the largest entry


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request):
    count, share, layers, modules = CASES[request.param]
    work = getattr(published, request.param)(layers=count)
    plain = rp.measure(work, target="cpu")
    budget = int(share * plain.required_bytes)
    modules = modules | {f"{layers}{i}" for i in range(count)}
    return work, modules, budget, rp.plan(work, budget=budget, target="cpu")


def test_residuals_have_modules_and_lines(case):
    work, modules, _, _ = case
    found = rp.inspect(work)
    assert modules <= {residual.module for residual in found.residuals}
    assert found.total_bytes == sum(residual.bytes for residual in found.residuals)
    assert all(".py:" in residual.location for residual in found.residuals)


def test_the_plan_fits_and_was_measured(case):
    work, _, budget, plan = case
    assert plan.status == "fits"
    assert plan.measurement.required_bytes <= budget
    again = rp.measure(work, target="cpu", plan=plan)
    assert again.required_bytes == plan.measurement.required_bytes


def test_the_planned_function_computes_the_same(case, tmp_path):
    work, _, _, plan = case
    plan.save(tmp_path / "plan.json")
    results = []
    for loss in (work.loss_fn, rp.remat(work.loss_fn, plan=tmp_path / "plan.json")):
        (model, *inputs), _ = work.materialize(seed=5)
        value, gradients = nnx.jit(nnx.value_and_grad(loss))(model, *inputs)
        results.append((value, gradients, nnx.state(model, nnx.Not(nnx.Param))))
    plain, planned = (jax.tree.leaves(jax.tree.map(_numbers, result)) for result in results)
    assert len(plain) == len(planned) > 10
    for expected, found in zip(plain, planned, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(np.abs(expected).max(), 1e-30))


def test_it_verifies(case):
    work, _, _, plan = case
    found = rp.verify(work, plan=plan)
    assert found.structure_equal
    assert found.saved_as_planned
    assert found.state_equal
    assert found.passed


def _numbers(leaf):
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
