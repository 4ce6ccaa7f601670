"""Plans against every hand-written configuration: time saved in the same memory, memory saved in the same time.

    python -m benchmarks.suite                                        # everything: hours on two quiet cores
    python -m benchmarks.suite --only gpt --target gpu-h100

All figures are of full compiles, on TPU with the budget as the compiler's limit. A frontier is drawn first; then a plan is
made at the need of every configuration that no other hand-written one beats in both. `time` is the fastest plan's that needs
no more than the configuration, as a share of the configuration's time; `memory` the smallest plan's that is no slower, as a
share of its need. A row holds if its plan is no slower (1 % for ties). `errors` are predictions before each plan's own compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.errors import CompilerError, InfeasibleBudget
from rematplan.target.measurement import Measurement

MIB = 1 << 20
TIE = 1.01
TARGETS = ("tpu-v5e", "tpu-v6e", "gpu-h100", "gpu-a100")
FRONTIER_POINTS = 8


def mamba(layers: int = 12) -> rp.Workload:
    """Mamba2 of the package mamba2-jax, layers of 512, sequences of 512."""
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM  # a published model; not a dependency

    config = Mamba2Config(vocab_size=8192, hidden_size=512, state_size=64, chunk_size=128, num_hidden_layers=layers)

    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return model(input_ids=tokens, labels=tokens)["loss"]

    def init(seed: int) -> tuple[Any, jax.Array]:
        tokens = jax.random.randint(jax.random.key(seed), (8, 512), 0, config.vocab_size)
        return Mamba2ForCausalLM(config, rngs=nnx.Rngs(seed)), tokens

    return rp.Workload(loss, *nnx.eval_shape(lambda: init(0)), init=init, name="mamba")


MAKERS: dict[str, Callable[..., rp.Workload]] = {
    "mlp": workloads.mlp,
    "gpt": workloads.gpt,
    "gpt 12": lambda: workloads.gpt(blocks=12),
    "vit": workloads.vit,
    "unet": workloads.unet,
    "resnet": workloads.resnet,
    "scan_gpt": lambda: workloads.scan_gpt(blocks=24),
    "mamba": mamba,
}
# A full compile of these at their own sizes takes a TPU compiler three to five minutes of CPU, and this table takes some
# twenty of them: fewer blocks, and fewer kinds of convolutions on as many pixels.
TPU_SIZES: dict[str, dict[str, Any]] = {
    "vit": {"blocks": 2},
    "resnet": {"blocks": (1, 1), "image": 64, "batch": 256},
    "unet": {"blocks": 1, "levels": 2, "image": 32, "batch": 128},
    "mamba": {"layers": 4},
}
# A compile of it for v6e was stopped after 330 s of CPU with dropout, and took 216 without.
V6E_SIZES: dict[str, dict[str, Any]] = {"vit": {"dropout": 0.0}}


@dataclass(frozen=True)
class Point:
    """A plan that was compiled, and what was predicted for it."""

    need: int
    seconds: float
    predicted_need: int
    predicted_seconds: float


@dataclass(frozen=True)
class Outcome:
    """One configuration against the plans."""

    time: float
    memory: float | None  # none if no plan is as fast
    holds: bool


def against(console: Console, name: str, target: str) -> list[Outcome]:
    """One table: a workload on a target."""
    sizes = TPU_SIZES.get(name, {}) if target.startswith("tpu") else {}
    if target.startswith("tpu-v6e"):
        sizes = {**sizes, **V6E_SIZES.get(name, {})}
    work = MAKERS[name](**sizes)
    shown = " ".join((name, *(f"{k}={v}" for k, v in sizes.items())))
    begun = time.monotonic()
    rows = sorted(rp.compare(work, target=target).rows, key=lambda r: r.measurement.required_bytes)
    compared = time.monotonic() - begun
    begun = time.monotonic()
    frontier = rp.frontier(work, target=target, points=FRONTIER_POINTS)
    drawn = time.monotonic() - begun
    compiled = [_point(rp.Plan.load(p.plan), p.measurement) for p in frontier.points]
    points = [p for p in compiled if p is not None]
    for row in rows:
        if not _beaten(row, rows):
            try:
                plan = rp.plan(work, budget=row.measurement.required_bytes, target=target)
            except InfeasibleBudget:
                continue
            point = _point(plan, plan.measurement)
            points += [point] if point is not None else []
    table = Table(
        "configuration", "needs", "ms", "plan needs", "plan ms", "time", "memory", "holds", title=f"{shown} on {target}"
    )
    outcomes = []
    for row in rows:
        outcome, cells = _row(row, points)
        outcomes.append(outcome)
        table.add_row(row.name, *cells)
    console.print(table)
    if not points:
        console.print("no plan was compiled")
        return outcomes
    needs = [abs(p.predicted_need / p.need - 1) for p in points]
    times = [abs(p.predicted_seconds / p.seconds - 1) for p in points]
    console.print(
        f"time: median {median(o.time for o in outcomes):.3f}, worst {max(o.time for o in outcomes):.3f}; memory: median "
        f"{median(_known(outcomes)):.3f}, worst {max(_known(outcomes)):.3f}; "
        f"{sum(o.holds for o in outcomes)} of {len(outcomes)} rows hold"
    )
    console.print(
        f"errors of {len(points)} plans: need median {median(needs):.1%}, worst {max(needs):.1%}; time median "
        f"{median(times):.1%}, worst {max(times):.1%}"
    )
    console.print(
        f"{len(rows)} configurations compiled in {compared:.0f} s, {compared / len(rows):.0f} s each; frontier of "
        f"{len(frontier.points)} points in {drawn:.0f} s"
    )
    return outcomes


def _known(outcomes: list[Outcome]) -> list[float]:
    return [o.memory for o in outcomes if o.memory is not None] or [1.0]


def _point(plan: rp.Plan, m: Measurement | None) -> Point | None:
    """The plan's figures, if it was compiled."""
    if m is None or m.source.value not in ("compiled", "run") or m.seconds is None:
        return None
    return Point(m.required_bytes, m.seconds, plan.predicted["required_bytes"], plan.predicted["seconds"])


def _beaten(row: rp.Row, rows: list[rp.Row]) -> bool:
    """Whether another hand-written configuration needs no more, takes no longer, and is better in one.

    What the compiler rematerializes by itself beats none: no plan is made of that.
    """
    a = (row.measurement.required_bytes, row.measurement.seconds or 0.0)
    others = [(r.measurement.required_bytes, r.measurement.seconds or 0.0) for r in rows if r.name != "compiler"]
    return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in others)


def _row(row: rp.Row, points: list[Point]) -> tuple[Outcome, tuple[str, ...]]:
    need, seconds = row.measurement.required_bytes, row.measurement.seconds or 0.0
    hand = Point(need, seconds, need, seconds)
    within = [p for p in points if p.need <= need]
    quick = [p for p in points if p.seconds <= TIE * seconds]
    best = min(within, key=lambda p: p.seconds, default=None)
    least = min((p.need for p in quick), default=None)
    ratio = best.seconds / hand.seconds if best is not None else float("inf")
    outcome = Outcome(ratio, None if least is None else least / need, ratio <= TIE)
    cells = (
        f"{need / MIB:.1f}",
        f"{seconds * 1e3:.3f}",
        f"{best.need / MIB:.1f}" if best else "-",
        f"{best.seconds * 1e3:.3f}" if best else "-",
        f"{ratio:.3f}",
        "-" if outcome.memory is None else f"{outcome.memory:.3f}",
        "[green]yes" if outcome.holds else "[red]no",
    )
    return outcome, cells


def main() -> None:
    """Prints the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(MAKERS))
    parser.add_argument("--target", action="append")
    given = parser.parse_args()
    console = Console(width=160)
    outcomes: list[Outcome] = []
    for target in given.target or TARGETS:
        for name in given.only or MAKERS:
            try:
                outcomes += against(console, name, target)
            except (CompilerError, ImportError) as error:
                console.print(f"{name} on {target}: {error}")
    if outcomes:
        console.print(
            f"all: time median {median(o.time for o in outcomes):.3f}, worst {max(o.time for o in outcomes):.3f}; memory "
            f"median {median(_known(outcomes)):.3f}, worst {max(_known(outcomes)):.3f}; "
            f"{sum(o.holds for o in outcomes)} of {len(outcomes)} rows hold"
        )


if __name__ == "__main__":
    main()
