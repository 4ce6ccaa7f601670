"""Schedules on published training graphs, against published and known results.

    python -m benchmarks.schedules [--graphs DIR] [--seconds N] [NAME ...]

Reads the graphs where they lie (default: `../shared/graphs` beside the checkout) and prints one table: extra cost at a
budget that is a fraction of the peak of the graph's own order, the lower bound, the time, and what is known. Every
schedule is replayed by the referee. Checkmate and Moccasin define the problem; their graphs are not part of this project.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rematplan.planner import schedule

GRAPHS = Path(__file__).resolve().parents[1].parent / "shared" / "graphs"


@dataclass(frozen=True)
class Case:
    """One graph and budget.

    Attributes:
      known: best extra cost known before, in percent, and who says so.
    """

    name: str
    fraction: float
    seconds: float
    known: str


CASES = (
    Case("fcn8_b32", 0.9, 180.0, "0.029 optimal"),
    Case("fcn8_b32", 0.8, 180.0, "0.136 optimal"),
    Case("vgg16_b256", 0.9, 180.0, "1.968 optimal"),
    Case("unet_b32", 0.5, 180.0, "6.967 optimal"),
    Case("rlg1", 0.9, 60.0, "0.917"),
    Case("rlg1", 0.8, 60.0, "2.296"),
    Case("resnet50_b256", 0.9, 60.0, "0.1-0.2 in 65-485 s"),
    Case("resnet50_b256", 0.8, 60.0, "0.3 in 65-485 s"),
    Case("rlg3", 0.9, 300.0, ""),
    Case("rlg3", 0.8, 300.0, ""),
    Case("rlg4", 0.9, 300.0, "0.7 in 3600 s"),
    Case("rlg4", 0.8, 300.0, "3.4 in 3600 s"),
)
COLUMNS = "{:<14} {:>6} {:>9} {:>9} {:>9} {:>7} {:>8}  {:<9} {}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="graphs to solve (default: all)")
    parser.add_argument("--graphs", type=Path, default=GRAPHS, help="where the graphs lie")
    parser.add_argument("--seconds", type=float, help="time limit for every graph")
    options = parser.parse_args(arguments)
    if not options.graphs.is_dir():
        print(f"skipped: no graphs in {options.graphs} (give --graphs DIR)")
        return
    print(COLUMNS.format("graph", "budget", "extra %", "bound %", "peak/B", "steps", "seconds", "status", "known %"))
    for case in CASES:
        if not options.names or case.name in options.names:
            run(case, options.graphs, options.seconds or case.seconds)


def run(case: Case, graphs: Path, seconds: float) -> None:
    path = graphs / f"{case.name}.json"
    if not path.exists():
        print(f"{case.name:<14} skipped: {path.name} is not there")
        return
    data = json.loads(path.read_text())
    budget_bytes = int(case.fraction * data["peak_bytes"])
    start = time.perf_counter()
    found = schedule.solve(data, budget_bytes=budget_bytes, time_limit_seconds=seconds)
    seconds = time.perf_counter() - start

    graph = schedule.parse(data)
    replayed = schedule.replay(graph, found.order)
    assert replayed.peak_bytes <= budget_bytes
    assert replayed.cost == found.cost
    percent = [f"{100 * (cost / graph.total_cost - 1):.4f}" for cost in (replayed.cost, found.lower_bound)]
    filled = f"{replayed.peak_bytes / budget_bytes:.4f}"
    took = f"{seconds:.1f}"
    row = (case.name, case.fraction, *percent, filled, len(found.order), took, found.status.value, case.known)
    print(COLUMNS.format(*row), flush=True)


if __name__ == "__main__":
    main()
