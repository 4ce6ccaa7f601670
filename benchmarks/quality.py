"""Plans against asked figures at given budgets, on v5e.

    python -m benchmarks.quality                       # some twenty minutes on two quiet cores, cached afterwards
    python -m benchmarks.quality --only gpt

Every figure is of a full compile with the budget as the compiler's limit. `error` is the predicted need against the
compiled one. Plans against every hand-written configuration: `benchmarks.suite`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.errors import InfeasibleBudget

MIB = 1 << 20


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


def figures(console: Console, only: str) -> None:
    """Plans and what was asked of them."""
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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    figures(Console(width=160), parser.parse_args().only)


if __name__ == "__main__":
    main()
