"""Built-in workloads at sizes that trace in a second, and small functions whose residuals are known by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rematplan import Workload, workloads

# What jax.vjp keeps of a tanh is jax's choice; figures that are known by hand hold for the one that they were worked out for.
TANH_KEEPS_ITSELF = pytest.mark.skipif(
    "one_minus_square" in str(jax.make_jaxpr(jax.grad(jnp.tanh))(1.0)),
    reason="this JAX keeps one minus the square of a tanh, not the tanh",
)

# JAX's new remat saves values by name, and what only a derivative rule computes has none.
CLASSIC = pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="under JAX_REMAT3=1 what has no name is not saved"
)

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"blocks": 2, "features": 16, "heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "scan_gpt": {"blocks": 2, "features": 16, "heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "vit": {"blocks": 2, "features": 16, "heads": 2, "image": 16, "patch": 8, "batch": 2, "classes": 5},
    "resnet": {"blocks": (1, 1), "features": 8, "image": 32, "batch": 2, "classes": 5},
    "unet": {"levels": 2, "blocks": 1, "features": 8, "image": 8, "batch": 2},
}


@functools.cache
def small(name: str) -> Workload:
    return getattr(workloads, name)(**SMALL[name])


class Layer(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, layers: int, features: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(features, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


BATCH, FEATURES, LAYERS = 8, 4, 3
ACTIVATION = BATCH * FEATURES * 4  # bytes


def tanh_model(layers: int = LAYERS) -> Workload:
    model = nnx.eval_shape(lambda: Model(layers, FEATURES, rngs=nnx.Rngs(0)))
    return Workload(mean_square, model, jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32))
