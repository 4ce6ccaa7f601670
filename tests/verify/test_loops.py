"""Loops in parts and chunks compute what the loop computes, and cost no copy of what is stacked."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rematplan as rp
from rematplan import apply
from rematplan._plan import Plan, PlanMismatch
from rematplan._remat import PlanMismatchWarning
from rematplan.errors import InputError
from rematplan.naming import describe, resolve
from rematplan.program import evaluate, recomputed
from rematplan.program.configuration import Configuration, LoopPart, LoopPlan, Region
from rematplan.program.residuals import with_residuals
from rematplan.program.trace import Traced, trace
from rematplan.target import compiler
from rematplan.target.target import resolve as target_named
from tests.verify import programs

LENGTH, SIZE = 7, 4


def layers(x, w, b):
    """Carries, slices and constants of several types; stacked results that are read."""
    keys = jax.random.split(jax.random.key(3), LENGTH)

    def body(carry, slices):
        h, count = carry
        w, b, key, number = slices
        keep = jax.random.bernoulli(key, 0.7, h.shape)
        y = jnp.tanh(h @ w + b) * jnp.where(keep, 1.0, 0.5)
        return (y + h * 0.1, count + number), (y.sum(axis=0), number)

    (h, count), (sums, numbers) = lax.scan(body, (x, jnp.int32(0)), (w, b, keys, jnp.arange(LENGTH)))
    return [(h**2).mean() + (sums * jnp.arange(1.0, LENGTH + 1)[:, None]).mean(), h, sums, count, numbers]


def backwards(x, w, b):
    h, ys = lax.scan(lambda h, s: (jnp.sin(h @ s[0]) + s[1], h.mean()), x, (w, b), reverse=True)
    return [(h**2).mean() + (ys * jnp.arange(1.0, LENGTH + 1)).sum(), ys]


def nested(x, w, b):
    """A loop in the body of a loop; the inner one reads a constant that has a gradient."""

    def body(h, s):
        inner = lax.scan(lambda g, _: (jnp.tanh(g @ s[0] + b[0]), None), h, None, length=3)[0]
        return inner + s[1], None

    return [(lax.scan(body, x, (w, b))[0] ** 2).mean()]


PROGRAMS = {"layers": layers, "backwards": backwards, "nested": nested}


def arrays():
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(3, SIZE)), rng.normal(size=(LENGTH, SIZE, SIZE)), rng.normal(size=(LENGTH, SIZE))
    return tuple(jnp.asarray(a * 0.5, jnp.float32) for a in (x, w, b))


def traced_program(name: str) -> Traced:
    return with_residuals(trace(PROGRAMS[name], arrays(), differentiated=[0, 1, 2]))


def in_body(body: Traced, share: float, seed: int) -> Configuration:
    """One region around the body that saves some of its values."""
    rng = random.Random(seed)
    values = [v for op in body.graph.operations for v in op.outputs]
    savable = [v for v in values if body.graph.values[v].bytes and "key" not in body.graph.values[v].dtype]
    saved = frozenset(v for v in savable if rng.random() < share)
    return Configuration((Region(0, len(body.equations), saved, prevent_cse=False),))


def configured(traced: Traced, *parts: tuple[int | None, int, float]) -> Configuration:
    """A configuration of the program's only loop: (iterations, chunk, share of values saved) for each part."""
    ((loop, body),) = traced.bodies.items()
    plan = LoopPlan(
        tuple(LoopPart(in_body(body, share, i), count, chunk) for i, (count, chunk, share) in enumerate(parts))
    )
    return Configuration(loops=((loop, plan),))


PARTS = {
    "two": ((3, 0, 1.0), (None, 0, 0.0)),
    "three": ((1, 0, 0.0), (4, 0, 0.5), (2, 0, 1.0)),
    "chunks": ((None, 2, 1.0),),
    "chunks that divide": ((None, 7, 0.3),),
    "chunks of one": ((None, 1, 0.0),),
    "chunks and the rest": ((5, 2, 0.5), (None, 0, 1.0)),
}


def values_and_gradients(function):
    def loss(*given):
        first, *rest = function(*given)
        return first, rest

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays())


def assert_same(got, wanted):
    """Up to the order of sums: two roundings of an array's largest element; how XLA adds up differs between processors."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        largest = float(np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=max(2e-7, 2 * np.finfo(np.float32).eps * largest))


@pytest.mark.parametrize(
    "parts", [pytest.param(p, id=n, marks=programs.NESTED if "chunks" in n else ()) for n, p in PARTS.items()]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_values_and_gradients(name, parts):
    traced = traced_program(name)
    function = apply.configured(traced, configured(traced, *parts))
    assert_same(values_and_gradients(function), values_and_gradients(evaluate.plain(traced)))


@programs.NESTED
def test_under_vmap_and_second_reverse_derivatives():
    traced = traced_program("backwards")
    function = apply.configured(traced, configured(traced, *PARTS["chunks and the rest"]))
    x, w, b = arrays()

    def batched(f):
        return jax.vmap(jax.grad(lambda w: f(x, w, b)[0]))(jnp.stack([w, 2 * w]))

    def second(f):
        return jax.grad(lambda w: (jax.grad(lambda w: f(x, w, b)[0])(w) ** 2).sum())(w)

    for transformed in (batched, second):
        assert_same(transformed(function), transformed(evaluate.plain(traced)))


def test_loops_inside_regions():
    traced = traced_program("layers")
    loops = configured(traced, *PARTS["two"])
    outer = dataclasses.replace(loops, regions=(Region(0, len(traced.equations)),))
    function = apply.configured(traced, outer)
    assert_same(values_and_gradients(function), values_and_gradients(evaluate.plain(traced)))


def test_what_is_saved_in_a_part_is_not_run_again():
    traced = traced_program("backwards")
    ((_, body),) = traced.bodies.items()
    everything = configured(traced, (2, 0, 1.0), (None, 3, 1.0))
    assert recomputed.saved_as_planned(traced, everything) == ()
    variants = list(recomputed.one_loop_each(everything))
    assert len(variants) == 1 and not recomputed.recomputed(traced, variants[0])  # both parts save the same
    assert len(list(recomputed.one_loop_each(configured(traced, (2, 0, 1.0), (None, 0, 0.0))))) == 2
    assert body.graph.operations


def test_plans_say_parts_by_name():
    traced = traced_program("layers")
    configuration = configured(traced, *PARTS["chunks and the rest"])
    bodies = {i: b.graph for i, b in traced.bodies.items()}
    regions, loops = describe(configuration, traced.graph, bodies)
    assert [(p.iterations, p.chunk) for p in loops] == [(5, 2), (None, 0)]
    plan = Plan.load(Plan(regions=regions, loops=loops, fingerprint=traced.graph.fingerprint).to_json())
    assert resolve(plan, traced.graph, bodies) == configuration


@pytest.mark.parametrize(
    "parts",
    [((3, 0, 1.0), (2, 0, 0.0)), ((3, 0, 1.0), (5, 0, 0.0)), ((None, 0, 0.0), (1, 0, 0.0)), ((3, 0, 0.5),)],
    ids=["few", "many", "after", "one"],
)
def test_parts_that_are_not_the_whole_loop_are_refused_before_anything_runs(parts):
    traced = traced_program("layers")
    with pytest.raises(PlanMismatch, match="iterations"):
        apply.configured(traced, configured(traced, *parts))


def test_a_plan_for_a_loop_of_another_length_is_a_mismatch_like_any_other():
    """The number of iterations is no part of a program's fingerprint."""

    def loss(x, w):
        return (lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2).sum()

    x, w, _ = arrays()
    traced = with_residuals(trace(lambda x, w: [loss(x, w)], (x, w), differentiated=[0, 1]))
    bodies = {i: b.graph for i, b in traced.bodies.items()}
    regions, loops = describe(configured(traced, *PARTS["two"]), traced.graph, bodies)
    plan = Plan(regions=regions, loops=loops, fingerprint=traced.graph.fingerprint)
    with pytest.raises(PlanMismatch, match="of the 2 iterations"):
        rp.remat(loss, plan=plan)(x, w[:2])
    with pytest.warns(PlanMismatchWarning, match="runs without the plan"):
        got = rp.remat(loss, plan=plan, on_mismatch="plain")(x, w[:2])
    assert_same(got, loss(x, w[:2]))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(((None, 0, 0.5),), id="one"),
        pytest.param(PARTS["two"], id="two"),
        pytest.param(PARTS["chunks"], id="chunks", marks=programs.NESTED),
    ],
)
def test_weak_types_stay_weak(parts):
    """A scalar that was weak must not widen what it is multiplied with in the next step of a training."""

    def loss(x, w, s, b):
        def body(h, w):
            return jnp.tanh(h @ w * s + b), None

        return (lax.scan(body, x, w)[0].astype(jnp.float32) ** 2).mean()

    x, w = (a.astype(jnp.bfloat16) for a in arrays()[:2])
    given = x, w, jnp.asarray(1.0), jnp.full(SIZE, 0.1)
    assert [a.weak_type for a in given] == [False, False, True, True]
    traced = with_residuals(trace(lambda *g: [loss(*g)], given, differentiated=[0, 1, 2, 3]))
    planned = apply.configured(traced, configured(traced, *parts))
    gradients = jax.grad(lambda *g: planned(*g)[0], argnums=(0, 1, 2, 3))(*given)
    wanted = jax.grad(loss, argnums=(0, 1, 2, 3))(*given)
    assert [(g.dtype, g.weak_type) for g in gradients] == [(g.dtype, g.weak_type) for g in wanted]


def test_chunks_are_refused_where_remat_does_not_honour_them(monkeypatch):
    traced = traced_program("layers")
    monkeypatch.setattr("rematplan._jax_private.new_remat", lambda: True)
    with pytest.raises(InputError, match="regions inside regions"):
        apply.configured(traced, configured(traced, *PARTS["chunks"]))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "gpu-h100"])
@pytest.mark.parametrize(
    "parts", [pytest.param(PARTS["two"], id="two"), pytest.param(PARTS["chunks"], id="chunks", marks=programs.NESTED)]
)
def test_no_copy_of_stacked_inputs(target, parts):
    """Large layers, small activations: a copy of a part of the stack, or of its gradient, would be seen."""
    width = 512
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, width), (LENGTH, width, width), (LENGTH, width))]
    traced = with_residuals(trace(backwards, shapes, differentiated=[0, 1, 2]))

    def temporary(function):
        program = compiler.lower(
            jax.value_and_grad(lambda *a: function(*a)[0], argnums=(0, 1, 2)), shapes, target=target_named(target)
        )
        return compiler.measure(program, target=target_named(target)).temporary_bytes

    layer = width * width * 4
    split = temporary(apply.configured(traced, configured(traced, *parts)))
    assert split < temporary(evaluate.plain(traced)) + 2 * layer
