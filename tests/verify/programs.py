"""Small random programs, and random configurations of them: whatever is made here must run, checkpointed or not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rematplan.program.configuration import Configuration, Region, in_every_iteration
from rematplan.program.residuals import with_residuals
from rematplan.program.trace import Traced, trace

SIZE = 4
# Regions inside regions and loops in chunks are refused under JAX's new remat.
REMAT3 = bool(getattr(jax.config, "jax_remat3", False))
NESTED = pytest.mark.skipif(
    REMAT3, reason="JAX_REMAT3=1 does not honour regions inside regions, and plans with them are refused"
)
Array = Any


@jax.custom_jvp
def softplus(x: Array) -> Array:
    return jnp.log1p(jnp.exp(x))


@softplus.defjvp
def _softplus_jvp(primals: Any, tangents: Any) -> Any:
    y = softplus(primals[0])
    return y, (1 - jnp.exp(-y)) * tangents[0]  # reads its own output


@jax.custom_vjp
def damped(x: Array, y: Array) -> Array:
    return jnp.sin(x) * y


def _damped_fwd(x: Array, y: Array) -> Any:
    s = jnp.sin(x)
    return s * y, (s, x, y)


def _damped_bwd(residuals: Any, g: Array) -> Any:
    s, x, y = residuals
    return g * jnp.cos(x) * y, g * s


damped.defvjp(_damped_fwd, _damped_bwd)


def _loop(x: Array, w: Array) -> Array:
    def body(carry: Array, row: Array) -> Any:
        h = jnp.tanh(carry @ w + row)
        e = jnp.exp(h * 0.1)
        return h + e.mean(), e * h

    carry, rows = jax.lax.scan(body, x, jnp.stack([x, x * 0.5, w]))
    return carry + rows.sum(0)


def _dropout(x: Array, key: Array) -> Array:
    keep = jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, x.shape)
    return jnp.where(keep, x * 2, 0.0)


def _branch(x: Array, y: Array) -> Array:
    return jax.lax.cond(x.sum() > 0, lambda a, b: jnp.tanh(a) * b, lambda a, b: a - jnp.exp(b * 0.1), x, y)


def _split(x: Array) -> Array:
    low, high = jnp.split(x, 2, axis=1)
    return jnp.concatenate([jnp.tanh(high), jnp.exp(low * 0.1)], axis=1)


def _ranked(x: Array) -> Array:
    order = jnp.argsort(x, axis=1)  # integers: no derivative
    return jnp.take_along_axis(x, order, axis=1) * (order + 1)


UNARY: dict[str, Callable[[Array], Array]] = {
    "exp": lambda x: jnp.exp(x * 0.1),
    "expm1": lambda x: jnp.expm1(x * 0.1),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
    "sqrt": lambda x: jnp.sqrt(x * x + 1),
    "sin": jnp.sin,
    "log1p": lambda x: jnp.log1p(x * x),
    "power": lambda x: (x * 0.2) ** 3,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softplus": lambda x: softplus(x * 0.1),
    "cumsum": lambda x: jnp.cumsum(x, axis=1) * 0.3,
    "cumlogsumexp": lambda x: jax.lax.cumlogsumexp(x, axis=1),
    "sort": lambda x: jnp.sort(x, axis=0),
    "ranked": lambda x: _ranked(x) * 0.3,
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "normalize": lambda x: (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 0.1),
    "split": _split,
    "transpose": lambda x: x.T,
    "stop": lambda x: x + jax.lax.stop_gradient(jnp.tanh(x)),
    "half": lambda x: jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32),
    "called": jax.jit(lambda x: jnp.tanh(jnp.exp(x * 0.1))),
    "region": jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x))),
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y * 0.5,
    "div": lambda x, y: x / (y * y + 1),
    "max": jnp.maximum,
    "select": lambda x, y: jnp.where(x > 0, y, x * 0.5),
    "dot": lambda x, y: x @ y * 0.3,
    "damped": damped,
    "branch": _branch,
    "loop": lambda x, y: _loop(x, y) * 0.2,
    "update": lambda x, y: jax.lax.dynamic_update_slice(x, y[:2], (1, 0)),
}


def arguments(seed: int) -> tuple[Array, ...]:
    """Two parameters, an input, a key and an integer array."""
    keys = jax.random.split(jax.random.key(seed), 3)
    w, v, x = (jax.random.normal(k, (SIZE, SIZE)) for k in keys)
    return w, v, x, jax.random.key(seed + 1), jnp.arange(SIZE) % 3


def program(seed: int, length: int) -> tuple[Callable[..., list[Array]], tuple[str, ...]]:
    """A function (w, v, x, key, indices) -> [scalar, another result], and the operations that it consists of."""
    rng = random.Random(seed)
    chosen: list[tuple[str, int, int]] = []
    for step in range(length):
        kind = rng.choice([*UNARY, *BINARY, *BINARY, "dropout", "gather"])
        recent = lambda: rng.randrange(max(0, step), step + 3)  # noqa: B023  mostly a chain
        chosen.append((kind, recent(), rng.randrange(step + 3)))

    def function(w: Array, v: Array, x: Array, key: Array, indices: Array) -> list[Array]:
        values = [w, v, x]
        for kind, first, second in chosen:
            a, b = values[first], values[second]
            if kind == "dropout":
                values.append(_dropout(a, key))
            elif kind == "gather":
                values.append(a[indices] * 0.7)
            else:
                values.append(UNARY[kind](a) if kind in UNARY else BINARY[kind](a, b))
        total = sum((jnp.mean(jnp.tanh(value)) for value in values[-3:]), start=jnp.float32(0))
        return [total, values[-1] * 2]

    return function, tuple(kind for kind, _, _ in chosen)


def traced_program(seed: int, length: int) -> tuple[Traced, tuple[Array, ...], tuple[str, ...]]:
    function, kinds = program(seed, length)
    given = arguments(seed)
    return with_residuals(trace(function, given, differentiated=[0, 1])), given, kinds


def configuration(rng: random.Random, traced: Traced, *, in_loop: bool = False) -> Configuration:
    """Random regions that save random values, some inside others, in the bodies of loops too."""
    loops = tuple(
        (index, in_every_iteration(configuration(rng, body, in_loop=True)))
        for index, body in traced.bodies.items()
        if rng.random() < 0.7
    )
    regions = _regions(
        rng, traced, (0, len(traced.graph.operations)), prevent_cse=not in_loop, nesting=0 if REMAT3 else 2
    )
    return Configuration(regions, loops)


def _regions(
    rng: random.Random, traced: Traced, inside: tuple[int, int], *, prevent_cse: bool, nesting: int
) -> tuple[Region, ...]:
    positions = range(inside[0], inside[1] + 1)
    cuts = sorted(rng.sample(positions, k=min(len(positions), rng.choice([2, 2, 3, 4]))))
    regions = []
    for start, stop in itertools.pairwise(cuts):
        if rng.random() < 0.2:
            continue
        inner: tuple[Region, ...] = ()
        if nesting and stop - start > 1 and rng.random() < 0.3:
            inner = _regions(rng, traced, (start, stop), prevent_cse=prevent_cse, nesting=nesting - 1)
        share = rng.choice([0.0, 0.1, 0.5, 1.0])
        outside = [i for i in range(start, stop) if not any(r.start <= i < r.stop for r in inner)]
        values = [v for i in outside for v in traced.graph.operations[i].outputs if _savable(traced, v)]
        saved = frozenset(v for v in values if rng.random() < share)
        regions.append(Region(start, stop, saved, prevent_cse=prevent_cse, inner=inner))
    return tuple(regions)


def _savable(traced: Traced, value: int) -> bool:
    return traced.graph.values[value].bytes > 0 and not traced.graph.values[value].dtype.startswith("key")


def gradients(function: Callable[..., Sequence[Array]], given: Sequence[Array]) -> Any:
    """(results, gradients with respect to the first two arguments), evaluated operation by operation."""

    def loss(w: Array, v: Array) -> Any:
        first, *rest = function(w, v, *given[2:])
        return first, rest

    (value, rest), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(given[0], given[1])
    return [value, *rest], grads
