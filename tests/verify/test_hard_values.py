"""Values that are hard to save or to differentiate: what no name can hold, what has no derivative, what rules work over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan._plan import Plan
from rematplan.errors import PlanMismatch
from rematplan.naming import describe
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss
from tests.verify.programs import REMAT3

W, X = jax.random.normal(jax.random.key(0), (4, 4)), jax.random.normal(jax.random.key(1), (8, 4))


def plan_saving(work: rp.Workload, *primitives: str) -> Plan:
    """The whole function in one region that saves the first results of operations of these kinds."""
    traced = traced_loss(work)
    values = [op.outputs[0] for op in traced.graph.operations if op.primitive in primitives]
    assert values
    regions, loops = describe(
        Configuration((Region(0, len(traced.equations), frozenset(values)),)),
        traced.graph,
        {i: body.graph for i, body in traced.bodies.items()},
    )
    return Plan(regions, loops, fingerprint=traced.graph.fingerprint)


def symmetric(w):
    return jnp.eye(4) * 9 + w @ w.T


FACTORIZATIONS = {
    # its rule clears the upper triangle, in which the operation itself leaves anything
    "cholesky": lambda w, x: (jnp.linalg.cholesky(symmetric(w)) * jnp.arange(4.0)).sum(),
    "qr": lambda w, x: (jnp.linalg.qr(symmetric(w))[1] * jnp.arange(4.0)).sum(),
    "eigh": lambda w, x: (jnp.linalg.eigh(symmetric(w))[0] * jnp.arange(4.0)).sum(),
    "lu": lambda w, x: (jax.lax.linalg.lu(symmetric(w))[0] * jnp.arange(4.0)).sum(),
    "triangular_solve": lambda w, x: jnp.linalg.solve(symmetric(w), x.T).sum(),
    "cumsum": lambda w, x: (jnp.cumsum(x @ w, axis=0) ** 2).sum(),
    "sort": lambda w, x: (jnp.sort(x @ w, axis=0) ** 2).sum(),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_gradients_of_saved_results(name):
    loss = FACTORIZATIONS[name]
    work = rp.Workload(loss, W, X)
    names = {op.primitive for op in traced_loss(work).graph.operations}
    saved = [n for n in names if n.startswith((name, "householder", "eigh", "lu", "geqrf", "dot_general"))]
    planned = rp.remat(loss, plan=plan_saving(work, *saved))
    np.testing.assert_allclose(jax.grad(planned)(W, X), jax.grad(loss)(W, X), rtol=1e-4, atol=1e-4)


def fixed_point(x):
    return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]


def test_the_result_of_a_while_loop_is_saved():
    def loss(w, x):
        return (jnp.tanh(x @ w) * fixed_point(x)).sum()

    work = rp.Workload(loss, W, X)
    if REMAT3:  # it differentiates everything in a region
        with pytest.raises(PlanMismatch, match="while"):
            rp.verify(work, plan=plan_saving(work, "while", "tanh"))
    else:
        assert rp.verify(work, plan=plan_saving(work, "while", "tanh")).passed


@pytest.mark.parametrize("kind", ["while", "callback"])
def test_what_has_no_derivative_behind_stop_gradient(kind):
    def loss(w, x):
        y = jnp.sin(x @ w)
        stopped = jax.lax.stop_gradient(y)
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        z = fixed_point(stopped) if kind == "while" else jax.pure_callback(lambda y: y, shape, stopped)
        return (y * z).sum()

    work = rp.Workload(loss, W, X)
    assert rp.inspect(work).total_bytes > 0
    if kind == "while" and not REMAT3:  # a region that holds the stop makes what is behind it differentiated there
        assert rp.verify(work, plan=plan_saving(work, "dot_general")).passed


class Complex(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.phase = nnx.Param(jnp.ones((4, 4), jnp.complex64) * 0.1)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.linear(jnp.fft.ifft(jnp.fft.fft(x) @ self.phase[...]).real)


class ComplexModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Complex(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def test_complex_values_are_recomputed_and_never_saved():
    work = rp.Workload(lambda m, x: (m(x) ** 2).mean(), ComplexModel(nnx.Rngs(0)), X)
    assert [item.name for item in rp.compare(work, target="cpu").refused] == ["compiler"]  # of which XLA:CPU has none
    assert rp.inspect(work, policy="dots_saveable").residuals is not None
    plan = rp.plan(work, budget="1GiB", target="cpu", finalists=1)
    assert rp.verify(work, plan=plan).passed
    with pytest.raises(PlanMismatch, match="complex"):
        rp.verify(work, plan=plan_saving(work, "fft"))


class OwnRegion(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(jnp.tanh(self.linear(x)))


@pytest.mark.parametrize("own", ["keep", "replace"])
def test_a_model_whose_own_region_hands_state_through(own):
    work = rp.Workload(lambda m, x: (m(x) ** 2).mean(), OwnRegion(nnx.Rngs(0)), X)
    plan = rp.plan(work, budget="1GiB", target="cpu", finalists=1, own_regions=own)
    checked = rp.verify(work, plan=plan)
    assert checked.passed, checked.differences
    assert checked.gradients_max_error is not None
