"""Random small NNX models, as people write them: dense, convolution, norms, dropout, attention, branches, shared and
scanned layers, with state and randomness."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from hypothesis import strategies as st

import rematplan as rp

BATCH, LENGTH, FEATURES = 2, 3, 4
# Six numbers have at times hardly any variance: with the usual 1e-5 one norm after another makes rounding errors 1e5 as large.
EPSILON = 0.1
# A layer: its kind, and for branches what is in them; `shared` is one that came before.
PLAIN_KINDS = ("dense", "conv", "layernorm", "batchnorm", "dropout", "attention", "gelu", "scan")
Spec = tuple[Any, ...]

layers: st.SearchStrategy[Spec] = st.recursive(
    st.sampled_from([(kind,) for kind in PLAIN_KINDS]) | st.tuples(st.just("shared"), st.integers(0, 5)),
    lambda inner: st.tuples(st.just("branch"), st.lists(inner, min_size=1, max_size=2), inner),
    max_leaves=3,
)
specs = st.lists(layers, min_size=1, max_size=4)


class Scanned(nnx.Module):
    """Three dense layers with stacked parameters, in one loop."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(FEATURES, FEATURES, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return step(self.layers, x)


class Branch(nnx.Module):
    """Layers beside a way around them."""

    def __init__(self, through: list[nnx.Module], around: nnx.Module):
        self.through, self.around = nnx.List(through), around

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for layer in self.through:
            y = layer(y)
        return y + self.around(x)


class Gelu(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x)


class Model(nnx.Module):
    """The layers of a spec, one after the other; a shared one is the same object as before."""

    def __init__(self, spec: list[Spec], rngs: nnx.Rngs):
        self.layers = nnx.List([])
        for each in spec:
            self.layers.append(self._make(each, rngs))
        self.head = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def _make(self, spec: Spec, rngs: nnx.Rngs) -> Any:
        kind = spec[0]
        if kind == "shared":
            made = list(self.layers)
            return made[spec[1] % len(made)] if made else nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        if kind == "branch":
            return Branch([self._make(each, rngs) for each in spec[1]], self._make(spec[2], rngs))
        makers = {
            "dense": lambda: nnx.Linear(FEATURES, FEATURES, rngs=rngs),
            "conv": lambda: nnx.Conv(FEATURES, FEATURES, kernel_size=(2,), rngs=rngs),
            "layernorm": lambda: nnx.LayerNorm(FEATURES, epsilon=EPSILON, rngs=rngs),
            "batchnorm": lambda: nnx.BatchNorm(FEATURES, epsilon=EPSILON, rngs=rngs),
            "dropout": lambda: nnx.Dropout(0.5, rngs=rngs),
            "attention": lambda: nnx.MultiHeadAttention(2, FEATURES, decode=False, rngs=rngs),
            "gelu": Gelu,
            "scan": lambda: Scanned(rngs),
        }
        return makers[kind]()

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: Model, x: jax.Array) -> jax.Array:
    return (jnp.tanh(model(x)) ** 2).mean()


def workload(spec: list[Spec]) -> rp.Workload:
    """A model of this spec on one batch; arguments with numbers in them."""
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))
    return rp.Workload(loss, Model(spec, nnx.Rngs(0)), x)
