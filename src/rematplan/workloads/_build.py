"""What the built-in workloads share: shapes from a constructor, losses, and checks of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.errors import InputError
from rematplan.workload import Workload
from rematplan.workloads._layout import batch, parameters

# Random numbers are made once: optimizing that program would take many times longer than running it.
_QUICK_TO_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}


def build(
    loss: Callable[..., jax.Array],
    *,
    name: str,
    model: Callable[[nnx.Rngs], nnx.Module],
    inputs: Callable[[jax.Array], tuple[jax.Array, ...]],
    mesh: Mapping[str, int] | None = None,
) -> Workload:
    """A workload on shapes only.

    Args:
      loss: `loss(model, *inputs)`, a scalar.
      model: makes the model from its random streams.
      inputs: makes the other arguments from a key.
      mesh: sizes of its axes; parameters and inputs lie on it as `_layout` says.
    """

    def make(seed: int) -> tuple[Any, ...]:
        return model(nnx.Rngs(seed)), *inputs(jax.random.key(seed + 1))

    abstract, *shapes = nnx.eval_shape(lambda: make(0))
    structure, _ = nnx.split(abstract)

    def init(seed: int = 0) -> tuple[Any, ...]:
        def arrays() -> tuple[Any, ...]:
            made, *others = make(seed)
            return nnx.split(made)[1], *others

        state, *others = jax.jit(arrays, compiler_options=_QUICK_TO_COMPILE)()
        return nnx.merge(structure, state), *others

    if mesh is None:
        return Workload(loss, abstract, *shapes, init=init, name=name)
    specs = [parameters(mesh), *(batch(mesh) for _ in shapes)]
    return Workload(loss, abstract, *shapes, init=init, name=name, mesh=mesh, specs=specs)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log likelihood of `labels` (N) under `logits` (N, classes), computed in float32."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))  # (N, classes)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1).mean()


def check_sizes(name: str, **sizes: int) -> None:
    """Raises InputError unless every size is a positive whole number."""
    for keyword, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{name}: {keyword}={size!r} is not a positive whole number.")


def check_multiple(name: str, **sizes: int) -> None:
    """Raises InputError unless the first size is a multiple of the second."""
    (first, size), (second, divisor) = sizes.items()
    if size % divisor:
        raise InputError(f"{name}: {first}={size} is not a multiple of {second}={divisor}.")


def check_dtype(name: str, dtype: str) -> jnp.dtype:
    """The floating-point type called `dtype`, or InputError."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise InputError(f"{name}: dtype={dtype!r} is not a floating-point type; use float32, bfloat16 or float16.")
    return found
