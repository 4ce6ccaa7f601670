"""One suite for every way to checkpoint a function: outputs, gradients and the module's state afterwards agree.

A case is real code in small: a model and a loss. It is run undecorated and in every other way, twice in a row, since
state that went wrong the first time shows in the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan._plan import Plan, describe
from rematplan.lift import lift
from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import trace

F = 8  # features
B = 4  # batch

Way = Callable[..., Callable[..., Any]]


def _planned(f: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`rp.remat` with a plan that puts the whole function in one region and saves its first matrix product."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        opened = lift(f, args, kwargs, scopes=True, **static).abstract()
        traced = trace(opened.pure, opened.leaves, differentiated=())
        dots = [op.outputs[0] for op in traced.graph.operations if op.primitive == "dot_general"]
        whole = Configuration((Region(0, len(traced.equations), frozenset(dots[:1])),))
        regions, loops = describe(whole, traced.graph, {})
        return rp.remat(f, plan=Plan(regions, loops, fingerprint=traced.graph.fingerprint), **static)(*args, **kwargs)

    return call


def _undecorated(f: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    return f


WAYS: dict[str, Way] = {
    "undecorated": _undecorated,
    "nnx.remat": nnx.remat,
    "rp.remat": rp.remat,
    "rp.remat policy": functools.partial(rp.remat, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "rp.remat plan": _planned,
}


@dataclass(frozen=True)
class Case:
    """A model, a loss of it, and further arguments.

    Attributes:
      nnx_remat: what `nnx.remat` raises on this case; None if it works.
    """

    model: Callable[[nnx.Rngs], Any]
    loss: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]] = lambda: (jnp.linspace(-1, 1, B * F).reshape(B, F),)
    kwargs: dict[str, Any] = field(default_factory=dict)
    has_aux: bool = False
    static: dict[str, Any] = field(default_factory=dict)
    nnx_remat: type[Exception] | None = None


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a loss function as a case under its name."""

    def register(loss: Callable[..., Any]) -> Callable[..., Any]:
        CASES[loss.__name__] = Case(loss=loss, **options)
        return loss

    return register


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(F, F, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))

    def loss(self, x):
        return (self(x) ** 2).mean()


# -------------------- state


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(F, F, rngs=rngs)
        self.norm = nnx.BatchNorm(F, momentum=0.5, rngs=rngs)

    def __call__(self, x):
        return self.norm(jnp.sin(self.linear(x)))


@case(model=Normalized)
def batch_statistics(model, x):
    return (model(x) ** 3).mean()


class Sowing(Dense):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "seen", y)
        return jnp.sin(y)


@case(model=Sowing)
def sown_values(model, x):
    return model(x).sum()


class Growing(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = 0
        self.label = "new"

    def __call__(self, x):
        y = super().__call__(x)
        self.calls += 1
        self.label = f"called {self.calls}"
        if not hasattr(self, "running"):
            self.running = nnx.BatchStat(y.mean(0))  # a Variable that was not there before
            self.last = nnx.data(y[0])  # and a plain array
        self.running[...] = 0.9 * self.running[...] + 0.1 * y.mean(0)
        return y


@case(model=Growing)
def new_variables_and_static_attributes(model, x):
    return (model(x) * x).sum()


class Replacing(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.first, self.second = nnx.Variable(jnp.zeros(F)), nnx.Variable(jnp.ones(F))

    def __call__(self, x):
        y = super().__call__(x) + self.second[...]
        self.first, self.second = self.second, self.first  # same Variables elsewhere
        self.linear.bias = nnx.Param(self.linear.bias[...] * 1)  # another Variable in place of the old
        return y


@case(model=Replacing)
def replaced_variables(model, x):
    return (model(x) ** 2).sum()


class Swapping(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.old, self.new = nnx.Variable(jnp.zeros(F)), nnx.Variable(jnp.ones(F))

    def __call__(self, x):
        old, new = self.old[...], self.new[...]
        self.old[...], self.new[...] = new, old  # values move, nothing is computed
        return super().__call__(x) + old


@case(model=Swapping)
def swapped_values(model, x):
    return (model(x) ** 2).sum()


# -------------------- randomness


class Dropping(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(super().__call__(x))


@case(model=Dropping)
def dropout_from_own_stream(model, x):
    return model(x).sum(), model(x)


CASES["dropout_from_own_stream"] = Case(Dropping, dropout_from_own_stream, has_aux=True)


class DroppingWith(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs):
        return self.drop(super().__call__(x), rngs=rngs)


@case(
    model=DroppingWith,
    args=lambda: (jnp.ones((B, F)), nnx.Rngs(dropout=3)),
    has_aux=True,
)
def dropout_from_passed_stream(model, x, rngs):
    y = model(x, rngs=rngs)
    return y.sum(), (y, model(x, rngs=rngs))


@case(model=DroppingWith, kwargs={"seed": 3}, has_aux=True, nnx_remat=TypeError)
def keyword_only_arguments(model, x, *, seed=0, scale=2.0):
    y = model(x, rngs=nnx.Rngs(seed)) * scale
    return y.sum(), y


class Keyed(Dense):
    def __call__(self, x, key):
        return super().__call__(x) * jax.random.bernoulli(key, 0.5, x.shape)


@case(model=Keyed, args=lambda: (jnp.ones((B, F)), jax.random.key(1)), has_aux=True)
def new_style_key(model, x, key):
    y = model(x, key)
    return y.sum(), (y, jax.random.split(key))


@case(model=Keyed, args=lambda: (jnp.ones((B, F)), jax.random.PRNGKey(1)))
def old_style_key(model, x, key):
    return model(x, key).sum()


# -------------------- structure


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(F, F, rngs=rngs)
        self.other = nnx.Linear(F, F, use_bias=False, rngs=rngs)
        self.other.kernel = self.embed.embedding

    def __call__(self, x):
        return jnp.tanh(self.other(jnp.sin(x @ self.embed.embedding)))


@case(model=Tied)
def tied_weights(model, x):
    return model(x).sum()


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.inner = Dropping(rngs)
        self.alias = self.inner

    def __call__(self, x):
        return self.alias(self.inner(x)) + self.inner(x)


@case(model=Twice)
def one_module_used_twice(model, x):
    return (model(x) ** 2).sum()


class Containers(nnx.Module):
    def __init__(self, rngs):
        self.list = nnx.List([Dense(rngs), nnx.List([Dense(rngs)])])
        self.data = nnx.data([Dense(rngs), {"a": Dense(rngs), "b": [nnx.Param(jnp.ones(F))]}])
        self.dict = nnx.Dict(x=Dense(rngs))
        self.seq = nnx.Sequential(nnx.Linear(F, F, rngs=rngs), jnp.tanh, Normalized(rngs))
        self.scale, self.name, self.shape = 2.0, "containers", (F, F)
        self.mask = nnx.data(jnp.arange(F) % 2)
        self.function = jnp.sin

    def __call__(self, x):
        x = self.list[1][0](self.list[0](x)) * self.scale
        x = self.data[1]["a"](self.data[0](x)) * self.data[1]["b"][0] * self.mask
        return self.seq(self.function(self.dict["x"](x)).reshape(-1, self.shape[0]))


@case(model=Containers)
def lists_dicts_and_static_data(model, x):
    return (model(x) ** 3).mean()


@case(model=lambda rngs: {"encoder": Dense(rngs), "decoder": (Normalized(rngs),)})
def a_dict_of_models(models, x):
    return (models["decoder"][0](models["encoder"](x)) ** 3).mean()


@case(model=Dense, args=lambda: (Dropping(nnx.Rngs(7)), jnp.ones((B, F))), has_aux=True)
def several_models_in_one_call(student, teacher, x):
    return ((student(x) - teacher(x)) ** 2).mean(), teacher(x)


# -------------------- calls


@case(model=Dense, kwargs={"power": 3})
def keyword_arguments(model, x, power=2):
    return (model(x) ** power).sum()


@case(model=Dense, args=lambda: (jnp.ones((B, F)), 3, "sum"), static={"static_argnums": (2, 3)})
def static_by_position(model, x, power, reduce):
    return getattr(model(x) ** power, reduce)()


@case(model=Dense, has_aux=True)
def structured_outputs(model, x):
    y = model(x)
    return y.sum(), {"y": y, "none": None, "pair": (y.mean(), [x]), "int": jnp.arange(3)}


@case(
    model=Dense,
    args=lambda: (
        jnp.ones((B, F)),
        {"index": jnp.array([1, 0]), "empty": jnp.zeros((0, F)), "mask": jnp.array([True, False])},
        np.float32(2),
    ),
    has_aux=True,
)
def integer_boolean_and_empty_arrays(model, x, more, scale):
    y = model(x)[more["index"]] * scale
    return jnp.where(more["mask"][:, None], y, 0).sum() + more["empty"].sum(), more["empty"]


class LowPrecision(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(F, F, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.phase = nnx.Param(jnp.exp(1j * jnp.arange(F)))

    def __call__(self, x):
        return jnp.abs(self.linear(x).astype(jnp.float32) * self.phase)


@case(model=LowPrecision)
def low_precision_and_complex(model, x):
    return model(x).sum()


@jax.custom_vjp
def _clipped(x):
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda residual, g: (jnp.clip(g * residual, -0.1, 0.1),))


@case(model=Dense)
def custom_derivative_inside(model, x):
    return _clipped(model(x)).sum()


@case(model=Normalized)
def own_remat_inside(model, x):
    inner = nnx.remat(lambda model, x: model(x))
    return (inner(model, x) ** 3).mean()


class NoPytree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.blocks = [Dense(rngs), Normalized(rngs)]
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x


@case(model=NoPytree)
def module_that_is_no_pytree(model, x):
    return (model(x) ** 3).mean()


@case(model=Dense)
def jit_and_grad_inside(model, x):
    inner = nnx.grad(nnx.jit(batch_statistics))(model, x)
    return (model(x) ** 3).mean() + sum((g**2).sum() for g in jax.tree.leaves(inner))


@case(model=Dense, args=lambda: (nnx.MultiMetric(loss=nnx.metrics.Average("loss")), jnp.ones((B, F))))
def metric_updated_inside(model, metrics, x):
    loss = model.loss(x)
    metrics.update(loss=jax.lax.stop_gradient(loss))
    return loss


@case(model=Dropping)
def condition_inside(model, x):
    y = model(x)
    return jax.lax.cond(y.sum() > 0, lambda y: jnp.sin(y).sum(), lambda y: jnp.cos(y).sum(), y)


# -------------------- the suite


def _leaves(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """Structure and numbers of modules and arrays alike."""
    graphdef, state = nnx.split(tree)
    arrays = jax.tree.leaves(state)
    return graphdef, [np.asarray(jax.random.key_data(a)) if _is_key(a) else np.asarray(a) for a in arrays]


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(a)) if _is_key(a) else np.asarray(a) for a in jax.tree.leaves(tree)]


def _observe(subject: Case, way: Way, transform: Callable[..., Any]) -> tuple[Any, list[np.ndarray]]:
    """Structure and numbers of two rounds: results, gradients, and every argument afterwards."""
    model, args = subject.model(nnx.Rngs(0)), subject.args()
    loss = way(subject.loss, **subject.static)
    if subject.static or subject.kwargs:  # nnx.grad itself takes no static and no keyword-only arguments
        inner, fixed = loss, args[1:] if subject.static else ()
        args = args[:1] if subject.static else args
        loss = lambda model, *args: inner(model, *args, *fixed, **subject.kwargs)  # noqa: E731
    differentiate = nnx.value_and_grad(loss, has_aux=subject.has_aux)
    graphdefs, numbers = [], []
    for _ in range(2):
        result = transform(differentiate)(model, *args)
        graphdef, leaves = _leaves((model, args))
        graphdefs.append(graphdef)
        numbers += [*_arrays(result), *leaves]
    return graphdefs, numbers


# Where the slower forms, which share all but the last step with the bare one, are run too.
STATEFUL = ("batch_statistics", "new_variables_and_static_attributes", "dropout_from_own_stream", "tied_weights")


def _runs(name: str, way: str) -> bool:
    return way != "rp.remat policy" or name in STATEFUL


@functools.cache
def _reference(name: str) -> tuple[Any, list[np.ndarray]]:
    return _observe(CASES[name], _undecorated, lambda f: f)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize(("name", "way"), [(n, w) for n in CASES for w in WAYS if w != "undecorated" and _runs(n, w)])
def test_agrees_with_the_undecorated_function(name, way):
    subject = CASES[name]
    graphdefs, numbers = _reference(name)
    if way == "nnx.remat" and name == "keyword_arguments" and getattr(jax.config, "jax_remat3", False):
        pytest.skip("nnx.remat loses keyword arguments with JAX_REMAT3=1 (flax 0.12.8)")
    if way == "nnx.remat" and subject.nnx_remat:
        with pytest.raises(subject.nnx_remat):
            _observe(subject, WAYS[way], lambda f: f)
        return
    found_graphdefs, found = _observe(subject, WAYS[way], lambda f: f)
    assert len(found) == len(numbers)
    for a, b in zip(found, numbers, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=2e-5, atol=1e-6)
    assert found_graphdefs == graphdefs


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("name", [*STATEFUL, "sown_values", "lists_dicts_and_static_data", "structured_outputs"])
def test_a_plan_agrees_under_nnx_jit(name):
    graphdefs, numbers = _reference(name)
    found_graphdefs, found = _observe(CASES[name], WAYS["rp.remat plan"], nnx.jit)
    assert len(found) == len(numbers)
    for a, b in zip(found, numbers, strict=True):
        tolerance = 2e-2 if b.dtype == jnp.bfloat16 else 2e-5  # the compiler keeps more bits than single operations do
        np.testing.assert_allclose(
            np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=tolerance, atol=1e-5
        )
    assert found_graphdefs == graphdefs
