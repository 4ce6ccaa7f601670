"""A size at which a workload's numbers can be computed on this machine's CPU in seconds.

Comes in: a workload and its traced loss. Goes out: `Size`: the lifted loss with real arrays, whole or with fewer examples,
and a text that says which. The batch is what shrinks: the leading dimension that arguments outside the model share.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from rematplan.lift import Lifted
from rematplan.materialize import random_array
from rematplan.program.graph import Graph, Nesting
from rematplan.program.trace import STATEFUL, UNFUNCTIONALIZED, Traced, holds
from rematplan.sharding import mesh_of, mesh_of_devices, own_spec

if TYPE_CHECKING:
    from rematplan.workload import Workload

# Forward, backward and recomputation of the planned program, forward and backward of the plain one, in forward passes.
PASSES = 7
# What two cores compute in a few seconds: they reach 20 to 100 GFLOP/s.
WANTED_FLOPS = 2e11
# More than this takes minutes: then there are no numbers.
MOST_FLOPS = 2e12


@dataclass(frozen=True)
class Size:
    """What numbers can be computed for.

    Attributes:
      lifted: the loss with real arrays as leaves; None if numbers cannot be computed here.
      text: "full", what was reduced, or why there are no numbers.
      mesh: of the devices that the arrays lie on; None for one.
    """

    lifted: Lifted | None
    text: str
    mesh: Mesh | None = None

    def devices(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the arrays' mesh is the one that specs are of."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def fitting(work: Workload, traced: Traced, *, full: bool = False, seed: int = 0) -> Size:
    """The largest size at which both programs run in seconds.

    Args:
      full: no reduction, however long it takes.
      seed: of random arguments.
    """
    lifted = work.lift(scopes=True)
    if holds(traced.graph, STATEFUL):
        return Size(None, "no numbers: lax.rng_uniform draws from a hidden state, other numbers in each run")
    if holds(traced.graph, UNFUNCTIONALIZED):
        return Size(None, "no numbers: checkify.check runs only inside of the step that makes it functional")
    mesh = mesh_of(lifted.leaves)
    if mesh is not None or _spans_devices(traced.graph):
        return _on_devices(work, lifted, traced, mesh, full=full, seed=seed)
    flops = PASSES * sum(op.flops for op in traced.graph.operations)
    if full or flops <= WANTED_FLOPS:
        return Size(_with(lifted, real_leaves(work, lifted, seed)), "full")
    positions, batch = batch_leaves(lifted, work.differentiated)
    cost = f"both programs take {flops:.1e} FLOPs at full size"
    if not positions:
        return Size(None, f"no numbers: {cost}, and no argument outside the model has a batch dimension to reduce")
    smaller = _divisor(batch, flops)
    if flops * smaller / batch > MOST_FLOPS:
        return Size(None, f"no numbers: {cost}, and still {flops * smaller / batch:.1e} with a batch of {smaller}")
    leaves = real_leaves(work, lifted, seed)
    for position in positions:
        leaves[position] = leaves[position][:smaller]
    reduced = _with(lifted, leaves)
    try:
        jax.eval_shape(reduced.pure, *leaves)
    except Exception as error:  # noqa: BLE001  the user's code may refuse another batch size in any way
        return Size(None, f"no numbers: {cost}, and the loss does not take a batch of {smaller} ({error!r:.100})")
    finally:
        jax.eval_shape(lifted.pure, *lifted.leaves)  # what the loss returns is read from its last trace
    return Size(reduced, f"batch reduced from {batch} to {smaller}")


def real_leaves(work: Workload, lifted: Lifted, seed: int) -> list[Any]:
    """Real arrays for the leaves of the loss."""
    if work.make_step is None:
        return work.inputs(seed)[: len(lifted.leaves)]
    # the arguments of the loss inside the user's step are known by shape only
    return [
        random_array(leaf, info, seed=seed, position=i)
        for i, (leaf, info) in enumerate(zip(lifted.leaves, lifted.info, strict=True))
    ]


def batch_leaves(lifted: Lifted, differentiated: Sequence[int]) -> tuple[list[int], int]:
    """The leaves outside modules and outside the differentiated argument that share the most common leading size."""
    parameters = {lifted.info[i].argument for i in differentiated}
    sizes = {
        i: leaf.shape[0]
        for i, (leaf, info) in enumerate(zip(lifted.leaves, lifted.info, strict=True))
        if not info.module and info.argument not in parameters and leaf.shape and leaf.shape[0] > 1
    }
    if not sizes:
        return [], 1
    # of equally common sizes the first argument's
    batch, _ = Counter(sizes.values()).most_common(1)[0]
    return [i for i, size in sizes.items() if size == batch], batch


def _divisor(batch: int, flops: float) -> int:
    """The largest batch that divides the whole one and fits; two examples rather than one, for batch statistics."""
    divisors = [n for n in range(1, batch) if batch % n == 0]
    wanted = [n for n in divisors if flops * n / batch <= WANTED_FLOPS]
    two = [n for n in divisors if n >= 2 and flops * n / batch <= MOST_FLOPS]
    found = max(wanted, default=1)
    return min(two) if found == 1 and two else found


def _with(lifted: Lifted, leaves: Sequence[Any]) -> Lifted:
    return Lifted(lifted.program, leaves, (), None)


def _on_devices(
    work: Workload, lifted: Lifted, traced: Traced, mesh: AbstractMesh | None, *, full: bool, seed: int
) -> Size:
    """Real arrays on as many devices of this machine as the program is for, at full size."""
    if mesh is None:
        return Size(None, "no numbers: the program communicates between devices, and its arguments lie on no mesh")
    here = jax.devices("cpu")
    if len(here) < mesh.size:
        return Size(
            None,
            f"no numbers: the program is for {mesh.size} devices, and this process has {len(here)}; with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} the CPU is so many",
        )
    flops = PASSES * mesh.size * sum(op.flops for op in traced.graph.operations)
    if not full and flops > MOST_FLOPS:
        return Size(None, f"no numbers: both programs take {flops:.1e} FLOPs on {mesh.size} devices")
    real = mesh_of_devices(mesh, here)
    leaves = [
        jax.device_put(leaf, NamedSharding(real, own_spec(like)))
        for leaf, like in zip(real_leaves(work, lifted, seed), lifted.leaves, strict=True)
    ]
    return Size(_with(lifted, leaves), "full", real)


def _spans_devices(graph: Graph) -> bool:
    return any(
        op.primitive == "sharding_constraint"
        or op.collective
        or (op.subprogram is not None and op.subprogram.kind is Nesting.SHARD_MAP)
        for op in graph.operations
    )
