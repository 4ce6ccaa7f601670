"""Opening a call: what its leaves are, what comes out, and what is never kept."""

from __future__ import annotations

import functools
import gc
import weakref

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

from rematplan.lift import OutputInfo, lift

F = 4
X = jnp.ones((2, F))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(F, F, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(F, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x))

    def loss(self, x, *, scale=1.0):
        return self(x).sum() * scale


def loss(model, batch, scale=1.0):
    return model(batch["x"]).sum() * scale


def call(lifted):
    return lifted.finish(lifted.pure(*lifted.leaves))


def test_what_the_leaves_are():
    lifted = lift(loss, (Model(nnx.Rngs(0)), {"x": X, "n": jnp.arange(2)}), {})
    found = {info.path: (info.argument, info.collection, info.differentiable, info.module) for info in lifted.info}
    assert found["layers/0/kernel"] == (0, "Param", True, True)
    assert found["norm/mean"] == (0, "BatchStat", False, True)
    assert found["drop/rngs/key"] == (0, "RngKey", False, True)
    assert found["drop/rngs/count"] == (0, "RngCount", False, True)
    assert found["batch/x"] == (1, "array", True, False)
    assert found["batch/n"] == (1, "array", False, False)
    assert [leaf.shape for leaf, i in zip(lifted.leaves, lifted.info, strict=True) if i.path == "batch/x"] == [(2, F)]


def test_only_what_changed_is_an_output():
    model = Model(nnx.Rngs(0))
    lifted = lift(loss, (model, {"x": X}), {})
    flat = jax.eval_shape(lifted.pure, *lifted.leaves)
    assert [(o.kind, o.path) for o in lifted.outputs] == [
        ("result", ""),
        ("state", "drop/rngs/count"),
        ("state", "norm/mean"),
        ("state", "norm/var"),
    ]
    assert len(flat) == 4
    assert [lifted.info[o.source].path for o in lifted.outputs[1:]] == ["drop/rngs/count", "norm/mean", "norm/var"]
    model.eval()
    lifted = lift(loss, (model, {"x": X}), {})
    jax.eval_shape(lifted.pure, *lifted.leaves)
    assert lifted.outputs == (OutputInfo("result", ""),)


def test_tracing_many_times_changes_nothing_and_finishing_writes_once():
    model = Model(nnx.Rngs(0))
    lifted = lift(loss, (model, {"x": X}), {})
    first = str(jax.make_jaxpr(lifted.pure)(*lifted.leaves))
    assert str(jax.make_jaxpr(lifted.pure)(*lifted.leaves)) == first
    assert model.drop.rngs.count[...] == 0
    expected = loss(Model(nnx.Rngs(0)), {"x": X})
    assert call(lifted) == expected
    assert model.drop.rngs.count[...] == 1


def test_abstract_models_and_arrays():
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    lifted = lift(loss, (model, {"x": jax.ShapeDtypeStruct((2, F), jnp.float32)}), {}, scopes=True)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in lifted.leaves)
    real = lift(loss, (Model(nnx.Rngs(0)), {"x": X}), {}, scopes=True)
    assert str(jax.make_jaxpr(lifted.pure)(*lifted.leaves)) == str(jax.make_jaxpr(real.pure)(*real.leaves))
    assert real.abstract().key == lifted.key == real.key


def shapes_of(*args, function=loss, **kwargs):
    return lift(function, args, kwargs).key


def test_keys_tell_calls_apart():
    model, batch = Model(nnx.Rngs(0)), {"x": X}
    key = shapes_of(model, batch)
    assert key == shapes_of(Model(nnx.Rngs(1)), {"x": X + 1})
    different = [
        shapes_of(model, {"x": X[:1]}),
        shapes_of(model, {"x": X.astype(jnp.bfloat16)}),
        shapes_of(model, batch, 1.0),
        shapes_of(model, batch, 1),
        shapes_of(model, batch, True),
        shapes_of(model, batch, 2.0),
        shapes_of(model, batch, jnp.asarray(2.0)),  # of a weak type
        shapes_of(model, batch, jnp.float32(2.0)),
        shapes_of(model, batch, scale=2.0),
    ]
    model.eval()
    different.append(shapes_of(model, batch))
    assert len({key, *different}) == len(different) + 1
    unhashable = type("Config", (), {"__hash__": None})()
    assert shapes_of(model, batch, unhashable) != shapes_of(model, batch, unhashable)


def test_partials_and_bound_methods_are_opened():
    model = Model(nnx.Rngs(0))
    for function, args, kwargs in (
        (model.loss, (X,), {"scale": 2.0}),
        (functools.partial(model.loss, scale=2.0), (X,), {}),
        (functools.partial(Model.loss, model), (X,), {"scale": 2.0}),
        (functools.partial(functools.partial(Model.loss, scale=3.0), model, scale=2.0), (X,), {}),
    ):
        lifted = lift(function, args, kwargs)
        assert [i.argument for i in lifted.info if i.path == "layers/0/kernel"] == ["self"]
        assert [i.argument for i in lifted.info if i.path == "x"] == [0]
        before = int(model.drop.rngs.count[...])
        fresh = nnx.clone(model)
        assert call(lifted) == fresh.loss(X, scale=2.0)
        assert model.drop.rngs.count[...] == before + 1


def test_a_module_is_a_function_too():
    model = Model(nnx.Rngs(0))
    lifted = lift(model, (X,), {})
    np.testing.assert_array_equal(call(lifted), Model(nnx.Rngs(0))(X))
    assert model.drop.rngs.count[...] == 1


class Leaf(nnx.Module):
    def __init__(self):
        self.value = nnx.Variable(jnp.zeros((), jnp.int32))


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.floats(-1, 1), st.sampled_from(["a", jnp.sin]),
)  # fmt: skip
ARRAYS = st.sampled_from([np.arange(3, dtype=np.int32), np.float32(2), jnp.ones((2, 1), jnp.bfloat16), jnp.zeros((0,))])
LEAVES = st.one_of(PLAIN, ARRAYS, st.builds(Leaf))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(TREES, max_size=3), st.dictionaries(st.sampled_from("xyz"), TREES, max_size=2), st.booleans()
)
def test_any_tree_goes_through_and_every_module_in_it_is_written_once(args, kwargs, scopes):
    def count(*args, **kwargs):
        for module in _modules((args, kwargs)):
            module.value[...] += 1
        return args, kwargs

    lifted = lift(count, args, kwargs, scopes=scopes)
    flat = jax.jit(lifted.pure)(*lifted.leaves)
    returned = lifted.finish(flat)
    before, structure = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_module)
    after, structure_after = jax.tree.flatten(returned, is_leaf=_is_module)
    assert structure_after == structure
    for x, y in zip(before, after, strict=True):
        if isinstance(x, (np.ndarray, np.generic, jax.Array)):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        else:
            assert y is x or (type(y) is type(x) and y == x)
    assert all(module.value[...] == 1 for module in _modules((args, kwargs)))
    assert len(flat) == len(lifted.outputs)
    assert len(lifted.info) == len(lifted.leaves)


def _is_module(x):
    return isinstance(x, Leaf)


def _modules(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_module) if _is_module(x)]


def test_names_of_star_arguments():
    def stars(first, *rest, **named):
        return first + sum(rest) + named["b"]

    lifted = lift(stars, (X, X, X), {"b": X})
    assert [(i.path, i.argument) for i in lifted.info] == [("first", 0), ("rest[0]", 1), ("rest[1]", 2), ("b", "b")]
    np.testing.assert_array_equal(call(lifted), 4 * X)


def test_static_arguments_by_position_and_name_whichever_way_they_are_passed():
    seen = []

    def function(x, mode, *, flag):
        seen.append((mode, flag))
        return x * (2 if mode == "double" else 1)

    options = {"static_argnums": (1,), "static_argnames": ("flag",)}
    array = np.ones(3)
    for args, kwargs in (((X, "double"), {"flag": array}), ((X,), {"mode": "double", "flag": array})):
        lifted = lift(function, args, kwargs, **options)
        assert len(lifted.leaves) == 1
        np.testing.assert_array_equal(call(lifted), 2 * X)
    assert all(mode == "double" and flag is array for mode, flag in seen)


def test_results_that_are_no_arrays_or_are_modules():
    def function(model, x):
        new = nnx.Linear(F, F, rngs=nnx.Rngs(3))
        return {"same": model, "part": model.norm, "new": new, "text": "t", "none": None, "f": jnp.sin, "x": x, "n": 3}

    model = Model(nnx.Rngs(0))
    result = call(lift(function, (model, X), {}))
    assert result["same"] is model
    assert result["part"] is model.norm
    np.testing.assert_array_equal(result["new"].kernel[...], nnx.Linear(F, F, rngs=nnx.Rngs(3)).kernel[...])
    result["new"].kernel[...] += 1  # belongs to the caller
    assert (result["text"], result["none"], result["f"], result["n"]) == ("t", None, jnp.sin, 3)
    assert isinstance(result["n"], int)


def test_unchanged_modules_of_another_trace_may_be_read_but_not_written():
    model = Model(nnx.Rngs(0))

    def read(x):
        return call(lift(lambda model, x: model.layers[0](x).sum(), (model, x), {}))

    assert jax.grad(read)(X).shape == X.shape

    def write(x):
        return call(lift(lambda model, x: model(x).sum(), (model, x), {}))

    with pytest.raises(TraceContextError, match="trace level"):
        jax.grad(write)(X)

    def grow(x):
        def growing(model, x):
            model.seen = nnx.Variable(x)
            return x.sum()

        return call(lift(growing, (model, x), {}))

    with pytest.raises(TraceContextError, match="trace level"):
        jax.grad(grow)(X)
    assert not hasattr(model, "seen")


def test_an_exception_in_the_function_changes_nothing():
    def failing(model, x):
        model(x)
        model.extra = 1
        raise ZeroDivisionError

    model = Model(nnx.Rngs(0))
    with pytest.raises(ZeroDivisionError):
        call(lift(failing, (model, X), {}))
    assert model.drop.rngs.count[...] == 0
    assert not hasattr(model, "extra")


def test_the_program_keeps_neither_arrays_nor_modules():
    model = Model(nnx.Rngs(0))
    lifted = lift(loss, (model, {"x": X}), {})
    call(lifted)
    program = lifted.program
    kernel, module = weakref.ref(model.layers[0].kernel[...]), weakref.ref(model)
    del model, lifted
    gc.collect()
    assert kernel() is None
    assert module() is None
    assert program.outputs is not None
