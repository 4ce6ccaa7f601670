"""`verify` on built-in models and on programs that are wrong on purpose; sizes at which numbers are computed."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan import agreement, apply, policies, shrink
from rematplan._plan import Plan
from rematplan.errors import InputError, PlanMismatch
from rematplan.lift import lift
from rematplan.naming import describe
from rematplan.program import evaluate
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss
from rematplan.scopes import module_scope
from tests.inspect.models import small, tanh_model

CHEAP_TO_SAVE = {"exp", "tanh", "reduce_max", "rsqrt", "dot_general", "logistic"}


def as_plan(work: rp.Workload, configuration: Configuration) -> Plan:
    traced = traced_loss(work)
    regions, loops = describe(configuration, traced.graph, {i: b.graph for i, b in traced.bodies.items()})
    return Plan(regions, loops, fingerprint=traced.graph.fingerprint, name=work.name)


def saving_plan(work: rp.Workload) -> Plan:
    """Per-block regions that save values, those among them that their own derivative reads."""
    traced = traced_loss(work)

    def saved(graph, region):
        operations = graph.operations[region.start : region.stop]
        return frozenset(v for op in operations if op.primitive in CHEAP_TO_SAVE for v in op.outputs)

    base = policies.by_name(traced.graph, "per-block").configuration
    regions = tuple(dataclasses.replace(r, saved=saved(traced.graph, r)) for r in base.regions)
    base = base.with_bodies(
        lambda index, body: Configuration(
            tuple(dataclasses.replace(r, saved=saved(traced.bodies[index].graph, r)) for r in body.regions)
        )
    )
    return as_plan(work, dataclasses.replace(base, regions=regions))


@pytest.mark.parametrize("name", ["gpt", "scan_gpt", "vit"])
def test_a_plan_is_proved(name):
    work = small(name)
    record = rp.verify(work, plan=saving_plan(work))
    assert record.differences == ()
    assert record.passed
    assert record.structure_equal
    assert record.saved_as_planned
    assert record.state_equal
    assert record.size == "full"
    # rounding is that of the program, wherever it is fused: the numbers are the same ones
    assert record.outputs_max_error == 0.0
    assert record.gradients_max_error == pytest.approx(0.0, abs=1e-6)
    assert record.tolerances == {"bfloat16": 2e-2}
    assert json.loads(json.dumps(record.to_json()))["passed"] is True


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_structure_and_recomputation_without_numbers(name):
    work = small(name)
    record = rp.verify(work, plan=saving_plan(work), scale="none")
    assert record.passed
    assert (record.outputs_max_error, record.gradients_max_error) == (None, None)
    assert record.size.startswith("no numbers")


class Counting(nnx.Module):
    """Batch statistics, dropout and a counter: state of every kind."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.norm(self.first(x))))


def counting() -> rp.Workload:
    return rp.Workload(
        lambda m, x: (m(x) ** 2).mean(),
        nnx.eval_shape(lambda: Counting(nnx.Rngs(0))),
        jax.ShapeDtypeStruct((8, 4), jnp.float32),
    )


def whole(work: rp.Workload) -> Plan:
    return as_plan(work, policies.by_name(traced_loss(work).graph, "whole").configuration)


def test_state_and_dropout_masks_are_the_same():
    work = counting()
    record = rp.verify(work, plan=whole(work))
    assert record.passed
    assert record.state_equal
    assert record.tolerances == {"float32": 1e-5}


def changed(kind):
    """`apply.planned` with a fault."""
    right = apply.planned

    def wrong(lifted, plan):
        function = right(lifted, plan)

        def faulty(*leaves):
            outputs = list(function(*leaves))
            if kind == "output":
                outputs[0] = outputs[0] * 1.001
            elif kind == "state":
                outputs[1:] = [o * 1.001 if jnp.issubdtype(o.dtype, jnp.inexact) else o + 1 for o in outputs[1:]]
            return outputs

        @jax.custom_jvp
        def halved(x):
            return x

        halved.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 0.5))
        if kind == "gradient":
            return lambda *leaves: function(
                *[halved(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves]
            )
        return faulty

    return wrong


@pytest.mark.parametrize("kind", ["output", "state", "gradient"])
def test_a_fault_is_found(kind, monkeypatch):
    work = counting()
    plan = whole(work)
    monkeypatch.setattr(apply, "planned", changed(kind))
    record = rp.verify(work, plan=plan)
    assert not record.passed
    wrong = {
        "output": record.outputs_max_error > 5e-4,
        "state": not record.state_equal,
        "gradient": record.gradients_max_error > 0.1,
    }
    assert [name for name, found in wrong.items() if found] in ([kind], [kind, "gradient"])
    assert any(text.startswith("numbers: ") for text in record.differences)
    # a custom rule that hands its operand on is not seen in the structure: numbers are
    assert record.structure_equal == (kind == "gradient")


def test_what_is_saved_in_name_only_is_found(monkeypatch):
    work = tanh_model()
    graph = traced_loss(work).graph
    tanh = frozenset(op.outputs[0] for op in graph.operations if op.primitive == "tanh")
    plan = as_plan(work, Configuration((Region(0, len(graph.operations), tanh),)))
    assert rp.verify(work, plan=plan, scale="none").passed
    monkeypatch.setattr(apply, "named_in_derivative", outside)
    record = rp.verify(work, plan=plan, scale="none")
    assert not record.saved_as_planned
    assert not record.passed
    assert any("layers/0/tanh" in text and "saved yet recomputed" in text for text in record.differences)


def outside(equation, named):
    kept = [o for o in equation.outputs if o >= 0]

    def function(*inputs):
        results = evaluate.as_function(equation)(*inputs)
        return [apply.checkpoint_name(x, named[o]) for o, x in zip(kept, results, strict=True)]

    return function


def test_input_that_will_not_do(tmp_path):
    work = tanh_model()
    with pytest.raises(InputError, match="unknown scale 'tiny'"):
        rp.verify(work, plan=whole(work), scale="tiny")
    with pytest.raises(PlanMismatch, match="another function"):
        rp.verify(tanh_model(layers=2), plan=whole(work))
    with pytest.raises(InputError, match="cannot be read"):
        rp.verify(work, plan=tmp_path / "none.json")


def test_the_batch_shrinks_until_it_takes_seconds(monkeypatch):
    work = tanh_model()
    plan = whole(work)
    traced = traced_loss(work)
    flops = shrink.PASSES * sum(op.flops for op in traced.graph.operations)
    monkeypatch.setattr(shrink, "WANTED_FLOPS", flops / 3)
    monkeypatch.setattr(shrink, "MOST_FLOPS", flops)
    record = rp.verify(work, plan=plan)
    assert record.size == "batch reduced from 8 to 2"  # the largest divisor of 8 below a third
    assert record.passed
    assert record.gradients_max_error is not None
    assert rp.verify(work, plan=plan, scale="full").size == "full"
    monkeypatch.setattr(shrink, "MOST_FLOPS", flops / 1000)
    record = rp.verify(work, plan=plan)
    assert record.size.startswith("no numbers: both programs take")
    assert record.outputs_max_error is None
    assert record.passed


def test_a_loss_that_refuses_another_batch(monkeypatch):
    work = rp.Workload(
        lambda w, x: jnp.tanh(x.reshape(2, 4, 4) @ w).sum(), jnp.ones((4, 4)), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    )
    traced = traced_loss(work)
    monkeypatch.setattr(shrink, "WANTED_FLOPS", 1.0)
    size = shrink.fitting(work, traced)
    assert size.lifted is None
    assert "does not take a batch of 2" in size.text
    # the workload is as it was
    assert [leaf.shape for leaf in work.lift(scopes=True).leaves] == [(4, 4), (8, 4)]


def test_arguments_that_share_the_leading_size_shrink_together():
    def loss(model, x, labels, table):
        return ((model(x) - table[labels]) ** 2).mean()

    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((8, 4), "float32"), ((8,), "int32"), ((3, 4), "float32"))]
    work = rp.Workload(loss, nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))), *shapes)
    lifted = work.lift(scopes=True)
    positions, batch = shrink.batch_leaves(lifted, work.differentiated)
    assert batch == 8
    assert [lifted.info[i].path for i in positions] == ["x", "labels"]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float32", "int32"], ("float32", 1e-5)),
        (["float32", "bfloat16", "key<fry>"], ("bfloat16", 2e-2)),
        (["complex64"], ("float32", 1e-5)),
        (["int32"], ("float32", 1e-5)),
    ],
)
def test_the_narrowest_type_sets_the_tolerance(dtypes, expected):
    assert agreement.tolerance_of(dtypes) == expected


def test_errors_are_relative_to_the_largest_magnitude():
    one = np.array([100.0, 1.0])
    assert agreement._error(one, np.array([100.0, 1.5]), floor=0.0) == pytest.approx(0.005)
    # an array of rounding noise is held against its kind's largest
    assert agreement._error(np.array([1e-9]), np.array([-1e-9]), floor=1e-2) == pytest.approx(2e-7)
    assert agreement._error(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), floor=0.0) == 0.0
    assert agreement._error(np.array([np.nan, 1.0]), np.array([0.0, 1.0]), floor=0.0) == np.inf
    assert agreement._error(np.array([1]), np.array([2]), floor=0.0) == np.inf


def test_the_loss_inside_the_users_own_step():
    def make_step(loss):
        def step(model, x):
            gradients = [nnx.grad(loss)(model, part) for part in jnp.split(x, 2)]
            return jax.tree.map(jnp.add, *gradients)

        return step

    base = tanh_model()
    work = rp.Workload(base.loss_fn, *base.args, step=make_step)
    assert [leaf.shape for leaf in work.lift(scopes=True).leaves][-1] == (4, 4)  # a microbatch of 8 / 2
    record = rp.verify(work, plan=whole(work))
    assert record.passed
    assert record.size == "full"
    assert record.gradients_max_error == pytest.approx(0.0, abs=1e-6)


def test_a_region_in_the_body_of_a_loop_is_proved():
    """Under JAX's new remat XLA:CPU ended the process (jaxlib 0.10.2)."""

    def loss(w, x):
        with jax.named_scope(module_scope("layers/0")):
            return jnp.square(jax.lax.scan(lambda h, row: (jnp.exp(h @ row), None), x, w)[0]).sum()

    work = rp.Workload(loss, jnp.full((4, 4, 4), 0.1), jnp.ones((2, 4)))
    traced = traced_loss(work)
    plan = as_plan(work, policies.by_name(traced.graph, "per-block").configuration)
    assert plan.loops
    assert rp.verify(work, plan=plan).passed


def small_beside_large(b_gradient):
    """A loss whose gradient for `b` is a thousandth of the largest, or what `b_gradient` makes of it."""

    @jax.custom_vjp
    def passed_on(b):
        return b

    passed_on.defvjp(lambda b: (b, None), lambda _, g: (b_gradient(g),))

    def loss(parameters, x):
        w, b = parameters
        return (x @ w).sum() + 1e-3 * passed_on(b).sum()

    return loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [jnp.zeros_like, jnp.negative, lambda g: 1.5 * g], ids=["stopped", "sign", "scaled"])
def test_a_wrong_gradient_that_is_small_beside_others_is_found(dtype, wrong):
    parameters = (jnp.ones((64, 8), dtype), jnp.ones((8,), dtype))
    x = jnp.ones((16, 64), dtype)
    right = lift(small_beside_large(lambda g: g), (parameters, x), {})
    planned = lift(small_beside_large(wrong), (parameters, x), {})
    _, tolerance = agreement.tolerance_of([dtype])
    compared = partial(agreement.compare, right, differentiated=(0, 1), tolerance=tolerance, dtype=dtype)
    assert not compared(right.pure).differences
    found = compared(planned.pure)
    assert [text.partition(" differs")[0] for text in found.differences] == ["gradient parameters/1"]
    assert found.gradients_max_error > tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_rounding_noise_may_differ(dtype):
    """Of a bias before a normalization the gradient is zero but for rounding; another order of a sum changes all of it."""

    def loss(order):
        def function(parameters, x):
            w, b = parameters
            y = (x @ w)[order] + b
            y = y - y.mean(axis=0)
            weights = jnp.sin(jnp.arange(y.size).reshape(y.shape))[order].astype(y.dtype)
            return (y**2 * weights).sum()

        return function

    key = jax.random.key(0)
    parameters = (jax.random.normal(key, (64, 8), dtype), jnp.ones((8,), dtype))
    x = 8 * jax.random.normal(key, (32, 64), dtype)
    losses = loss(jnp.arange(32)), loss(jnp.arange(32)[::-1])
    one, two = (lift(each, (parameters, x), {}) for each in losses)
    gradients = [jax.jit(jax.grad(each))(parameters, x)[1].astype(jnp.float32) for each in losses]
    assert jnp.abs(gradients[0] - gradients[1]).max() > 0.1 * jnp.abs(gradients[0]).max()
    _, tolerance = agreement.tolerance_of([dtype])
    found = agreement.compare(one, two.pure, (0, 1), tolerance=tolerance, dtype=dtype)
    assert not [text for text in found.differences if "parameters/1" in text]
