"""Whole train steps: the planned loss inside them computes the same, and what is measured is the step that the user runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rematplan as rp
from rematplan._plan import Plan
from rematplan.errors import InputError
from rematplan.target.measurement import Measurement
from tests.nnx.train_steps import (
    CASES,
    RNGS,
    STEPS,
    B,
    F,
    Model,
    accumulating_loop,
    adam,
    batch,
    clipped,
    compiled,
    every_second_step,
    loss_fn,
    memory,
    not_donating,
    per_block,
    several_batches,
    with_optimizer,
)


def assert_same_memory(measured: Measurement, own: dict[str, int]) -> None:
    """What was measured is what the compiler says of the step as the user's script compiles it."""
    assert (measured.argument_bytes, measured.output_bytes, measured.alias_bytes) == (
        own["argument"],
        own["output"],
        own["alias"],
    )
    # the order of outputs moves a buffer or two of these small programs
    assert measured.temporary_bytes == pytest.approx(own["temp"], rel=0.04)
    assert measured.required_bytes == own["argument"] + own["output"] + measured.temporary_bytes - own["alias"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_planned_loss_in_the_users_step(case):
    work = rp.Workload(case.loss_fn, *case.arguments, step=case.make_step)
    plan = per_block(work)
    planned = rp.remat(case.loss_fn, plan=plan)

    logged, state, plain = case.train(case.loss_fn)
    *found, own = case.train(planned)
    before = [np.asarray(a) for a in case.arrays_before()]
    assert len(logged) >= STEPS
    assert sum(not np.array_equal(a, b) for a, b in zip(state, before, strict=True)) >= 16  # it did train
    assert all(np.isfinite(a).all() for a in state)
    if case.scale is not None:  # the second step overflows and changes nothing but the scale
        assert not all(np.isfinite(a).all() for a in logged)
        assert any(a.shape == () and float(a) == case.scale for a in state)
    for ours, theirs in ((found[0], logged), (found[1], state)):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)

    assert_same_memory(rp.measure(work, target="cpu", plan=plan), own)
    if not getattr(
        jax.config, "jax_remat3", False
    ):  # with it XLA:CPU keeps as much in the loop of nnx.scan (jax 0.10.2)
        assert own["temp"] < 0.95 * plain["temp"]
    assert {**own, "temp": 0} == {**plain, "temp": 0}


def test_what_the_users_jit_does_not_donate_is_there_twice():
    arguments = (*with_optimizer(adam())(), batch(0))
    leaves = len(jax.tree.leaves(nnx.state(arguments[:2])))
    assert rp.Workload(loss_fn, *arguments, step=accumulating_loop).step().donated == tuple(range(leaves))
    work = rp.Workload(loss_fn, *arguments, step=not_donating)
    assert work.step().donated == ()
    found = rp.measure(work, target="cpu")
    assert found.alias_bytes == 0
    assert found.output_bytes > 0.99 * (found.argument_bytes - arguments[-1].nbytes)

    def bare(loss_fn):  # not jitted: whoever does it donates what the step replaces
        def step(model, optimizer, x):
            value, gradients = nnx.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, gradients)
            return value

        return step

    step = rp.Workload(loss_fn, *arguments, step=bare).step()
    assert set(step.donated) == {o.source for o in step.outputs() if o.source is not None}


@pytest.mark.parametrize("make", [clipped, every_second_step, adam])
def test_optimizers_of_many_parts_are_counted_once(make):
    work = rp.Workload(
        loss_fn, nnx.eval_shape(lambda: Model(RNGS(0))), jax.ShapeDtypeStruct((B, F), jnp.float32), optimizer=make()
    )
    model, optimizer = with_optimizer(make())()
    sizes = {id(x): x.nbytes for x in jax.tree.leaves((nnx.state(model, nnx.Not(nnx.RngKey)), nnx.state(optimizer)))}
    keys = 8 * len(jax.tree.leaves(nnx.state(model, nnx.RngKey)))
    found = rp.measure(work, target="cpu")
    assert found.argument_bytes == sum(sizes.values()) + keys + 4 * B * F
    assert found.alias_bytes == sum(sizes.values())


def test_of_several_calls_the_largest_is_planned():
    arguments = lambda first, second: (*with_optimizer(adam())(), batch(0, first), batch(1, second))
    for sizes in ((64, 32), (32, 64)):
        work = rp.Workload(loss_fn, *arguments(*sizes), step=several_batches)
        assert work.lift().leaves[-1].shape == (64, F)
    # a hand-written configuration reaches both calls
    plain, recomputing = (rp.measure(work, target="cpu", policy=policy).flops for policy in ("plain", "per-block"))
    forward = 2 * 2 * 2 * F * 4 * F  # an example, two blocks of two products
    assert recomputing - plain > 0.4 * forward * (64 + 32)


class Deeper(Model):
    def __call__(self, x):
        return super().__call__(super().__call__(x))


def of_both(loss_fn, other_fn=None):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, other, x):
        other_loss = other_fn or loss_fn
        return [nnx.value_and_grad(f)(m, x) for f, m in ((loss_fn, model), (other_loss, other))]

    return step


def test_a_loss_called_for_two_models_is_explained():
    work = rp.Workload(loss_fn, Model(RNGS(0)), Deeper(RNGS(1)), batch(0), step=of_both)
    assert rp.measure(work, target="cpu").required_bytes > 0  # as written it runs
    with pytest.raises(InputError, match=r"calls its loss with .*Plan one call at a time"):
        rp.measure(work, target="cpu", policy="per-block")


def test_two_losses_are_planned_one_after_the_other():
    """As for a generator and a discriminator: the second is planned in a step that has the first plan."""
    arguments = Model(RNGS(0)), Deeper(RNGS(1)), batch(0)
    other_loss = lambda model, x: jnp.abs(model(x)).mean()
    work = rp.Workload(loss_fn, *arguments, step=lambda f: of_both(f, other_loss))
    first = rp.remat(loss_fn, plan=per_block(work))
    swapped = lambda f: lambda model, other, x: of_both(first, f)(model, other, x)
    second_work = rp.Workload(other_loss, *arguments, step=swapped)
    second = per_block(rp.Workload(other_loss, arguments[1], batch(0)))
    found = [
        rp.measure(work, target="cpu"),
        rp.measure(second_work, target="cpu"),
        rp.measure(second_work, target="cpu", plan=second),
    ]
    assert found[0].flops < found[1].flops < found[2].flops
    assert_same_memory(found[2], memory(compiled(of_both(first, rp.remat(other_loss, plan=second)), arguments)))


def _plans(work: rp.Workload, share: float) -> tuple[Plan, int]:
    plain = rp.measure(work, target="cpu")
    budget = int(plain.required_bytes - (1 - share) * plain.temporary_bytes)
    return rp.plan(work, budget=budget, target="cpu", finalists=1), budget


@pytest.mark.slow
def test_the_budget_is_for_the_users_step():
    case = next(case for case in CASES if case.name == "accumulation in lax.scan")
    work = rp.Workload(case.loss_fn, *case.arguments, step=case.make_step)
    plan, budget = _plans(work, 0.85)
    assert plan.regions
    assert plan.measurement.required_bytes <= budget
    step = case.make_step(rp.remat(case.loss_fn, plan=plan))
    assert_same_memory(plan.measurement, memory(compiled(step, case.arguments)))
    assert rp.verify(work, plan=plan).passed


def test_verify_of_a_step():
    work = rp.Workload(loss_fn, *with_optimizer(adam())(), batch(0), step=accumulating_loop)
    found = rp.verify(work, plan=per_block(work))
    assert found.passed
    assert found.gradients_max_error < 1e-6
    wrong = optax.sgd(1e-2)  # another optimizer changes nothing: a plan is of the loss
    assert rp.verify(rp.Workload(loss_fn, Model(RNGS(0)), batch(0), optimizer=wrong), plan=per_block(work)).passed
