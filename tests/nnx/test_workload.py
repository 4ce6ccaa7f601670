"""Workloads: what is differentiated, what the step is, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rematplan.errors import InputError
from rematplan.lift import lift
from rematplan.workload import Workload

F, B = 16, 32
SHAPE = jax.ShapeDtypeStruct((B, F), jnp.float32)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(F, F, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.gelu(layer(x))
        return x

    def loss(self, x):
        return (self(x) ** 2).mean()


class Stateful(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(F, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(super().__call__(x)))


def loss(model, x):
    return (model(x) ** 2).mean()


def with_aux(model, x):
    y = model(x)
    return (y**3).mean(), {"y": y, "text": "t"}


def abstract(cls):
    return nnx.eval_shape(lambda: cls(nnx.Rngs(0)))


def memory(function, *args, donated=()):
    compiled = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*args).compile()
    stats = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias")
    return {name: getattr(stats, f"{name}_size_in_bytes") for name in names}


def assert_close(a, b, rtol=1e-3):
    """Gradients near zero differ between compiled and single operations."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-5)


def kinds(step):
    return [(o.kind, o.path) for o in step.outputs()]


def test_the_plain_step_compiles_to_what_value_and_grad_compiles_to():
    step = Workload(loss, abstract(MLP), SHAPE).step()
    graphdef, parameters = nnx.split(abstract(MLP))
    functional = jax.value_and_grad(lambda parameters, x: loss(nnx.merge(graphdef, parameters), x))
    assert memory(step.function, *step.leaves) == memory(functional, parameters, SHAPE)
    assert memory(step.function, *step.leaves)["temp"] > 0
    assert step.donated == ()


def test_what_comes_out_of_the_plain_step():
    model, x = Stateful(nnx.Rngs(0)), jnp.linspace(-1, 1, B * F).reshape(B, F)
    work = Workload(with_aux, model, x)
    step = work.step()
    flat = jax.jit(step.function)(*work.inputs())
    assert [k for k, _ in kinds(step)] == ["loss", "aux", *["gradient"] * 8, *["state"] * 3]
    (value, aux), grads = nnx.value_and_grad(with_aux, has_aux=True)(model, x)
    assert_close(flat[:10], [value, aux["y"], *jax.tree.leaves(grads)])
    assert_close(flat[10:], [model.drop.rngs.count[...], model.norm.mean[...], model.norm.var[...]])


def test_an_untouched_user_model():
    model = Stateful(nnx.Rngs(0))
    work = Workload(loss, model, SHAPE, optimizer=optax.adam(1e-3))
    step = work.step()
    jax.make_jaxpr(step.function)(*step.leaves)
    work.inputs()
    work.materialize()
    repr(work)
    assert model.drop.rngs.count[...] == 0
    assert not any("rematplan" in name for name in vars(model))


def test_differentiated_are_the_parameters_of_the_first_model():
    def distance(student, teacher, x):
        return ((student(x) - teacher(x)) ** 2).mean()

    work = Workload(distance, abstract(Stateful), abstract(MLP), SHAPE)
    paths = [f"layers/{n}/{name}" for n in range(3) for name in ("bias", "kernel")]
    assert [work.lift().info[i].path for i in work.differentiated] == [*paths, "norm/bias", "norm/scale"]
    assert {work.lift().info[i].argument for i in work.differentiated} == {0}


def test_differentiated_of_plain_jax_is_the_first_argument():
    def f(params, batch):
        return (batch["x"] @ params["w"]).sum() + params["b"].sum()

    params = {"w": SHAPE, "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16), "steps": jax.ShapeDtypeStruct((), jnp.int32)}
    work = Workload(f, {**params, "w": jax.ShapeDtypeStruct((F, F), jnp.float32)}, {"x": SHAPE})
    assert [work.lift().info[i].path for i in work.differentiated] == ["params/b", "params/w"]
    outputs = jax.eval_shape(work.step().function, *work.step().leaves)
    assert [(o.shape, str(o.dtype)) for o in outputs] == [((), "float32"), ((3,), "bfloat16"), ((F, F), "float32")]


@pytest.mark.parametrize(
    "work",
    [
        lambda model, x: Workload(model.loss, x),
        lambda model, x: Workload(functools.partial(loss, model), x),
        lambda model, x: Workload(functools.partial(loss, x=x), model),
        lambda model, x: Workload(loss, model, x=x),
        lambda model, x: Workload(
            lambda state, x: loss(nnx.merge(nnx.graphdef(MLP(nnx.Rngs(0))), state), x), nnx.state(model), x
        ),
    ],
    ids=["bound", "partial", "partial keyword", "keyword", "state"],
)
def test_other_ways_to_pass_a_model(work):
    model, x = MLP(nnx.Rngs(0)), jnp.ones((B, F))
    work = work(model, x)
    expected = nnx.value_and_grad(loss)(model, x)
    assert_close(jax.jit(work.step().function)(*work.inputs()), jax.tree.leaves(expected))


def test_a_replaced_loss():
    work = Workload(with_aux, MLP(nnx.Rngs(0)), jnp.ones((B, F)))
    lifted = work.lift(scopes=True)

    def doubled(*leaves):
        value, *rest = lifted.pure(*leaves)
        return [2 * value, *rest]

    plain = jax.jit(work.step().function)(*work.inputs())
    twice = jax.jit(work.step(doubled).function)(*work.inputs())
    assert_close(twice[0], 2 * plain[0])
    assert_close(twice[1], plain[1])
    assert_close(twice[2:], [2 * g for g in plain[2:]])


@pytest.mark.parametrize("make", [lambda: optax.sgd(0.1), lambda: optax.adamw(1e-2)], ids=["sgd", "adamw"])
def test_the_optimizer_step_is_the_one_of_nnx(make):
    model, x = Stateful(nnx.Rngs(0)), jnp.linspace(-1, 1, B * F).reshape(B, F)
    work = Workload(loss, model, x, optimizer=make())
    step = work.step()
    inputs = work.inputs()
    flat = jax.jit(step.function)(*inputs)
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    expected = _state(model) | _state(optimizer)
    found = {o.path: leaf for o, leaf in zip(step.outputs(), flat, strict=True)}
    assert_close(found.pop(""), value)
    assert found.keys() == {path for path in expected if not path.endswith("/key")}
    for path, leaf in found.items():
        assert_close(leaf, expected[path])


def _state(node):
    """Arrays of a module or optimizer by path."""
    opened = lift(lambda node: None, (node,), {})
    return {info.path: leaf for info, leaf in zip(opened.info, opened.leaves, strict=True)}


def test_state_of_the_optimizer_step_is_donated():
    work = Workload(loss, abstract(Stateful), SHAPE, optimizer=optax.adam(1e-3))
    step = work.step()
    stats = memory(step.function, *step.leaves, donated=step.donated)
    replaced = {o.source for o in step.outputs() if o.kind == "state"}
    assert set(step.donated) == replaced
    state_bytes = sum(int(np.prod(step.leaves[i].shape)) * step.leaves[i].dtype.itemsize for i in replaced)
    assert stats["alias"] == state_bytes
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in step.leaves)


def _make_step(loss_fn):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return value

    return step


def test_the_users_own_step():
    def arguments():
        model = Stateful(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), jnp.ones((B, F))

    work = Workload(loss, *arguments(), step=_make_step)
    assert next(i.path for i in work.lift().info if i.collection == "Param") == "layers/0/bias"
    assert len(work.differentiated) == 8
    plain = work.step()
    flat = jax.jit(plain.function, donate_argnums=plain.donated)(*work.inputs())
    model, optimizer, x = arguments()
    value = _make_step(loss)(model, optimizer, x)
    assert_close(flat[0], value)
    found = {o.path: leaf for o, leaf in zip(plain.outputs(), flat, strict=True)}
    assert_close(found["layers/0/kernel"], model.layers[0].kernel[...])
    assert_close(found["norm/var"], model.norm.var[...])
    assert_close(
        found["optimizer/opt_state/0/mu/layers/0/kernel"], optimizer.opt_state[0].mu["layers"][0]["kernel"][...]
    )
    sources = {o.source for o in plain.outputs() if o.kind == "state"}
    assert sources <= set(plain.donated)

    lifted = work.lift(scopes=True)
    replaced = work.step(lambda *leaves: [3 * out if n == 0 else out for n, out in enumerate(lifted.pure(*leaves))])
    assert_close(replaced.function(*work.inputs())[0], 3 * value)


def test_a_plain_jax_step_with_microbatches_is_seen_inside():
    def f(params, x):
        return jnp.sin(x @ params["w"]).mean()

    def make_step(loss_fn):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(params, batches):
            def accumulate(total, x):
                value, grads = jax.value_and_grad(loss_fn)(params, x)
                return jax.tree.map(jnp.add, total, grads), value

            grads, values = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batches)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values.mean()

        return step

    params, batches = {"w": jnp.eye(F)}, jnp.linspace(-1, 1, 4 * B * F).reshape(4, B, F)
    work = Workload(f, params, batches, step=make_step)
    assert [(i.path, leaf.shape) for i, leaf in zip(work.lift().info, work.lift().leaves, strict=True)] == [
        ("params/w", (F, F)),
        ("x", (B, F)),  # a microbatch
    ]
    assert [work.lift().info[i].path for i in work.differentiated] == ["params/w"]
    step = work.step(work.lift().pure)
    assert step.donated == (0,)
    found = step.function(jnp.eye(F), batches)  # donates its first argument
    assert_close(found, jax.tree.leaves(make_step(f)(params, batches)))


def test_real_arguments_are_taken_and_shapes_are_filled():
    x = jnp.ones((B, F))
    tokens = jax.ShapeDtypeStruct((B,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def f(model, x, tokens, y, key, scale=2.0):
        return (model(x)[tokens] * y).sum() * scale + jax.random.normal(key)

    work = Workload(f, abstract(Stateful), x, tokens, SHAPE, key=key)
    (model, x_, tokens_, y), kwargs = work.materialize(seed=1)
    np.testing.assert_array_equal(x_, x)
    assert x_ is not x  # a step may donate it
    assert not tokens_.any()
    assert 0.8 < jnp.std(y) < 1.2
    assert model.norm.var[...].min() >= 0.5
    assert jnp.isfinite(f(model, x_, tokens_, y, **kwargs))
    again, other = work.materialize(seed=1)[0], work.materialize(seed=2)[0]
    assert (again[3] == y).all()
    assert not (other[3] == y).all()
    assert (model.layers[0].kernel[...] != model.layers[1].kernel[...]).all()


def test_init_makes_the_arguments():
    def init(seed):
        return MLP(nnx.Rngs(seed)), jnp.full((B, F), 0.5)

    work = Workload(loss, abstract(MLP), SHAPE, init=init)
    (model, x), _ = work.materialize(seed=7)
    np.testing.assert_array_equal(model.layers[0].kernel[...], MLP(nnx.Rngs(7)).layers[0].kernel[...])
    assert (x == 0.5).all()
    no_seed = Workload(loss, abstract(MLP), SHAPE, init=lambda: init(3))
    np.testing.assert_array_equal(no_seed.inputs()[-1], np.full((B, F), 0.5))
    wrong = Workload(loss, abstract(MLP), SHAPE, init=lambda: (MLP(nnx.Rngs(0)), jnp.ones((B, F + 1))))
    with pytest.raises(InputError, match=r"init of loss returned .*x float32\[32, 17\].*x float32\[32, 16\]"):
        wrong.materialize()


def _trace(work):
    step = work.step()
    return jax.eval_shape(step.function, *step.leaves)


def test_losses_that_are_no_scalar():
    x = jnp.ones((B, F))
    refused = {
        r"an array float32\[32, 16\].*\.mean\(\)": lambda model, x: model(x),
        r"\(an array float32\[\], an array float32\[\], a str\)": lambda model, x: (model(x).sum(), x.sum(), "a"),
        r"returns an array int32\[\]": lambda model, x: jnp.argmax(model(x)),
        r"returns a float": lambda model, x: 1.0,
        r"returns a dict": lambda model, x: {"loss": model(x).sum()},
        r"returns a NoneType": lambda model, x: None,
        r"complex64\[\]": lambda model, x: model(x).sum() * 1j,
    }
    for message, function in refused.items():
        with pytest.raises(InputError, match=message):
            _trace(Workload(function, MLP(nnx.Rngs(0)), x))
    with pytest.raises(InputError, match="has_aux=True"):
        _trace(Workload(loss, MLP(nnx.Rngs(0)), x, has_aux=True))
    with pytest.raises(InputError, match="must return a scalar"):
        _trace(Workload(with_aux, MLP(nnx.Rngs(0)), x, has_aux=False))


def test_bad_input_is_explained():
    model, x = MLP(nnx.Rngs(0)), jnp.ones((B, F))
    with pytest.raises(InputError, match="got a int"):
        Workload(3)
    with pytest.raises(
        InputError, match=r"arguments \(MLP\) do not fit loss\(model, x\): missing a required argument: 'x'"
    ):
        Workload(loss, model)
    with pytest.raises(InputError, match="nothing to differentiate"):
        Workload(lambda tokens: tokens.sum() * 1.0, jnp.arange(3)).step()
    with pytest.raises(InputError, match="either optimizer="):
        Workload(loss, model, x, optimizer=optax.sgd(1), step=_make_step)
    with pytest.raises(InputError, match=r"takes an optax transformation such as optax.adam\(1e-3\), but got a float"):
        Workload(loss, model, x, optimizer=0.1)
    with pytest.raises(InputError, match="no argument of f holds one"):
        Workload(lambda w, x: (x @ w).sum(), jnp.eye(F), x, optimizer=optax.sgd(1), name="f").step()
    with pytest.raises(InputError, match="uses 'model' from outside"):
        Workload(lambda x: model(x).sum(), x)
    with pytest.raises(InputError, match="never called the loss"):
        Workload(loss, model, x, step=lambda loss_fn: lambda model, x: model(x).sum()).lift()


def test_how_it_prints():
    work = Workload(loss, abstract(Stateful), SHAPE, optimizer=optax.adam(1e-3), name="small")
    assert repr(work).splitlines() == [
        "Workload small",
        "  parameters  848 in 8 arrays, 3.31 KiB",
        "  inputs      x float32[32, 16]",
        "  step        gradient and update",
    ]
