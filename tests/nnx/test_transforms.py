"""`rp.remat` inside and outside of every transformation of JAX and NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rematplan as rp

F = 6
X = jnp.linspace(-1, 1, 4 * F).reshape(4, F)
REMAT3 = bool(getattr(jax.config, "jax_remat3", False))
POLICY = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
OURS = pytest.mark.parametrize("remat", [rp.remat, rp.remat(policy=POLICY, prevent_cse=False)], ids=["bare", "policy"])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(F, F, rngs=rngs)
        self.norm = nnx.BatchNorm(F, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.sin(self.norm(self.linear(x))))


def loss(model, x):
    return (model(x) ** 3).mean()


class Smooth(nnx.Module):
    """No state: for transformations through which none comes out."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(F, F, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(self.linear(x))


def state(*models):
    return [np.asarray(a) for a in jax.tree.leaves(nnx.state(models, nnx.Not(nnx.RngKey)))]


def assert_close(a, b, rtol=2e-5):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b)
    assert a
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-5)


@OURS
def test_jax_grad_of_explicitly_split_state(remat):
    """State comes out through plain `jax.grad` where the caller takes it out, as in plain Flax."""

    def gradient(f):
        graphdef, parameters, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)

        def functional(parameters, rest, x):
            model = nnx.merge(graphdef, parameters, rest, copy=True)
            value = f(model, x)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        return jax.jit(jax.grad(functional, has_aux=True))(parameters, rest, X)

    grads, rest = gradient(remat(loss))
    expected_grads, expected_rest = gradient(loss)
    assert_close(grads, expected_grads)
    keyless = nnx.Not(nnx.RngKey)
    assert_close(nnx.filter_state(rest, keyless), nnx.filter_state(expected_rest, keyless))


@OURS
def test_jax_grad_of_the_model_itself(remat):
    model = Smooth(nnx.Rngs(0))
    assert_close(jax.grad(remat(loss))(model, X), jax.grad(loss)(model, X))
    assert_close(jax.jit(jax.grad(remat(loss)))(model, X), jax.grad(loss)(model, X))


@OURS
def test_vjp_jvp_and_second_derivatives(remat):
    model = Smooth(nnx.Rngs(0))
    f, g = (lambda x: remat(loss)(model_of(), x)), (lambda x: loss(model_of(), x))

    def model_of():
        return model

    assert_close(jax.vjp(f, X)[1](1.0), jax.vjp(g, X)[1](1.0))
    assert_close(jax.jvp(f, (X,), (X,)), jax.jvp(g, (X,), (X,)))
    assert_close(jax.hessian(f)(X[:1]), jax.hessian(g)(X[:1]), rtol=1e-4)


@OURS
def test_jax_vmap_and_gradients_per_example(remat):
    model = Smooth(nnx.Rngs(0))
    per_example = jax.vmap(jax.grad(remat(loss)), in_axes=(None, 0))
    assert_close(per_example(model, X), jax.vmap(jax.grad(loss), in_axes=(None, 0))(model, X))


@OURS
def test_nnx_vmap_over_an_ensemble_with_state(remat):
    def run(f):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def ensemble(rngs):
            return Block(rngs)

        models = ensemble(nnx.Rngs(0))
        value = nnx.vmap(nnx.value_and_grad(f), in_axes=(0, None))(models, X)
        return value, state(models)

    assert_close(run(remat(loss)), run(loss))


@OURS
def test_nnx_scan_over_layers_with_batchnorm_and_dropout(remat):
    def run(wrap):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return Block(rngs)

        stack = layers(nnx.Rngs(0))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @wrap
        def forward(layer, x):
            return layer(x)

        value = nnx.jit(nnx.value_and_grad(lambda stack, x: (forward(stack, x) ** 2).mean()))(stack, X)
        return value, state(stack)

    assert_close(run(remat), run(lambda f: f))


@OURS
def test_lax_scan_inside_the_region(remat):
    def recurrent(model, x):
        carry, _ = jax.lax.scan(lambda c, row: (jnp.sin(model(c + row)), None), jnp.zeros(F), x)
        return carry.sum()

    model = Smooth(nnx.Rngs(0))
    assert_close(nnx.grad(remat(recurrent))(model, X), nnx.grad(recurrent)(model, X))


@OURS
def test_inside_cond_and_forward_in_while(remat):
    model = Smooth(nnx.Rngs(0))
    inner = remat(loss)

    def branching(model, x):
        return nnx.cond(x.sum() > -1, inner, lambda m, x: 0.0 * loss(m, x), model, x)

    assert_close(nnx.grad(branching)(model, X), nnx.grad(loss)(model, X))
    call = remat(lambda model, x: model(x))

    def three(f):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, f(model, s[1])), (0, X))[1]

    assert_close(three(call), three(lambda model, x: model(x)))


@OURS
def test_partial_gradients(remat):
    def run(f):
        models = Block(nnx.Rngs(0)), Block(nnx.Rngs(1))
        only_bias = nnx.DiffState(1, nnx.All(nnx.Param, nnx.PathContains("bias")))
        value = nnx.value_and_grad(f, argnums=(only_bias,))(*models, X)
        return value, state(*models)

    def joint(a, b, x):
        return loss(a, x) + loss(b, x)

    found, expected = run(remat(joint)), run(joint)
    assert len(jax.tree.leaves(found[0][1])) == 2  # the biases of linear and norm
    assert_close(found, expected)


@OURS
def test_low_rank_adapters(remat):
    def run(f):
        base = nnx.Linear(F, F, rngs=nnx.Rngs(0))
        model = nnx.LoRA(F, 2, F, base_module=base, rngs=nnx.Rngs(1))
        model.lora_b[...] = jnp.ones_like(model.lora_b[...])
        return nnx.grad(f, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, X)

    assert_close(run(remat(loss)), run(loss))


@OURS
def test_three_optimizer_steps(remat):
    def run(f):
        model = Block(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer, x):
            value, grads = nnx.value_and_grad(f)(model, x)
            optimizer.update(model, grads)
            return value

        return [step(model, optimizer, X) for _ in range(3)], state(model, optimizer)

    assert_close(run(remat(loss)), run(loss), rtol=1e-4)


@OURS
def test_nested_regions(remat):
    def outer(model, x):
        return remat(loss)(model, x) + remat(lambda m, x: m(x).sum())(model, x)

    def plain(model, x):
        return loss(model, x) + model(x).sum()

    def run(f):
        model = Block(nnx.Rngs(0))
        return nnx.value_and_grad(f)(model, X), state(model)

    assert_close(run(remat(outer)), run(plain))


def test_train_and_eval_take_effect_between_calls():
    f = rp.remat(lambda model, x: model(x))
    model, expected = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    for mode in ("train", "eval", "train", "eval"):
        getattr(model, mode)()
        getattr(expected, mode)()
        assert_close(f(model, X), expected(X))
        assert_close(state(model), state(expected))


def test_jit_of_jax_loses_state_with_and_without_remat():
    """Plain `jax.jit` passes a copy of the module; so it is without remat too."""
    for f in (loss, rp.remat(loss)):
        model = Block(nnx.Rngs(0))
        jax.jit(f)(model, X)
        assert model.drop.rngs.count[...] == 0
        nnx.jit(f)(model, X)
        assert model.drop.rngs.count[...] == 1


def test_plain_jax_functions():
    def f(params, x, *, power):
        return (jnp.tanh(x @ params["w"]) ** power).sum()

    params = {"w": jnp.eye(F)}
    expected = jax.grad(f)(params, X, power=3)
    assert_close(jax.grad(rp.remat(f))(params, X, power=3), expected)
    assert_close(jax.jit(jax.grad(rp.remat(f)), static_argnames="power")(params, X, power=3), expected)


def test_sharded_arguments():
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    model = Smooth(nnx.Rngs(0))
    assert_close(nnx.jit(nnx.grad(rp.remat(loss)))(model, x), nnx.grad(loss)(model, X))


@pytest.mark.skipif(REMAT3, reason="jax.checkpoint itself fails under shard_map with JAX_REMAT3=1 (jax 0.10.2)")
def test_inside_shard_map():
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    model = Smooth(nnx.Rngs(0))

    def body(kernel, x):
        return jax.lax.pmean(rp.remat(lambda k, x: jnp.sin(x @ k).sum())(kernel, x), "data")

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    kernel = model.linear.kernel[...]
    assert_close(jax.grad(mapped)(kernel, X), jax.grad(lambda k: jnp.sin(X @ k).sum() / len(devices))(kernel))
