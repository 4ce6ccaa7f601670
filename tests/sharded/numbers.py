"""Run by `test_sharded.py` in a process with eight virtual CPU devices: plans of sharded workloads, made and verified there.

python -m tests.sharded.numbers CASE...
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rematplan as rp
from rematplan import workloads
from rematplan._plan import Plan
from rematplan.naming import describe, module_fingerprints
from rematplan.planner.baselines import baselines
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss

GPT = {"blocks": 2, "features": 32, "heads": 4, "length": 16, "batch": 16, "vocabulary": 64, "dtype": "float32"}
VIT = {"blocks": 2, "features": 32, "heads": 4, "image": 32, "batch": 16, "classes": 16, "dtype": "float32"}


class Regression(nnx.Module):
    """With batch statistics, under explicit axes or `shard_map`."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)


def explicit() -> rp.Workload:
    """Axes that are part of types: the model says where products lie."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P("data", "model")))
        return (jnp.einsum("bf,fd->bd", hidden, w["down"], out_sharding=P("data", None)) ** 2).mean()

    w = {"up": shape((16, 32), mesh, P(None, "model")), "down": shape((32, 16), mesh, P("model", None))}
    return rp.Workload(loss, w, shape((64, 16), mesh, P("data", None)), name="explicit")


def mapped() -> rp.Workload:
    """Collectives written by hand."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def local(w: jax.Array, x: jax.Array) -> jax.Array:
            whole = jax.lax.all_gather(w, "data", axis=0, tiled=True)
            return jax.lax.pmean((jnp.sin(x @ whole) ** 2).mean(), "data")

        return jax.shard_map(local, in_specs=(P("data"), P("data")), out_specs=P())(jnp.tanh(w), jnp.cos(x))

    return rp.Workload(loss, shape((16, 16), mesh, P("data")), shape((64, 16), mesh, P("data")), name="mapped")


def statistics() -> rp.Workload:
    """State that changes and belongs to the whole batch."""

    def loss(model: Regression, x: jax.Array) -> jax.Array:
        return (model.down(jnp.sin(model.norm(model.up(x)))) ** 2).mean()

    model = nnx.eval_shape(lambda: Regression(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    columns = {"up/kernel": P(None, "model"), "up/bias": P("model"), "down/kernel": P("model", None)}
    return rp.Workload(loss, model, x, mesh={"data": 4, "model": 2}, specs=[columns, P("data")], name="statistics")


def shape(dimensions: tuple[int, ...], mesh: AbstractMesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, jnp.float32, sharding=NamedSharding(mesh, spec))


CASES: dict[str, Callable[[], rp.Workload]] = {
    "fsdp": lambda: workloads.gpt(**GPT, mesh="fsdp:8"),
    "fsdp and tensor": lambda: workloads.gpt(**GPT, mesh="fsdp:4,model:2"),
    "scan": lambda: workloads.scan_gpt(**GPT, mesh="fsdp:4,model:2"),
    "data parallel vit": lambda: workloads.vit(**VIT, mesh="data:8"),
    "statistics": statistics,
    "explicit": explicit,
    "mapped": mapped,
}


BOTH = ("fsdp and tensor", "statistics")  # whose regions also run while they save something


def by_hand(work: rp.Workload, name: str) -> Plan:
    """A hand-written configuration as a plan."""
    traced = traced_loss(work)
    found = {b.name: b.configuration for b in baselines(traced.graph)}
    whole = Configuration((Region(0, len(traced.equations)),))  # where there are no modules
    configuration = found.get(name, whole)
    regions, loops = describe(configuration, traced.graph, {i: b.graph for i, b in traced.bodies.items()})
    return Plan(regions, loops, fingerprint=traced.graph.fingerprint, modules=module_fingerprints(traced.graph))


def main() -> None:
    """Prints one line for each case; the exit status is 1 if one fails."""
    assert jax.device_count() == 8
    passed = True
    for case in sys.argv[1:] or CASES:
        work = CASES[case]()
        for name in ("per-block", "dots") if case in BOTH else ("per-block",):
            found = rp.verify(work, plan=by_hand(work, name), scale="full")
            passed = passed and found.passed and found.gradients_max_error is not None
            result = "equal" if found.passed else "DIFFERENT"
            sys.stdout.write(f"{result}: {case}, {name}: {found.gradients_max_error} {found.differences}\n")
    if not sys.argv[1:]:
        passed = run_here() and passed
    sys.exit(not passed)


def run_here() -> bool:
    """Whether what runs on these devices needs what is compiled for absent ones."""
    equal = True
    for case in ("fsdp and tensor", "mapped"):
        for policy in ("plain", "dots_saveable"):
            run, compiled = (rp.measure(CASES[case](), target=t, policy=policy) for t in ("local", "cpu:8"))
            here = (run.devices, run.argument_bytes, run.required_bytes)
            same = here == (8, compiled.argument_bytes, compiled.required_bytes)
            equal = equal and same and bool(run.seconds)
            sys.stdout.write(f"{'run' if same else 'DIFFERENT'}: {case}, {policy}: {here}\n")
    return equal


if __name__ == "__main__":
    main()
