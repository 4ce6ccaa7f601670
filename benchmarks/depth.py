"""What planning costs as a model gets deeper: GPT of 6 to 96 blocks on v5e, one budget each.

    python -m benchmarks.depth                          # hours on two cores: full compiles of 96 blocks
    python -m benchmarks.depth --confirm-up-to 24       # deeper ones without the full compiles

`search` is everything before the first full compile but tracing and lowering, which stand beside it; `confirm` is the full
compiles of plans; `plain` one full compile of the model as it is. Wall seconds of one run, with no cached results.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.search.planning import Search
from rematplan.target.target import resolve

DEPTHS = (6, 12, 24, 48, 96)
TARGET = "tpu-v5e"
# Of what the model needs without checkpointing, as probed.
BUDGET_SHARE = 0.6
GIB = 1 << 30


def planned(blocks: int, *, confirm: bool) -> tuple[str, ...]:
    """One row of the table."""
    work = workloads.gpt(blocks=blocks)
    begun = time.monotonic()
    search = Search(work, resolve(TARGET), progress=lambda _: None)
    budget = int(BUDGET_SHARE * search.probes.plain.required_bytes)
    search.estimate(budget)
    problem = search.problem
    apart = problem.tracing_seconds + problem.lowering_seconds
    searching = time.monotonic() - begun - apart
    row = [str(blocks), f"{problem.tracing_seconds:.1f}", f"{problem.lowering_seconds:.1f}", f"{searching:.1f}"]
    row.append(str(problem.probes))
    if confirm:
        found = search.plan(budget, finalists=1)
        total = time.monotonic() - begun
        measured, predicted = found.best.measurement, found.best.predicted
        started = time.monotonic()
        rp.measure(work, target=TARGET, policy="plain", method="compile")
        plain = time.monotonic() - started
        row += [
            f"{problem.compiling_seconds:.1f}",
            str(problem.compiles),
            f"{total:.1f}",
            f"{plain:.1f}",
            f"{total / plain:.2f}",
        ]
        row.append(f"{predicted['required_bytes'] / measured.required_bytes - 1:+.1%}")
        row.append(f"{predicted['seconds'] / (measured.seconds or 1.0) - 1:+.1%}")
    else:
        row += [""] * 7
    row.append(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB:.2f}")
    return tuple(row)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confirm-up-to", type=int, default=DEPTHS[-1])
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    given = parser.parse_args()
    console = Console(width=160)
    columns = "blocks tracing lowering search probes confirm compiles total plain ratio".split()
    table = Table(*columns, "need error", "time error", "GiB")
    for blocks in given.depths:
        with tempfile.TemporaryDirectory() as folder:
            # nothing from earlier runs, and nothing from other depths, whose shortened programs are the same
            os.environ["REMATPLAN_CACHE"] = folder
            row = planned(blocks, confirm=blocks <= given.confirm_up_to)
        console.print(", ".join(row))
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
