"""Random NNX models under random plans: the same program, recomputed as planned, and for some the same numbers and state."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rematplan as rp
from rematplan import apply
from rematplan._plan import Plan
from rematplan.naming import describe
from rematplan.planner.menu import stretch
from rematplan.planner.price import Rates
from rematplan.program import recomputed, structure
from rematplan.program.configuration import Configuration
from rematplan.program.loss import traced_loss
from rematplan.program.trace import Traced
from tests.verify import nnx_programs, programs

# `make test-long` asks for more.
MANY = int(os.environ.get("REMATPLAN_TEST_PROGRAMS", "25"))
PLANS_OF_ONE_MODEL = 5
MODELS = max(MANY, 60)  # no numbers: only traced
RATES = Rates({"float32": 1e12}, 1e11)
seeds = st.integers(0, 1 << 30)
relaxed = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.slow
@settings(max_examples=MODELS, deadline=None, derandomize=True, suppress_health_check=relaxed)
@given(spec=nnx_programs.specs, seed=seeds)
def test_the_same_program_and_nothing_recomputed_but_what_the_plan_says(spec, seed):
    work = nnx_programs.workload(spec)
    traced = traced_loss(work)
    lifted = work.lift(scopes=True)
    original = jax.make_jaxpr(lifted.pure)(*lifted.leaves)
    rng = random.Random(seed)
    for _ in range(PLANS_OF_ONE_MODEL):
        configuration = programs.configuration(rng, traced)
        planned = jax.make_jaxpr(apply.configured(traced, configuration))(*lifted.leaves)
        assert structure.differences(original, planned) == ()
        assert recomputed.saved_as_planned(traced, configuration) == ()
        referee_agrees(traced, configuration)


def referee_agrees(traced: Traced, configuration: Configuration) -> None:
    """The planner's model of a region recomputes the operations that the derivative rules say; of one level of regions."""
    flat = Configuration(tuple(replace(region, inner=()) for region in configuration.regions))
    expected = {path[0] for path in recomputed.planned(traced, flat)}
    found = set()
    for region in flat.regions:
        problem = stretch(traced.graph, region.start, region.stop, rates=RATES)
        found.update(problem.recomputed(region.saved))
    assert found == expected


@pytest.mark.slow
@settings(max_examples=MANY, deadline=None, derandomize=True, suppress_health_check=relaxed)
@given(spec=nnx_programs.specs, seed=seeds)
def test_the_same_numbers_gradients_and_state(spec, seed):
    work = nnx_programs.workload(spec)
    traced = traced_loss(work)
    configuration = programs.configuration(random.Random(seed), traced)
    regions, loops = describe(configuration, traced.graph, {i: body.graph for i, body in traced.bodies.items()})
    plan = Plan(regions, loops, fingerprint=traced.graph.fingerprint)
    checked = rp.verify(work, plan=plan, scale="full")
    assert checked.passed, checked.differences
    assert checked.gradients_max_error is not None
    assert checked.state_equal
