"""Real arrays for abstract ones: plausible numbers by dtype and collection. Knows nothing of programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from rematplan.pure import LeafInfo

KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")  # what jax.random.key can make


def random_array(leaf: jax.ShapeDtypeStruct, info: LeafInfo, *, seed: int, position: int) -> jax.Array:
    """An array of this shape and dtype.

    Parameters of two and more dimensions are normal with the spread that keeps activations near one, other parameters
    (biases, scales) and state such as running variances lie between 0.5 and 1.5, where nothing divides by zero; plain
    inputs are normal; integers and booleans are 0, which is a valid index and count.

    Args:
      info: what the array is for.
      seed, position: arrays of one seed differ by position.
    """
    key = jax.random.fold_in(jax.random.key(seed), position)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return random_keys(leaf, seed + position)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(leaf.shape, leaf.dtype)
    dtype = leaf.dtype if jnp.finfo(leaf.dtype).bits >= 16 else jnp.float32  # random bits for 8-bit floats do not exist
    if jnp.issubdtype(dtype, jnp.complexfloating):
        dtype = jnp.zeros((), dtype).real.dtype
    if not info.module:
        values = jax.random.normal(key, leaf.shape, dtype)
    elif len(leaf.shape) < 2 or not info.parameter:
        values = jax.random.uniform(key, leaf.shape, dtype, 0.5, 1.5)
    else:
        values = jax.random.normal(key, leaf.shape, dtype) / math.sqrt(math.prod(leaf.shape[:-1]) or 1)
    return values.astype(leaf.dtype)


def random_keys(leaf: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Keys of this shape, of the implementation that the dtype names.

    Raises:
      ValueError: none of `KEY_IMPLEMENTATIONS` makes keys of this dtype.
    """
    for name in KEY_IMPLEMENTATIONS:
        key = jax.random.key(seed, impl=name)
        if key.dtype == leaf.dtype:
            return jax.random.split(key, leaf.shape) if leaf.shape else key
    raise ValueError(f"no way to make keys of dtype {leaf.dtype}; give the workload real keys, or init=")
