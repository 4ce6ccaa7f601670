"""Train steps as scripts have them: accumulation, scans, loss scaling, averages of parameters, several calls of the loss.

Each `Case` trains the same small model with BatchNorm and Dropout. `train(loss_fn)` runs three steps of it from the same
start and returns everything that training changes, so that a planned loss can be compared with the plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rematplan as rp
from rematplan import policies
from rematplan._plan import Plan
from rematplan.naming import describe
from rematplan.program.loss import traced_loss

F, B, STEPS = 16, 64, 3
RNGS = nnx.Rngs


class Block(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.up = nnx.Linear(F, 4 * F, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * F, use_bias=False, momentum=0.9, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(4 * F, F, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.drop(nnx.gelu(self.norm(self.up(x)))))  # (B, F)


class Model(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.blocks = nnx.List([Block(rngs, dtype) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Half(Model):
    """Parameters in float32, computation in float16, whose gradients overflow and vanish."""

    def __init__(self, rngs):
        super().__init__(rngs, jnp.float16)


def loss_fn(model, x):
    return jnp.mean((model(x).astype(jnp.float32) - jnp.roll(x, 1, axis=0)) ** 2)


def loss_with_metrics(model, x):
    """Two losses with weights, and what is logged."""
    y = model(x).astype(jnp.float32)
    distance, size = jnp.mean((y - jnp.roll(x, 1, axis=0)) ** 2), jnp.mean(jnp.abs(y))
    return distance + 0.1 * size, {"distance": distance, "size": size}


@dataclass(frozen=True)
class Case:
    """A train step.

    Attributes:
      make_step: as `Workload(step=)` takes it.
      state: what training changes, made anew: the step's first arguments.
      batches: one for each step, the step's last arguments.
      scale: of the loss, after three steps of which one overflows.
      returns_state: whether the step returns its new state in place of changing modules; the last result is for the log.
    """

    name: str
    make_step: Callable[..., Any]
    state: Callable[[], tuple[Any, ...]]
    batches: Callable[[int], tuple[Any, ...]] = lambda i: (batch(i),)
    loss_fn: Callable[..., Any] = loss_fn
    returns_state: bool = False
    scale: float | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.state(), *self.batches(0))

    def arrays_before(self) -> list[jax.Array]:
        return arrays(self.state())

    def train(self, loss_fn: Callable[..., Any]) -> tuple[list[Any], list[Any], dict[str, int]]:
        """What the steps log, the arrays of the state after them, and what the compiler says of the step's memory."""
        state, logged = self.state(), []
        step = compiled(self.make_step(loss_fn), (*state, *self.batches(0)))
        for i in range(STEPS):
            out = step(*state, *self.batches(i))
            if self.returns_state:
                *state, out = out
            logged += jax.tree.leaves(out)
        return logged, arrays(state), memory(step)


def compiled(step: Any, arguments: tuple[Any, ...]) -> Any:
    """A step that the user jitted. XLA:CPU merges a recomputation with its original unless told not to."""
    return step.lower(*arguments).compile({"xla_disable_hlo_passes": "cse_barrier_expander"})


def memory(step: Any) -> dict[str, int]:
    found = step.memory_analysis()
    return {part: getattr(found, f"{part}_size_in_bytes") for part in ("argument", "output", "alias", "temp")}


def per_block(work: rp.Workload) -> Plan:
    """A region around every block, as a plan."""
    traced = traced_loss(work)
    bodies = {index: body.graph for index, body in traced.bodies.items()}
    regions, loops = describe(policies.by_name(traced.graph, "per-block").configuration, traced.graph, bodies)
    assert len(regions) >= 2
    return Plan(regions=regions, loops=loops, fingerprint=traced.graph.fingerprint)


def batch(seed: int, size: int = B) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(size, F)), jnp.float32)


def arrays(state: Any) -> list[jax.Array]:
    """The arrays in modules and pytrees, keys as numbers."""
    leaves = jax.tree.leaves([nnx.state(s) if isinstance(s, nnx.Module) else s for s in state])
    return [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in leaves]


def adam() -> optax.GradientTransformation:
    # a large epsilon: where a gradient is zero but for rounding, Adam would make a step of the rounding
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 1, 10), eps=1e-4)


def with_optimizer(tx: optax.GradientTransformation, cls: type = Model) -> Callable[[], tuple[Any, ...]]:
    def state():
        model = cls(RNGS(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    return state


# ------------------------------------------------------------------------------------------------------- accumulation


def accumulating_loop(loss_fn):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        total, losses = None, []
        for part in jnp.split(x, 2):  # 2 of (B / 2, F)
            value, gradients = nnx.value_and_grad(loss_fn)(model, part)
            total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
            losses.append(value)
        optimizer.update(model, jax.tree.map(lambda g: g / 2, total))
        return jnp.stack(losses).mean()

    return step


def accumulating_nnx_scan(loss_fn):
    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model, optimizer, x):
        def accumulate(carry, part):
            total, model = carry
            value, gradients = nnx.value_and_grad(loss_fn)(model, part)
            return (jax.tree.map(jnp.add, total, gradients), model), value

        zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        (total, _), losses = nnx.scan(accumulate, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
            (zeros, model), x.reshape(4, -1, F)
        )
        optimizer.update(model, jax.tree.map(lambda g: g / 4, total))
        return losses.mean()

    return step


def split_state():
    """Parameters, other state, Adam's state, as plain pytrees."""
    _, params, rest = nnx.split(Model(RNGS(0)), nnx.Param, ...)
    return params, rest, adam().init(params)


def accumulating_lax_scan(loss_fn):
    graphdef, _, _ = nnx.split(nnx.eval_shape(lambda: Model(RNGS(0))), nnx.Param, ...)

    def of_state(params, rest, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        value = loss_fn(model, x)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, rest, opt_state, x):
        def accumulate(carry, part):
            total, rest = carry
            (value, rest), gradients = jax.value_and_grad(of_state, has_aux=True)(params, rest, part)
            return (jax.tree.map(jnp.add, total, gradients), rest), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        (total, rest), losses = jax.lax.scan(accumulate, (zeros, rest), x.reshape(4, -1, F))
        gradients = jax.tree.map(lambda g: g / 4, total)
        updates, opt_state = adam().update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, losses.mean()

    return step


def every_second_step() -> optax.GradientTransformation:
    return optax.MultiSteps(adam(), every_k_schedule=2).gradient_transformation()


# ------------------------------------------------------------------------------------------------------- loss scaling


class LossScale(nnx.Module):
    """Dynamic: halved after an overflow, doubled after two steps without."""

    def __init__(self):
        self.scale = nnx.Variable(jnp.float32(2.0**12))
        self.good = nnx.Variable(jnp.int32(0))

    def update(self, finite):
        grow = self.good[...] == 1
        bigger = jnp.where(grow, 2.0, 1.0)
        self.scale[...] = self.scale[...] * jnp.where(finite, bigger, 0.5)
        self.good[...] = jnp.where(finite & ~grow, self.good[...] + 1, 0)


def all_finite(tree):
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def overflowing(i: int) -> tuple[jax.Array, ...]:
    """The second batch is too large for float16."""
    return (batch(i) * (1e6 if i == 1 else 1.0),)


def scaled_with_where(loss_fn):
    @nnx.jit(donate_argnums=(0, 1, 2))
    def step(model, optimizer, scaling, x):
        trained = nnx.Not(nnx.RngState)  # keys of Dropout go on, whatever becomes of the step
        before = jax.tree.map(lambda array: array, nnx.state((model, optimizer), trained))  # Variables of its own
        scale = scaling.scale[...]
        scaled = lambda model, x: loss_fn(model, x) * scale
        value, gradients = nnx.value_and_grad(scaled)(model, x)
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        finite = all_finite(gradients)
        optimizer.update(model, gradients)
        nnx.update(
            (model, optimizer),
            jax.tree.map(lambda new, old: jnp.where(finite, new, old), nnx.state((model, optimizer), trained), before),
        )
        scaling.update(finite)
        return {"loss": value / scale, "finite": finite}

    return step


def scaled_with_cond(loss_fn):
    graphdef, _, _ = nnx.split(nnx.eval_shape(lambda: Half(RNGS(0))), nnx.Param, ...)

    def scaled(params, rest, scale, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        value, metrics = loss_fn(model, x)
        return value * scale, (metrics, nnx.state(model, nnx.Not(nnx.Param)))

    @functools.partial(jax.jit, donate_argnames=("params", "rest", "opt_state", "scale"))
    def step(params, rest, opt_state, scale, x):
        (_, (metrics, new)), gradients = jax.value_and_grad(scaled, has_aux=True)(params, rest, scale, x)
        gradients = jax.tree.map(lambda g: g / scale, gradients)

        def update(_):
            updates, opt = adam().update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), new, opt, scale * 2

        def skip(_):
            return params, rest, opt_state, scale / 2

        finite = all_finite(gradients)
        return *jax.lax.cond(finite, update, skip, None), (metrics, finite)

    return step


def split_half():
    _, params, rest = nnx.split(Half(RNGS(0)), nnx.Param, ...)
    return params, rest, adam().init(params), jnp.float32(2.0**12)


# ----------------------------------------------------------------------------------------------- averages of parameters


def averaging(loss_fn):
    @nnx.jit(donate_argnums=(0, 1, 2))
    def step(model, optimizer, average, x):
        (value, metrics), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
        optimizer.update(model, gradients)
        slow = lambda old, new: 0.99 * old + 0.01 * new
        nnx.update(average, jax.tree.map(slow, nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)))
        return value, metrics

    return step


def with_average():
    model, optimizer = with_optimizer(clipped())()
    return model, optimizer, jax.tree.map(jnp.copy, nnx.clone(model))  # no buffer is donated twice


def clipped() -> optax.GradientTransformation:
    """Clipped by the global norm, with weight decay for matrices alone."""
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4, weight_decay=0.1, mask=mask))


def not_donating(loss_fn):
    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, gradients)
        return value

    return step


# ------------------------------------------------------------------------------------------- several calls of the loss


def several_batches(loss_fn):
    """Two batches in one gradient, and the loss once more after the update, without one."""

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x, y):
        both = lambda model: loss_fn(model, x) + 0.5 * loss_fn(model, y)
        value, gradients = nnx.value_and_grad(both)(model)
        optimizer.update(model, gradients)
        return value, loss_fn(model, x[: B // 4])

    return step


CASES = [
    Case("accumulation in a loop", accumulating_loop, with_optimizer(adam())),
    Case("accumulation in nnx.scan", accumulating_nnx_scan, with_optimizer(adam())),
    Case("accumulation in lax.scan", accumulating_lax_scan, split_state, returns_state=True),
    Case("optax.MultiSteps, nothing donated", not_donating, with_optimizer(every_second_step())),
    Case(
        "loss scaling with where",
        scaled_with_where,
        lambda: (*with_optimizer(adam(), Half)(), LossScale()),
        batches=overflowing,
        scale=2.0**11,
    ),
    Case(
        "loss scaling with cond",
        scaled_with_cond,
        split_half,
        batches=overflowing,
        loss_fn=loss_with_metrics,
        returns_state=True,
        scale=2.0**13,
    ),
    Case("average, clipping, masked decay", averaging, with_average, loss_fn=loss_with_metrics),
    Case(
        "batches of several shapes",
        several_batches,
        with_optimizer(adam()),
        batches=lambda i: (batch(2 * i, B // 2), batch(2 * i + 1)),
    ),
]
