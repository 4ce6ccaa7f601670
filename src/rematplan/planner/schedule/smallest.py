"""The smallest budget that a schedule is found for.

Comes in: a graph. Goes out: a schedule of small peak: by bisection over budgets, dropping values by rule; then, on small
graphs, by a mixed-integer program that minimises the peak instead of the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from rematplan.planner.schedule.candidates import everything
from rematplan.planner.schedule.eviction import COST_WEIGHTS, evicting, without_unread
from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.minimise import Deadline
from rematplan.planner.schedule.referee import replay
from rematplan.planner.schedule.selection import BUDGET_SCALE, formulate

# Halvings of the range of budgets; tries at each, and the part of the time left that they may take.
HALVINGS, TRIES, TRIES_PART = 10, 30, 0.1
# Optional steps up to which the program is tried.
PROGRAM_LIMIT = 6000


def smallest(graph: ScheduleGraph, *, least_bytes: int, deadline: Deadline, seed: int) -> list[int]:
    """A schedule whose peak is as small as one was found.

    Args:
      least_bytes: no schedule is known, or wanted, below this.
    """
    rng = np.random.default_rng(seed)
    best = list(range(len(graph)))
    low, high = least_bytes - 1, replay(graph, best).peak_bytes
    for _ in range(HALVINGS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        order = tried(graph, budget_bytes=middle, rng=rng, deadline=deadline.within(TRIES_PART * deadline.left))
        if order is None:
            low = middle
        else:
            best, high = order, replay(graph, order).peak_bytes
    if least_bytes < high and len(graph) * (len(graph) - 1) // 2 <= PROGRAM_LIMIT:
        better = _least_peak(graph, least_bytes, high, deadline.left)
        if better is not None and replay(graph, better).peak_bytes < high:
            best = better
    return best


def tried(graph: ScheduleGraph, *, budget_bytes: int, rng: np.random.Generator, deadline: Deadline) -> list[int] | None:
    """The first schedule of several tries of the rule, all but the first few at random."""
    for number in range(TRIES):
        if number and deadline.left <= 0.0:
            break
        weight = COST_WEIGHTS[number % len(COST_WEIGHTS)]
        noise = rng if number >= len(COST_WEIGHTS) else None
        order = evicting(graph, budget_bytes=budget_bytes, cost_weight=weight, rng=noise)
        if order is not None:
            return order
    return None


def _least_peak(graph: ScheduleGraph, least_bytes: int, most_bytes: int, seconds: float) -> list[int] | None:
    """Selects from every step; one more variable is the peak, as a multiple of `least_bytes`."""
    program = formulate(graph, everything(graph, cost_limit=math.inf), budget_bytes=least_bytes)
    if not program.size or seconds <= 0.0:
        return None
    peak_of_row = sparse.csr_matrix(np.full((len(program.room), 1), -BUDGET_SCALE))
    relations = sparse.hstack([program.relations, sparse.csr_matrix((len(program.relation_floor), 1))])
    floor: Any = program.relation_floor
    room: Any = program.room - BUDGET_SCALE
    low: Any = np.append(np.zeros(program.size), 1.0)
    high: Any = np.append(np.ones(program.size), most_bytes / least_bytes)
    result = milp(
        np.append(np.zeros(program.size), 1.0),
        integrality=np.append(np.ones(program.size), 0.0),
        bounds=Bounds(low, high),
        constraints=[
            LinearConstraint(sparse.csr_matrix(relations), floor, np.inf),
            LinearConstraint(sparse.csr_matrix(sparse.hstack([program.bytes, peak_of_row])), -np.inf, room),
        ],
        options={"time_limit": seconds},
    )
    if result.x is None:
        return None
    chosen: Sequence[float] = result.x[:-1]
    return without_unread(graph, program.candidates.active(program.chosen(np.asarray(chosen))))
