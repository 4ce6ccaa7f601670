"""Plans against asked figures, and against every hand-written configuration.

    python -m benchmarks.quality                       # everything: about an hour on two quiet cores, cached afterwards
    python -m benchmarks.quality --part figures        # asked figures at given budgets, v5e
    python -m benchmarks.quality --part dominance --only gpt --target gpu-h100

Every figure is of a full compile with the budget as the compiler's limit. `error` is the predicted need against the
compiled one. Dominance: the plan at a configuration's own need must need no more and be no slower (1 % for ties).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.errors import InfeasibleBudget
from rematplan.target.measurement import Measurement

MIB = 1 << 20
TIE = 1.01


@dataclass(frozen=True)
class Asked:
    """A budget and the cycles that a plan should stay below."""

    name: str
    make: Callable[[], rp.Workload]
    budget_mib: int
    megacycles: float


def asked() -> Iterator[Asked]:
    """The figures asked for, on v5e."""
    for budget, cycles in ((600, 34.2), (900, 32.2), (1300, 32.2)):
        yield Asked("gpt", workloads.gpt, budget, cycles)
    for activation in ("relu", "gelu"):
        for budget, cycles in ((670, 7.3), (410, 8.85), (330, 9.2), (300, 10.2)):
            yield Asked(f"mlp {activation}", lambda a=activation: workloads.mlp(activation=a), budget, cycles)
    for budget, cycles in ((600, 38.5), (1000, 37.8)):
        yield Asked("scan_gpt", workloads.scan_gpt, budget, cycles)


DOMINANCE = ("mlp", "gpt", "vit", "resnet", "unet")
# A full compile of these at their own sizes takes a TPU compiler three to five minutes of CPU, and this table takes some
# twenty of them: fewer blocks, and fewer kinds of convolutions on as many pixels.
TPU_SIZES: dict[str, dict[str, Any]] = {
    "vit": {"blocks": 2},
    "resnet": {"blocks": (1, 1), "image": 64, "batch": 256},
    "unet": {"blocks": 1, "levels": 2, "image": 32, "batch": 128},
}


def figures(console: Console, only: str) -> None:
    """The first table."""
    table = Table(
        "workload", "budget", "asked", "reached", "needs", "predicted", "error", "seconds", "compiles", "plan"
    )
    works: dict[str, rp.Workload] = {}
    for case in asked():
        if only and not case.name.startswith(only):
            continue
        work = works.setdefault(case.name, case.make())
        begun = time.monotonic()
        try:
            plan = rp.plan(work, budget=case.budget_mib * MIB, target="tpu-v5e")
        except InfeasibleBudget as error:
            table.add_row(case.name, f"{case.budget_mib} MiB", f"{case.megacycles}", "infeasible", str(error)[:60])
            continue
        measured = plan.measurement
        assert measured is not None
        cycles = (measured.cycles or 0.0) / 1e6
        predicted = plan.predicted["required_bytes"]
        table.add_row(
            case.name,
            f"{case.budget_mib} MiB",
            f"{case.megacycles}",
            f"{'[green]' if cycles <= case.megacycles else '[red]'}{cycles:.2f}",
            f"{measured.required_bytes / MIB:.1f}",
            f"{predicted / MIB:.1f}",
            f"{predicted / measured.required_bytes - 1:+.1%}",
            f"{time.monotonic() - begun:.0f}",
            plan.notes[1].split(":")[-1].strip(),
            plan.notes[0].removeprefix("chosen: ")[:60],
        )
        console.print(f"{case.name} {case.budget_mib}: {cycles:.2f}")
    console.print(table)


def dominance(console: Console, only: str, target: str) -> None:
    """The second table."""
    table = Table(
        "workload",
        "target",
        "configuration",
        "needs",
        "ms",
        "plan needs",
        "plan ms",
        "time",
        "need error",
        "time error",
        "holds",
    )
    ratios: list[float] = []
    for name in DOMINANCE:
        if only and name != only:
            continue
        sizes = TPU_SIZES.get(name, {}) if target.startswith("tpu") else {}
        work = getattr(workloads, name)(**sizes)
        shown = " ".join((name, *(f"{k}={v}" for k, v in sizes.items())))
        rows = rp.compare(work, target=target).rows
        for row in sorted(rows, key=lambda r: r.measurement.required_bytes):
            cells, ratio = _against(work, target, row.name, row.measurement)
            ratios += [ratio] if ratio is not None else []
            console.print(f"{shown} on {target}: " + ", ".join(cells))
            table.add_row(shown, target, *cells)
    console.print(table)
    if ratios:
        console.print(f"time of the plan to the configuration's: median {median(ratios):.3f}, worst {max(ratios):.3f}")


def _against(work: rp.Workload, target: str, name: str, hand: Measurement) -> tuple[tuple[str, ...], float | None]:
    shown = (name, f"{hand.required_bytes / MIB:.1f}", f"{(hand.seconds or 0) * 1e3:.3f}")
    try:
        plan = rp.plan(work, budget=hand.required_bytes, target=target)
    except InfeasibleBudget as error:
        return (*shown, "infeasible", f"{error.minimum_bytes / MIB:.1f}", "", "", "", "[red]no"), None
    planned = plan.measurement
    assert planned is not None
    ratio = (planned.seconds or 0.0) / (hand.seconds or 1.0)
    holds = planned.required_bytes <= hand.required_bytes and ratio <= TIE
    error = plan.predicted["required_bytes"] / planned.required_bytes - 1
    time_error = plan.predicted["seconds"] / (planned.seconds or 1.0) - 1
    cells = (
        *shown,
        f"{planned.required_bytes / MIB:.1f}",
        f"{(planned.seconds or 0) * 1e3:.3f}",
        f"{ratio:.3f}",
        f"{error:+.1%}",
        f"{time_error:+.1%}",
        "[green]yes" if holds else "[red]no",
    )
    return cells, ratio


def main() -> None:
    """Prints the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("figures", "dominance"), action="append")
    parser.add_argument("--only", default="")
    parser.add_argument("--target", action="append")
    given = parser.parse_args()
    console = Console(width=160)
    parts = given.part or ["figures", "dominance"]
    if "figures" in parts:
        figures(console, given.only)
    if "dominance" in parts:
        for target in given.target or ("tpu-v5e", "gpu-h100"):
            dominance(console, given.only, target)


if __name__ == "__main__":
    main()
