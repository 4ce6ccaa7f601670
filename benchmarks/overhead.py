"""What a plan costs the user: time to trace a planned step, and time of a planned step against the same by hand.

    python -m benchmarks.overhead

Tracing: `jax.jit(value_and_grad(loss)).trace`, caches cleared, the median of several turns that alternate, in CPU seconds
of this process. Running: one region per block, by a plan and by `nnx.remat` on each block, compiled for this machine with
the option that makes XLA:CPU honour regions; the median over turns that alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.naming import describe
from rematplan.planner.baselines import baselines
from rematplan.program.configuration import Configuration
from rematplan.program.loss import traced_loss
from rematplan.workloads import _gpt

TURNS = 7
HONOUR_REGIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def per_block_plan(work: rp.Workload, *, saving: str = "") -> rp.Plan:
    """One region per block; `saving` is the primitive whose results are saved."""
    traced = traced_loss(work)
    graph = traced.graph
    found = next(b.configuration for b in baselines(graph) if b.name == "per-block")
    regions = tuple(
        type(r)(
            r.start,
            r.stop,
            frozenset(o for op in graph.operations[r.start : r.stop] if op.primitive == saving for o in op.outputs),
        )
        for r in found.regions
    )
    named, loops = describe(Configuration(regions), graph, {})
    return rp.Plan(regions=named, loops=loops, fingerprint=graph.fingerprint)


def pure(loss_fn: Callable[..., Any], model: Any) -> tuple[Callable[..., Any], Any]:
    """Loss and gradients as a function of parameters and batch."""
    structure, parameters = nnx.split(model)

    def loss(parameters: Any, *batch: Any) -> Any:
        return loss_fn(nnx.merge(structure, parameters, copy=True), *batch)

    return jax.value_and_grad(loss), parameters


def tracing(console: Console) -> None:
    """Seconds to trace the plain and the planned step."""
    table = Table("workload", "plain CPU s", "planned CPU s", "ratio")
    for blocks in (6, 24):
        work = workloads.gpt(blocks=blocks)
        plan = per_block_plan(work, saving="reduce_max")
        # a fresh wrapper each turn: one that was used before has its traced program already
        variants = {"plain": lambda w=work: w.loss_fn, "planned": lambda w=work, p=plan: rp.remat(w.loss_fn, plan=p)}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(TURNS):
            for name, loss_fn in variants.items():
                step, parameters = pure(loss_fn(), work.args[0])
                jax.clear_caches()
                begun = time.process_time()
                jax.jit(step).trace(parameters, *work.args[1:])
                times[name].append(time.process_time() - begun)
        plain, planned = (statistics.median(times[name]) for name in variants)
        table.add_row(f"gpt, {blocks} blocks", f"{plain:.2f}", f"{planned:.2f}", f"{planned / plain:.2f}")
    console.print(table)


def running(console: Console) -> None:
    """Milliseconds of a step with one region per block, planned and by hand."""
    work = workloads.gpt(blocks=4, features=128, heads=4, length=128, batch=8, vocabulary=1024)
    (model, *batch), _ = work.materialize()
    steps = {"planned": pure(rp.remat(work.loss_fn, plan=per_block_plan(work)), model)[0]}
    call = _gpt.Block.__call__
    _gpt.Block.__call__ = nnx.remat(call)
    try:
        by_hand, parameters = pure(work.loss_fn, model)
        compiled = {"by hand": jax.jit(by_hand, compiler_options=HONOUR_REGIONS).lower(parameters, *batch).compile()}
    finally:
        _gpt.Block.__call__ = call
    compiled["planned"] = jax.jit(steps["planned"], compiler_options=HONOUR_REGIONS).lower(parameters, *batch).compile()
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(3 * TURNS):
        for name, step in compiled.items():
            begun = time.perf_counter()
            jax.block_until_ready(step(parameters, *batch))
            times[name].append(time.perf_counter() - begun)
    table = Table("step", "ms", "temporaries MiB")
    for name, step in compiled.items():
        memory = step.memory_analysis()
        table.add_row(name, f"{statistics.median(times[name]) * 1e3:.1f}", f"{memory.temp_size_in_bytes / 2**20:.1f}")
    console.print(table)
    console.print(f"ratio {statistics.median(times['planned']) / statistics.median(times['by hand']):.3f}")


if __name__ == "__main__":
    shown = Console()
    tracing(shown)
    running(shown)
