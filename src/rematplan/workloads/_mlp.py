"""N square linear layers with an activation after each, the smallest model on which boundaries matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.errors import InputError
from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_sizes
from rematplan.workloads._layout import laid_out, mesh_axes

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


class MLP(nnx.Module):
    def __init__(
        self,
        blocks: int,
        features: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        self.layers = nnx.List([nnx.Linear(features, features, dtype=dtype, rngs=rngs) for _ in range(blocks)])
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = laid_out(self.activation(layer(x)), "batch")  # (B, F)
        return x


def loss(model: MLP, x: jax.Array) -> jax.Array:
    """Half the mean square of the output, summed over features: a scalar that depends on every parameter."""
    return 0.5 * jnp.mean(jnp.sum(model(x).astype(jnp.float32) ** 2, axis=-1))


def mlp(
    *,
    blocks: int = 16,
    features: int = 1024,
    batch: int = 8192,
    activation: str = "relu",
    dtype: str = "float32",
    mesh: str | Mapping[str, int] | None = None,
) -> Workload:
    """`blocks` layers of `features` x `features` on a batch of vectors; activation is relu or gelu."""
    check_sizes("mlp", blocks=blocks, features=features, batch=batch)
    if activation not in ACTIVATIONS:
        raise InputError(f"mlp: activation={activation!r} is unknown; use {' or '.join(ACTIVATIONS)}.")
    kind = check_dtype("mlp", dtype)
    axes = mesh_axes("mlp", mesh, tensor_parallel=False)
    return build(
        loss,
        name="mlp",
        model=lambda rngs: MLP(blocks, features, activation=ACTIVATIONS[activation], dtype=kind, rngs=rngs),
        inputs=lambda key: (jax.random.normal(key, (batch, features), kind),),
        mesh=axes,
    )
