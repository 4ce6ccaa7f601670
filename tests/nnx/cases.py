"""Models and losses in small: every kind of state, randomness, structure and call that NNX code is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

F = 8  # features
B = 4  # batch


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
