"""Policies as values: what `rp.plan` measures of a hand-written configuration keeps what JAX keeps under its policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import _inspect, _jax_private
from rematplan._compare import compare
from rematplan._plan import Plan
from rematplan.errors import InputError, PlanMismatch
from rematplan.naming import describe, resolve
from rematplan.planner.baselines import baselines
from rematplan.program.configuration import POLICIES, Configuration, Region
from rematplan.program.loss import traced_loss
from rematplan.program.saved import Origin
from rematplan.program.saving import as_planned, honoured
from rematplan.search.candidates import hand_written
from rematplan.search.problem import Problem
from rematplan.target.target import resolve as target_named
from rematplan.workloads import gpt, scan_gpt

SIZES = {"blocks": 2, "features": 32, "heads": 2, "length": 16, "batch": 2, "vocabulary": 64}
LAYERS = 4


def scanned(w, x):
    return jax.lax.scan(lambda h, row: (jnp.exp(h @ row), None), x, w)[0]


@jax.custom_vjp
def product(x, w):
    return jnp.tanh(x @ w)


def product_forward(x, w):
    y = x @ w
    return jnp.tanh(y), (x, w, y)


def product_backward(kept, g):
    x, w, y = kept
    slope = g * (1 - jnp.tanh(y) ** 2)
    return slope @ w.T, x.T @ slope


product.defvjp(product_forward, product_backward)


@jax.custom_jvp
def only_in_the_rule(x, w):
    return jnp.tanh(x) * w.sum()


@only_in_the_rule.defjvp
def only_in_the_rule_derivative(primals, tangents):
    x, w = primals
    y = x @ w
    return only_in_the_rule(x, w), jnp.sin(y) * (tangents[0] + tangents[1].sum())


def custom_vjp(w, x):
    return jnp.sin(product(x, w[0])) @ w[1]


def custom_vjp_whose_product_another_reads(w, x):
    @jax.custom_vjp
    def linear(x, w):
        return x @ w

    linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    return jnp.sin(linear(x, w[0]))


def custom_jvp(w, x):
    return jnp.sin(only_in_the_rule(x, w[0])) @ w[1]


def own_region(w, x):
    return jnp.sin(jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w[0]) @ w[1]))(w, x))


def branches(w, x):
    return jnp.sin(jax.lax.cond(x[0, 0] > 0, lambda w, x: jnp.tanh(x @ w[0]), lambda w, x: jnp.sin(x @ w[1]), w, x))


def loop_of_custom_rules(w, x):
    return jax.lax.scan(lambda h, row: (jnp.sin(product(h, row)), None), x, w)[0]


def flat(w, x):
    return jax.nn.relu(jnp.sin(x @ w[0]) @ w[1])


def workload(function, dtype=jnp.float32) -> rp.Workload:
    def loss(w, x):
        with jax.named_scope("~layers/0~"):
            return jnp.square(function(w, x)).sum().real.astype(jnp.float32)

    return rp.Workload(loss, jnp.ones((LAYERS, 4, 4)), jnp.ones((2, 4), dtype))


NESTED = (
    scanned,
    custom_vjp,
    custom_vjp_whose_product_another_reads,
    custom_jvp,
    own_region,
    branches,
    loop_of_custom_rules,
)
MODELS = [pytest.param(workload(f), id=f.__name__) for f in (*NESTED, flat)]
MODELS += [pytest.param(gpt(**SIZES), id="gpt"), pytest.param(scan_gpt(**SIZES), id="scan_gpt")]


def problem_of(work: rp.Workload) -> Problem:
    return Problem(work, target_named("cpu"), progress=lambda _: None)


def kept(traced, configuration):
    """Shapes of what the backward pass holds besides arguments."""
    found = _inspect.residuals_of(traced, configuration)
    return sorted((s.shape, s.dtype) for s in found if s.origin is Origin.COMPUTED)


def policies_in(configuration: Configuration) -> set[str]:
    bodies = [body for _, loop in configuration.loops for body in loop.variants()]
    return {r.policy for c in (configuration, *bodies) for r in c.all_regions() if r.policy is not None}


@pytest.mark.parametrize("work", MODELS)
def test_every_hand_written_candidate_keeps_what_the_policy_keeps(work):
    problem = problem_of(work)
    written = {b.name: b.configuration for b in baselines(problem.graph)}
    candidates = {c.name: c.configuration for c in hand_written(problem)}
    assert candidates.keys() == written.keys()
    for name, candidate in candidates.items():
        assert kept(problem.traced, candidate) == kept(problem.traced, written[name]), name


@pytest.mark.parametrize("function", NESTED, ids=[f.__name__ for f in NESTED])
def test_what_a_policy_saves_inside_of_an_operation_is_not_lost(function):
    problem = problem_of(workload(function))
    candidates = {c.name: c.configuration for c in hand_written(problem)}
    if not _jax_private.new_remat():  # which asks about less
        assert kept(problem.traced, candidates["whole-dots"]) != kept(problem.traced, candidates["whole"])


def test_policies_become_values_where_those_say_it_all():
    for work in (workload(flat), gpt(**SIZES)):
        for candidate in hand_written(problem_of(work)):
            assert not policies_in(candidate.configuration), candidate.name


@pytest.mark.parametrize("function", NESTED, ids=[f.__name__ for f in NESTED])
def test_a_hand_written_candidate_survives_its_plan_and_its_file(function, tmp_path):
    problem = problem_of(workload(function))
    bodies = {i: body.graph for i, body in problem.traced.bodies.items()}
    assert any(policies_in(c.configuration) for c in hand_written(problem))
    for number, candidate in enumerate(hand_written(problem)):
        regions, loops = describe(candidate.configuration, problem.graph, bodies)
        plan = Plan(regions=regions, loops=loops, fingerprint=problem.graph.fingerprint)
        plan.save(tmp_path / f"{number}.json")
        assert resolve(Plan.load(tmp_path / f"{number}.json"), problem.graph, bodies) == candidate.configuration


def test_a_plan_is_as_good_as_a_policy_that_saves_inside_of_a_loop():
    def loss(w, x):
        with jax.named_scope("~layers/0~"):
            return jax.lax.scan(lambda h, row: (jnp.sin(jnp.cos(h @ row)), None), x, w)[0].sum()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 64, 64), (1024, 64))]
    work = rp.Workload(loss, *shapes)
    row = next(r for r in compare(work, target="cpu").rows if r.name == "whole-dots")
    plan = rp.plan(work, budget=row.measurement.required_bytes, target="cpu")
    assert plan.measured["required_bytes"] <= row.measurement.required_bytes
    assert plan.measured["seconds"] <= 1.01 * row.measurement.seconds
    found = next(each for each in plan.baselines if each["name"] == "whole-dots")
    assert found["flops"] == row.measurement.flops
    assert found["required_bytes"] == pytest.approx(row.measurement.required_bytes, rel=0.02)


def test_the_names_of_policies_are_those_of_jax():
    assert all(callable(getattr(jax.checkpoint_policies, name)) for name in POLICIES)


def region_with(traced, policy: str) -> Configuration:
    return Configuration((Region(0, len(traced.equations), policy=policy),))


def test_complex_numbers_are_left_out_where_values_say_the_rest():
    traced = traced_loss(workload(flat_complex, jnp.complex64))
    found = honoured(traced, region_with(traced, "dots_saveable"))
    assert not policies_in(found)
    saved = [traced.graph.values[v] for v in found.regions[0].saved]
    assert saved and not any(v.dtype.startswith("complex") for v in saved)
    assert kept(traced, found) == kept(traced, as_planned(traced, region_with(traced, "dots_saveable")))


def flat_complex(w, x):
    return (jnp.sin(x.real @ w[0]) + jnp.sin(x @ w[1].astype(x.dtype)).real) ** 2


def complex_beside_a_loop(w, x):
    return scanned(w, x.real) + jnp.sin(x @ w[1].astype(x.dtype)).real


def complex_in_a_loop(w, x):
    return jax.lax.scan(lambda h, row: (jnp.sin(h @ row.astype(h.dtype)), None), x, w)[0]


@pytest.mark.parametrize("function", [complex_beside_a_loop, complex_in_a_loop])
def test_complex_numbers_that_neither_names_nor_the_policy_could_leave_out_are_refused(function):
    work = workload(function, jnp.complex64)
    traced = traced_loss(work)
    for change in (honoured, as_planned):
        with pytest.raises(PlanMismatch, match="complex"):
            change(traced, region_with(traced, "dots_saveable"))
    problem = problem_of(work)
    names = {c.name for c in hand_written(problem)}
    assert names < {b.name for b in baselines(problem.graph)} and "whole" in names


def test_complex_numbers_elsewhere_change_no_policy():
    def apart(w, x):
        return jnp.sin(x @ w[1].astype(x.dtype)).real + scanned(w, x.real)

    traced = traced_loss(workload(apart, jnp.complex64))
    loop = next(op.index for op in traced.graph.operations if op.primitive == "scan")
    only = Configuration((Region(loop, loop + 1, policy="dots_saveable"),))
    assert honoured(traced, only) == as_planned(traced, only) == only


def test_what_the_new_remat_would_drop_becomes_values_or_is_refused(monkeypatch):
    monkeypatch.setattr(_jax_private, "new_remat", lambda: True)
    monkeypatch.setattr(_jax_private, "kept_by_new_remat", lambda policy: False)
    traced = traced_loss(workload(lambda w, x: jnp.sin(x @ w[0])))
    assert not policies_in(honoured(traced, region_with(traced, "dots_saveable")))
    nested = traced_loss(workload(scanned))
    with pytest.raises(InputError, match="scan has no name"):
        honoured(nested, region_with(nested, "dots_saveable"))
    followed = region_with(nested, "nothing_saveable")
    assert honoured(nested, followed) == Configuration((Region(0, len(nested.equations)),))
