"""Two flat programs of the same inputs -> how far their outputs, gradients and state lie apart, computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from rematplan import _jax_private, step
from rematplan.lift import Lifted
from rematplan.sharding import mesh_of

# Without the first, XLA:CPU drops the barriers of checkpoint regions and merges recomputation with the original; without
# the second, a fusion may leave out roundings to bfloat16, and what is fused differs between the programs (jaxlib 0.10.2).
CPU_OPTIONS: dict[str, Any] = {"xla_disable_hlo_passes": "cse_barrier_expander", "xla_allow_excess_precision": False}
# Errors are relative to an array's largest magnitude. Checkpointing changes no operation, and with these options the
# built-in models agree to the last bit. Where the compiler fuses sums in another order, float32 differs by 5e-7 on deep
# models and bfloat16, whose one rounding is 2**-8, by a few of those. Each limit lies well above and far below what a
# wrong value does.
_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
_NARROW = 1e-1  # 8-bit floats
# An array whose true value is zero, such as the gradient of a key bias in attention or of a bias before a BatchNorm, is
# rounding noise of terms that cancel. It is measured against this share of the largest magnitude among all arrays of its kind,
# or against a larger one, at which the tolerance is some rounding errors of that magnitude; but only if it is seen to be noise:
# the difference is no more than a few times what one rounding of every input does to that array.
NOISE_SHARE = 1e-2
MOST_NOISE_SHARE = 1e-1
ROUNDINGS = 8


@dataclass(frozen=True)
class Agreement:
    """How far two programs lie apart, relative to the largest magnitude of each array.

    Attributes:
      outputs_max_error, gradients_max_error, state_max_error: the largest over all arrays.
      differences: arrays that differ by more than the tolerance, one sentence each.
    """

    outputs_max_error: float
    gradients_max_error: float
    state_max_error: float
    differences: tuple[str, ...]


def tolerance_of(dtypes: Sequence[str]) -> tuple[str, float]:
    """The narrowest floating type among `dtypes` and its tolerance.

    A float32 gradient that was computed in bfloat16 is as exact as bfloat16.
    """
    floating = [d for d in dtypes if jnp.issubdtype(_dtype(d), jnp.inexact)]
    real = [{"complex64": "float32", "complex128": "float64"}.get(d, d) for d in floating] or ["float32"]
    worst = max(set(real), key=lambda d: (_TOLERANCES.get(d, _NARROW), d))
    return worst, _TOLERANCES.get(worst, _NARROW)


def compare(
    lifted: Lifted,
    planned: Callable[..., list[Any]],
    differentiated: tuple[int, ...],
    *,
    tolerance: float,
    dtype: str = "float32",
) -> Agreement:
    """Runs loss, gradients and state of a program as it is and planned, with recomputation really done.

    Args:
      lifted: the loss with real arrays.
      planned: the same flat function under a plan.
      dtype: the narrowest floating type that the program computes in.
    """
    leaves = list(lifted.leaves)
    if mesh_of(leaves) is None:
        leaves = jax.device_put(leaves, jax.devices("cpu")[0])
    one, infos = _run(lifted, lifted.pure, differentiated, leaves)
    two, _ = _run(lifted, planned, differentiated, leaves)
    errors = {"outputs": 0.0, "gradients": 0.0, "state": 0.0}
    kinds = {"loss": "outputs", "aux": "outputs", "gradient": "gradients", "state": "state"}
    largest = dict.fromkeys(errors, 0.0)
    for a, info in zip(one, infos, strict=True):
        if np.issubdtype(a.dtype, np.inexact) and a.size:
            kind = kinds[info.kind]
            largest[kind] = max(largest[kind], _magnitude(a))
    noise = _noise_share(lifted, tolerance)
    found, doubtful = [], list[int]()
    for index, (a, b, info) in enumerate(zip(one, two, infos, strict=True)):
        kind = kinds[info.kind]
        error = _error(a, b, floor=noise * largest[kind])
        errors[kind] = max(errors[kind], error)
        exact = not np.issubdtype(a.dtype, np.inexact)
        if error > (0.0 if exact else tolerance):
            found.append(f"{info.kind} {info.path or 'value'} differs by {error:.1e}, allowed is {tolerance:.0e}")
        elif _error(a, b, floor=0.0) > tolerance:
            doubtful.append(index)
    if doubtful:
        rounded, _ = _run(lifted, lifted.pure, differentiated, _rounded(leaves, dtype))
        for index in doubtful:
            a, b, info = one[index], two[index], infos[index]
            difference, rounding = _magnitude(b - a), _magnitude(rounded[index] - a)
            if difference > ROUNDINGS * rounding:
                error = _error(a, b, floor=0.0)
                kind = kinds[info.kind]
                errors[kind] = max(errors[kind], error)
                found.append(
                    f"{info.kind} {info.path or 'value'} differs by {error:.1e}, allowed is {tolerance:.0e}; it is small, but "
                    f"more than rounding: one rounding of every input changes it by {rounding / (_magnitude(a) or 1.0):.1e}"
                )
    return Agreement(errors["outputs"], errors["gradients"], errors["state"], tuple(found))


def _rounded(leaves: Sequence[Any], dtype: str) -> list[Any]:
    """Every inexact array with each element one rounding off, up or down by a fixed random choice."""
    made = []
    for index, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            made.append(leaf)
            continue
        size = max(float(jnp.finfo(_dtype(dtype)).eps), float(jnp.finfo(leaf.dtype).eps))
        sign = jax.random.rademacher(jax.random.key(index), leaf.shape, jnp.float32)
        made.append((leaf * (1 + size * sign)).astype(leaf.dtype))
    return made


def _noise_share(lifted: Lifted, tolerance: float) -> float:
    dtypes = [jnp.dtype(leaf.dtype) for leaf in lifted.leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    coarsest = max((float(jnp.finfo(d).eps) for d in dtypes), default=0.0)
    return min(max(NOISE_SHARE, ROUNDINGS * coarsest / tolerance), MOST_NOISE_SHARE)


def _run(
    lifted: Lifted, function: Callable[..., list[Any]], differentiated: tuple[int, ...], leaves: Sequence[Any]
) -> tuple[list[np.ndarray], tuple[Any, ...]]:
    # Traced by itself first: under `grad`, state that the model's own region hands through unchanged may be no output, and
    # both have to give the same. A new function each time: what the loss returns is read from its last trace.
    flat = jex.jaxpr_as_fun(jax.make_jaxpr(lambda *given: function(*given))(*leaves))
    made = step.value_and_grad(lifted, lambda *given: list(flat(*given)), differentiated)
    results = jax.jit(made.function, compiler_options=_options())(*leaves)
    return [_numpy(r) for r in results], made.outputs()


def _options() -> dict[str, Any]:
    """Under JAX's new remat XLA:CPU dies of a barrier in a loop (jaxlib 0.10.2): there recomputation may be merged."""
    merged = ("xla_disable_hlo_passes",) if _jax_private.new_remat() else ()
    return {name: value for name, value in CPU_OPTIONS.items() if name not in merged}


def _numpy(array: Any) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    if jnp.issubdtype(array.dtype, jnp.floating):
        return np.asarray(array).astype(np.float64)
    return np.asarray(array)


def _magnitude(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def _error(a: np.ndarray, b: np.ndarray, *, floor: float) -> float:
    """Largest difference relative to the largest magnitude; infinite where shapes or non-finite elements differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not np.issubdtype(a.dtype, np.inexact):
        return 0.0 if np.array_equal(a, b) else float("inf")
    odd = ~np.isfinite(a) | ~np.isfinite(b)
    if not np.array_equal(a[odd], b[odd], equal_nan=True):
        return float("inf")
    difference = _magnitude(np.where(odd, 0, a) - np.where(odd, 0, b))
    return difference / max(_magnitude(a), floor) if difference else 0.0


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:  # random keys and tokens
        return jnp.dtype("int32")
