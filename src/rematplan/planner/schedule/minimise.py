"""Solves a selection program: linear relaxation, fixing by reduced costs, then branch and bound by HiGHS.

Comes in: a `Program` and a cost to beat. Goes out: the cheapest selection found and a lower bound on every selection.

Rows of bytes are added only when a solution breaks them: of the hundreds of thousands of steps of a large program few
are ever near the budget, unless others are moved there.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.referee import replay
from rematplan.planner.schedule.selection import BUDGET_SCALE, Program

# Relative to one computation of every node. Selections this little above the cutoff are let in: branch and bound prunes
# by selections that it has found, so it should be able to find again what is known.
COST_TOLERANCE = 1e-6
# HiGHS knows absolute tolerances only (1e-6 of the objective, 1e-7 of a reduced cost): costs are scaled so that one
# computation of every node costs this, unless they are small integers, of which it makes use.
COST_SCALE = 1e6
LEAST_INTEGER_TOTAL, MOST_INTEGER_TOTAL = 1e3, 1e7
# A row of bytes counts as broken from here on; below is rounding of the linear program.
ROW_TOLERANCE = 1e-7 * BUDGET_SCALE
# Status codes of scipy.optimize.linprog and milp.
SOLVED, LIMIT, INFEASIBLE = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
      order: the node computed at every step; None if nothing below the cutoff was found.
      lower_bound: no selection costs less than this or the cutoff, whichever is less.
      finished: whether the search ended by itself rather than by its deadline: then `order` is cheapest, or None
        because no selection is below the cutoff.
    """

    order: list[int] | None
    lower_bound: float
    finished: bool


class Deadline:
    """A point in time by the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """The earlier of this and a deadline so many seconds from now."""
        return Deadline(min(seconds, self.left))


def minimise(
    graph: ScheduleGraph, program: Program, *, budget_bytes: int, cutoff: float, deadline: Deadline
) -> Outcome:
    """The cheapest selection that costs less than `cutoff`, a cost of all steps (infinity for none)."""
    if program.hopeless:
        return Outcome(None, math.inf, finished=True)
    if program.size == 0:
        only = program.candidates.active(np.zeros(len(program.candidates), dtype=bool))
        return Outcome(only, program.base_cost, finished=True)
    return _Search(graph, program, budget_bytes, cutoff, deadline).run()


class _Search:
    """One program, its bounds on variables (`low`, `high`), the rows of bytes in use, and the lower bound so far."""

    def __init__(
        self, graph: ScheduleGraph, program: Program, budget_bytes: int, cutoff: float, deadline: Deadline
    ) -> None:
        self._graph = graph
        self._program = program
        self._budget_bytes = budget_bytes
        self._cutoff = cutoff
        self._deadline = deadline
        # scipy's annotations ask for single numbers where it takes arrays
        self._low: Any = np.zeros(program.size)
        self._high: Any = np.ones(program.size)
        # first computations are where bytes pile up; all other rows wait until they are broken
        self._rows = program.candidates.mandatory[program.row_steps]
        self._covers: list[np.ndarray] = []
        self._bound = program.base_cost
        self._limit = cutoff + COST_TOLERANCE * graph.total_cost
        # cost of one unit of the objective
        self._unit = _unit(graph)
        self._objective = program.costs / self._unit

    def run(self) -> Outcome:
        relaxed = self._relax()
        if relaxed is not None:
            return relaxed
        while True:
            if self._deadline.left <= 0.0:
                return Outcome(None, self._bound, finished=False)
            result = milp(
                self._objective,
                integrality=np.ones(self._program.size),
                bounds=Bounds(self._low, self._high),
                constraints=self._constraints(),
                options={"time_limit": self._deadline.left, "mip_rel_gap": 0.0},
            )
            if result.status == INFEASIBLE:
                return Outcome(None, max(self._bound, self._cutoff), finished=True)
            finished = result.status == SOLVED
            dual = result.mip_dual_bound
            if dual is not None and math.isfinite(dual):
                self._bound = max(self._bound, self._program.base_cost + self._unit * dual)
            if result.x is None:
                return Outcome(None, self._bound, finished=False)
            chosen = self._program.chosen(result.x)
            order = self._program.candidates.active(chosen)
            broken = self._broken(order, chosen)
            if broken is None:
                return Outcome(order, self._bound, finished=finished)
            if not finished:
                return Outcome(None, self._bound, finished=False)
            self._cover(broken & self._rows, result.x)
            self._rows |= broken

    def _relax(self) -> Outcome | None:
        """Solves the linear relaxation until no row is broken; an outcome only if that ends the search."""
        program = self._program
        while True:
            relations = [-program.relations, program.bytes[self._rows]]
            room = np.concatenate([-program.relation_floor, program.room[self._rows]])
            result = linprog(
                self._objective,
                A_ub=sparse.vstack(relations).tocsr(),
                b_ub=room,
                bounds=np.stack([self._low, self._high], axis=1),
                method="highs",
                options={"time_limit": max(self._deadline.left, 1e-3)},
            )
            if result.status == INFEASIBLE:
                return Outcome(None, max(self._bound, self._cutoff), finished=True)
            if result.status != SOLVED:
                return Outcome(None, self._bound, finished=False)
            self._bound = max(self._bound, program.base_cost + self._unit * result.fun)
            if self._bound >= self._cutoff:
                return Outcome(None, self._bound, finished=True)
            self._fix(result)
            broken = ~self._rows & (program.bytes @ result.x > program.room + ROW_TOLERANCE)
            if not broken.any():
                return None
            self._rows |= broken

    def _fix(self, result: Any) -> None:
        """Variables that cannot move in any selection below the cutoff, by reduced cost."""
        least = self._program.base_cost + self._unit * result.fun
        free = self._low < self._high
        self._high[free & (least + self._unit * result.lower.marginals > self._limit)] = 0.0
        self._low[free & (least - self._unit * result.upper.marginals > self._limit)] = 1.0

    def _constraints(self) -> list[LinearConstraint]:
        program = self._program
        floor: Any = program.relation_floor
        room: Any = program.room[self._rows]
        constraints = [
            LinearConstraint(program.relations, floor, np.inf),
            LinearConstraint(program.bytes[self._rows], -np.inf, room),
        ]
        if self._covers:
            most: Any = [len(cover) - 1 for cover in self._covers]
            column = np.concatenate(self._covers)
            row = np.repeat(np.arange(len(self._covers)), [len(cover) for cover in self._covers])
            covers = sparse.csr_matrix((np.ones(len(column)), (row, column)), shape=(len(self._covers), program.size))
            constraints.append(LinearConstraint(covers, -np.inf, most))
        if math.isfinite(self._limit):
            # without it, nothing is pruned until a first selection is found
            row = sparse.csr_matrix(self._objective)
            constraints.append(LinearConstraint(row, -np.inf, (self._limit - program.base_cost) / self._unit))
        return [c for c in constraints if c.A.shape[0]]

    def _cover(self, rows: np.ndarray, x: np.ndarray) -> None:
        """Forbids what breaks rows that are in use already: the solver lets a few bytes through by rounding.

        All that is live at such a step is more than the budget, by exact count: not all of it may be live.
        """
        for row in np.nonzero(rows)[0]:
            columns = self._program.bytes[[row]].indices
            self._covers.append(columns[x[columns] > 0.5])

    def _broken(self, order: list[int], chosen: np.ndarray) -> np.ndarray | None:
        """By row: whether the schedule exceeds the budget there; None if it does nowhere that counts."""
        counted = self._program.candidates.counted
        active = np.nonzero(self._program.candidates.mandatory | chosen)[0]
        exceeds = np.asarray(replay(self._graph, order).step_bytes) > self._budget_bytes
        over = np.zeros(len(counted), dtype=bool)
        over[active] = exceeds
        over &= counted
        return over[self._program.row_steps] if over.any() else None


def _unit(graph: ScheduleGraph) -> float:
    total = graph.total_cost
    if all(isinstance(c, int) for c in graph.costs) and LEAST_INTEGER_TOTAL <= total <= MOST_INTEGER_TOTAL:
        return 1.0
    return total / COST_SCALE if total > 0 else 1.0
