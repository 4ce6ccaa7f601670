"""The save set of a region that recomputes least within so many bytes: also what lies between the points of a menu's hull.

Comes in: the recompute problem of a region (`menu.Stretch`) and a limit. Goes out: a `SaveSet`. Parametric minimum cuts give
the hull only; where one region is to land on a budget and there are no further regions to mix with, the best set may lie
above it. An integer program finds it: what is saved is 0 or 1, and an operation runs again if something that it makes is read
and not saved.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from rematplan.planner.menu import SaveSet, Stretch

# The search ends then with the best it has, wherever it runs.
MOST_NODES = 5000
# Costs are scaled so that all of the recomputation costs this, far above a solver's absolute tolerances.
_SCALE = 1e4


def fitting(problem: Stretch, *, limit_bytes: int) -> SaveSet:
    """The cheapest set found that takes no more than the limit; a set that saves nothing always does."""
    nothing = problem.save_set(())
    if limit_bytes <= 0 or nothing.recompute_seconds <= 0:
        return nothing
    defined = problem.defined
    values = [v for v in defined if v not in problem.unsavable and problem.graph.values[v].bytes <= limit_bytes]
    column = {v: i for i, v in enumerate(values)}
    count, operations = len(values), problem.stop - problem.start
    again = lambda index: count + index - problem.start

    # rows of coefficients >= lower bound: `runs again (maker) + saved (value) - runs again (reader) >= needed`
    entries: list[tuple[int, int, float]] = []
    least: list[float] = []

    def wanted(value: int, reader: int | None) -> None:
        row = len(least)
        entries.append((row, again(defined[value]), 1.0))
        if value in column:
            entries.append((row, column[value], 1.0))
        if reader is not None:
            entries.append((row, again(reader), -1.0))
        least.append(1.0 if reader is None else 0.0)

    for value in dict.fromkeys(problem.needed):
        wanted(value, None)
    for op in problem.graph.operations[problem.start : problem.stop]:
        for value in dict.fromkeys(op.inputs):
            if value in defined:
                wanted(value, op.index)
    rows, columns, data = zip(*entries, strict=True)
    shape = (len(least), count + operations)
    matrix = sparse.csr_matrix((data, (rows, columns)), shape=shape)
    # scipy's annotations ask for single numbers where it takes arrays
    recompute = LinearConstraint(matrix, np.array(least), np.inf)  # pyright: ignore[reportArgumentType]
    sizes = np.array([problem.graph.values[v].bytes for v in values] + [0] * operations, dtype=float) / limit_bytes
    scale = _SCALE / nothing.recompute_seconds
    # of equally cheap sets the smaller one
    cost = np.array([1e-6] * count + [scale * s for s in problem.seconds])
    found = milp(
        cost,
        constraints=[recompute, LinearConstraint(sizes[None, :], -np.inf, 1.0)],
        integrality=np.array([1] * count + [0] * operations),
        bounds=Bounds(0, 1),
        options={"node_limit": MOST_NODES},
    )
    if found.x is None:
        return nothing
    chosen = problem.save_set([v for v, i in column.items() if found.x[i] > 0.5])
    if chosen.saved_bytes > limit_bytes:  # by a solver's tolerance
        return fitting(problem, limit_bytes=int(limit_bytes * (1 - 1e-5)) - 1)
    return chosen
