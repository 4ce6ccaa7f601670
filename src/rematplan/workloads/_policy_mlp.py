"""Two linear layers with relu: the model on which a checkpoint policy shows what it permits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_sizes


class PolicyMLP(nnx.Module):
    def __init__(self, features: int, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        # one stream, in this order: fresh keys for each layer
        self.l1 = nnx.Linear(features, features, dtype=dtype, rngs=rngs)
        self.l2 = nnx.Linear(features, features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.l1(x))  # (B, F)
        return jax.nn.relu(self.l2(x))  # (B, F)


def loss(model: PolicyMLP, x: jax.Array) -> jax.Array:
    """Half the mean square of the output, summed over features."""
    return 0.5 * jnp.mean(jnp.sum(model(x).astype(jnp.float32) ** 2, axis=-1))


def policy_mlp(*, features: int = 1024, batch: int = 8192, dtype: str = "float32") -> Workload:
    """Two layers of `features` x `features` on a batch of vectors."""
    check_sizes("policy_mlp", features=features, batch=batch)
    kind = check_dtype("policy_mlp", dtype)
    return build(
        loss,
        name="policy_mlp",
        model=lambda rngs: PolicyMLP(features, dtype=kind, rngs=rngs),
        inputs=lambda key: (jax.random.normal(key, (batch, features), kind),),
    )
