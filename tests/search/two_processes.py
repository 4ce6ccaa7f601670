"""Run twice at the same time by `test_multihost.py`: a process of a multi-controller run on CPUs that plans and trains.

python -m tests.search.two_processes INDEX PORT CASE
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rematplan as rp
from rematplan import multihost, search
from rematplan.errors import RematplanError

F, BATCH = 32, 512


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(F, 4 * F, rngs=rngs)
        self.down = nnx.Linear(4 * F, F, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, blocks: int, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def train(loss_fn, mesh: jax.sharding.Mesh) -> list[np.ndarray]:
    """Two steps of gradient descent, the batch over the devices of all processes: losses and parameters."""
    everywhere = NamedSharding(mesh, P())
    graph, state = nnx.split(Model(3, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda a: jax.device_put(a, everywhere), state)
    values = np.linspace(-1, 1, BATCH * F, dtype=np.float32).reshape(BATCH, F)
    part = BATCH // jax.process_count()
    mine = values[jax.process_index() * part :][:part]
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)

    @jax.jit
    def step(state, x):
        value, gradients = jax.value_and_grad(lambda state, x: loss_fn(nnx.merge(graph, state), x))(state, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)

    losses = []
    for _ in range(2):
        value, state = step(state, x)
        losses.append(value)
    return [np.asarray(a) for a in (*losses, *jax.tree.leaves(state))]


# The last one leaves the processes at different calls.
CASES = ("same", "model", "batch", "budget", "infeasible", "trace", "crash", "late")


def ask(index: int, case: str) -> rp.Plan:
    """A plan, asked for in a way of which something is wrong on one process or on both."""
    blocks = 4 if case == "model" and index == 1 else 3
    batch = BATCH // 2 if case == "batch" and index == 1 else BATCH
    budget = {"budget": "1MiB" if index else "1700KiB", "infeasible": "10KiB"}.get(case, "1700KiB")
    function = broken if case == "trace" and index == 1 else loss
    model = nnx.eval_shape(lambda: Model(blocks, rngs=nnx.Rngs(0)))
    work = rp.Workload(function, model, jax.ShapeDtypeStruct((batch, F), "float32"))
    if case == "late":
        multihost.ARRIVAL_SECONDS = 2.0
        if index == 1:
            raise InterruptedError("it never asks")
    with pytest.MonkeyPatch.context() as patch:
        if case == "crash" and index == 0:
            patch.setattr(search, "_search", crash)
        return rp.plan(work, budget=budget, target="cpu")


def broken(model: Model, x: jax.Array) -> jax.Array:
    raise ZeroDivisionError("in the user's model")


def crash(*_arguments):
    raise OSError("no space left on device")


def what_comes(index: int, case: str) -> dict:
    try:
        plan = ask(index, case)
    except (RematplanError, ArithmeticError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    planned, plain = train(rp.remat(loss, plan=plan), mesh), train(loss, mesh)
    for a, b in zip(planned, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    return {
        "plan": json.dumps(plan.to_json()),
        "regions": len(plan.regions),
        "measured_here": plan.measurement is not None,
        "losses": [float(value) for value in planned[:2]],
    }


def main() -> None:
    index, port = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    for case in CASES:
        sys.stdout.write(json.dumps({"case": case, **what_comes(index, case)}) + "\n")
        sys.stdout.flush()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
