"""What must not run twice: callbacks of the user's, and what draws from a hidden state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan.errors import InfeasibleBudget
from rematplan.workload import Workload


def test_effects_run_as_often_as_without():
    calls = []

    def f(model, x):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sin(model(x)).sum()

    for expected, wrapped in enumerate((f, rp.remat(f)), start=1):
        wrapped(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
        jax.effects_barrier()
        assert len(calls) == expected


def smallest_plan(work):
    with pytest.raises(InfeasibleBudget) as raised:
        rp.plan(work, budget=1, target="cpu", finalists=1)
    return rp.plan(work, budget=raised.value.minimum_bytes, target="cpu", finalists=1)


@pytest.mark.slow
@pytest.mark.parametrize("hidden_in", ["custom rule", "branch", "loop", "nothing"])
def test_pure_callbacks_run_as_often_as_without_a_plan(hidden_in):
    """The host may count, log or take long; what hides the callback makes no difference."""
    calls = []

    def host(a):
        calls.append(1)
        return np.asarray(a) * 2

    def doubled(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    ruled = jax.custom_vjp(doubled)
    ruled.defvjp(lambda x: (doubled(x), None), lambda _, g: (g * 2,))
    stopped = lambda x: doubled(jax.lax.stop_gradient(x)) + x
    around = {
        "custom rule": ruled,
        "branch": lambda x: jax.lax.cond(x.sum() > 1e9, lambda x: x, ruled, x),
        "loop": lambda x: jax.lax.scan(lambda h, _: (jnp.sin(ruled(h)), None), x, None, length=2)[0],
        "nothing": stopped,
    }[hidden_in]

    def loss(parameters, x):
        for p in parameters:
            x = jnp.sin(around(jnp.tanh(x @ p)))
        return (x**2).mean()

    parameters = [jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i in range(3)]
    x = jax.random.normal(jax.random.key(5), (128, 16))
    plan = smallest_plan(Workload(loss, parameters, x))
    counts = []
    for each in (loss, rp.remat(loss, plan=plan)):
        calls.clear()
        jax.block_until_ready(jax.jit(jax.grad(each))(parameters, x))
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts[1] == counts[0]


@pytest.mark.slow
def test_what_draws_from_a_hidden_state_is_not_drawn_twice():
    def loss(parameters, x):
        """Of degree two in every parameter, whatever is drawn: <p, gradient> is twice the loss."""
        for p in parameters:
            drawn = jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape)
            x = jax.nn.relu((x * drawn) @ p) * jnp.where(drawn > 0.3, 1.5, 0.5)
        return (x**2).sum()

    parameters = [jax.random.normal(jax.random.key(i), (16, 16)) / 2 for i in range(4)]
    work = Workload(loss, parameters, jax.random.normal(jax.random.key(5), (256, 16)))
    plan = smallest_plan(work)
    value, gradients = jax.jit(jax.value_and_grad(rp.remat(loss, plan=plan)))(*work.args)
    for p, g in zip(parameters, gradients, strict=True):
        np.testing.assert_allclose((p * g).sum(), 2 * value, rtol=1e-5)
    assert "hidden state" in rp.verify(work, plan=plan).size
