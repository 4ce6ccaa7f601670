"""What plans leave on the table: the best realizable plan against schedules that may compute any value again at any step.

    python -m benchmarks.oracle                 # some ten minutes on two cores
    python -m benchmarks.oracle --only mlp --share 0.5

Both sides are priced alike, by a roofline of v5e over the operations of the traced step, and replayed by the same referee: a
plan as the step that JAX makes of it, with its recomputation spelled out. Budgets are shares of what is live at the peak of the
step without checkpointing, beside its arguments. `plan` is the cheapest of every hand-written configuration and of every
grouping and level of the search; `schedule` is `planner.schedule.solve`, `bound` its lower bound. A compiler orders and fuses
operations as it likes: these are figures of the model, not of a chip.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import apply, workloads
from rematplan.planner import schedule
from rematplan.planner.price import operation_seconds
from rematplan.planner.schedule import ScheduleGraph
from rematplan.program.configuration import PLAIN, Configuration, OwnRegions
from rematplan.program.graph import Graph
from rematplan.program.parameters import of_parameters
from rematplan.program.trace import trace
from rematplan.search.candidates import hand_written, over_chain
from rematplan.search.problem import Problem
from rematplan.target.target import resolve

TARGET = "tpu-v5e"
LEVELS = 7
SHARES = (0.6, 0.4)
# few blocks: a solver that may compute anything again anywhere needs long for deep programs
MAKERS: dict[str, Callable[[], rp.Workload]] = {
    "mlp blocks=8": lambda: workloads.mlp(blocks=8),
    "gpt blocks=2": lambda: workloads.gpt(blocks=2),
    "vit blocks=2": lambda: workloads.vit(blocks=2),
    "resnet blocks=(1,1)": lambda: workloads.resnet(blocks=(1, 1)),
    "unet levels=2 blocks=1": lambda: workloads.unet(levels=2, blocks=1),
}


def joint(problem: Problem, configuration: Configuration) -> Graph:
    """The whole step under a configuration, recomputation included, as one flat program."""
    traced = problem.traced
    function = apply.configured(traced, configuration)
    leaves = [jax.ShapeDtypeStruct(traced.avals[i].shape, traced.avals[i].dtype) for i in traced.graph.inputs]

    def step(*given: Any) -> list[Any]:
        loss, parameters = of_parameters(function, given, traced.differentiated)
        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return [value, *rest, *gradients]

    return trace(step, leaves, differentiated=(), own_regions=OwnRegions.REPLACE).graph


def as_schedule(problem: Problem, graph: Graph) -> ScheduleGraph:
    return schedule.from_program(graph, cost=lambda op: operation_seconds(graph, op, problem.rates))


def row(console: Console, table: Table, name: str, shares: list[float], limit: float) -> None:
    """A line for each share."""
    problem = Problem(MAKERS[name](), resolve(TARGET), progress=lambda _: None)
    plain = as_schedule(problem, joint(problem, PLAIN))
    own = schedule.replay(plain, range(len(plain)))
    candidates = hand_written(problem) + [
        c for found in over_chain(problem, most_levels=LEVELS).values() for c in found
    ]
    points = []
    for configuration in dict.fromkeys(c.configuration for c in candidates if not c.compiler_rematerializes):
        graph = as_schedule(problem, joint(problem, configuration))
        points.append((schedule.replay(graph, range(len(graph))).peak_bytes, graph.total_cost))
    for share in shares:
        budget = int(share * own.peak_bytes)
        fitting = [cost for peak, cost in points if peak <= budget]
        begun = time.monotonic()
        found = schedule.solve(plain, budget_bytes=budget, time_limit_seconds=limit)
        more = lambda cost: f"{cost / plain.total_cost - 1:+.2%}"
        cells = (
            name,
            str(len(plain)),
            f"{share:.0%}",
            more(min(fitting)) if fitting else "none fits",
            more(found.cost),
            more(found.lower_bound),
            f"{min(fitting) / found.cost - 1:.2%}" if fitting else "-",
            f"{time.monotonic() - begun:.0f}",
        )
        console.print(", ".join(cells))
        table.add_row(*cells)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=float, action="append")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each schedule")
    given = parser.parse_args()
    console = Console(width=140)
    table = Table("workload", "operations", "budget", "plan", "schedule", "bound", "left on the table", "seconds")
    for name in MAKERS:
        if name.startswith(given.only):
            row(console, table, name, given.share or list(SHARES), given.seconds)
    console.print(table)


if __name__ == "__main__":
    main()
