"""Schedules on a general graph: a feasible one early, better ones by wider and wider selections, and a lower bound.

Comes in: a graph and a budget. Goes out: a `Schedule`, replayed by the referee.

The rungs, each starting from the best schedule of those before, whose cost excludes most steps of the next:

1. the graph's own order, then dropping values by rule (`eviction.py`);
2. selections from steps near the reads that need them (`nearby`), deeper and deeper;
3. where the graph is small enough, selection from every step: its end is the proof of optimality;
4. else a lower bound from a relaxation that counts bytes at a few checkpoints only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from rematplan.planner.schedule.candidates import Candidates, between_checkpoints, everything, nearby
from rematplan.planner.schedule.eviction import COST_WEIGHTS, evicting, without_unread
from rematplan.planner.schedule.graph import ScheduleGraph, parse
from rematplan.planner.schedule.infeasible import infeasible
from rematplan.planner.schedule.minimise import Deadline, Outcome, minimise
from rematplan.planner.schedule.referee import replay
from rematplan.planner.schedule.selection import formulate

# Optional steps up to which selecting from every step is tried: its linear program then takes seconds.
EVERY_STEP_LIMIT = 60_000
NEARBY_DEPTHS = (1, 2, 3)
# Checkpoints of the bound of a large graph: few are solved fast, many bound better.
CHECKPOINTS = (2, 4, 8, 16, 32)
# Part of the time kept for the bound of a large graph.
BOUND_PART = 0.3
# Costs this close, relative to one computation of every node, are equal.
COST_ROUNDING = 1e-9


class Status(Enum):
    """How sure the answer is."""

    OPTIMAL = "optimal"  # cost equals the lower bound
    FEASIBLE = "feasible"  # the time ran out before the proof


@dataclass(frozen=True)
class Schedule:
    """Which node to compute at every step.

    Attributes:
      order: the node computed at every step, repeated where it is computed again.
      cost: of all steps, in the unit of the graph's costs.
      peak_bytes: the most that is live at any step, by replay.
      lower_bound: no schedule within the budget costs less. It covers schedules that compute nodes for the first time in
        the graph's order and, before each first computation, compute earlier nodes again in that order, each at most
        once; not those that change the order.
      extra_cost: `cost` less one computation of every node.
    """

    order: tuple[int, ...]
    cost: float
    peak_bytes: int
    lower_bound: float
    extra_cost: float
    status: Status

    @property
    def optimal(self) -> bool:
        """Whether `cost` equals the lower bound."""
        return self.status is Status.OPTIMAL


def solve(graph: ScheduleGraph | Mapping[str, Any], *, budget_bytes: int, time_limit_seconds: float = 60.0) -> Schedule:
    """The cheapest schedule found whose live bytes never exceed the budget.

    The result is the same on every run that ends before its time limit.

    Args:
      graph: or parsed JSON, as `graph.parse` takes it.
      time_limit_seconds: the search ends about then with the best it has.

    Raises:
      InputError: the graph is not one.
      InfeasibleBudget: no schedule was found; carries the smallest budget for which one was, and says whether the
        budget is proven too small.
    """
    problem = graph if isinstance(graph, ScheduleGraph) else parse(graph)
    climb = _Climb(problem, budget_bytes, time_limit_seconds)
    climb.run()
    if climb.best is None:
        raise infeasible(problem, budget_bytes, proven=climb.impossible)
    replayed = replay(problem, climb.best)
    bound = replayed.cost if climb.proven else climb.bound
    return Schedule(
        order=tuple(climb.best),
        cost=replayed.cost,
        peak_bytes=replayed.peak_bytes,
        lower_bound=bound,
        extra_cost=replayed.cost - problem.total_cost,
        status=Status.OPTIMAL if climb.proven else Status.FEASIBLE,
    )


class _Climb:
    """The rungs, with the best schedule and bound so far."""

    def __init__(self, graph: ScheduleGraph, budget_bytes: int, seconds: float) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._seconds = seconds
        self._deadline = Deadline(seconds)
        self._cost = math.inf
        self.best: list[int] | None = None
        self.bound: float = graph.total_cost
        self.impossible = False

    @property
    def proven(self) -> bool:
        """No schedule is cheaper than the best."""
        return self._cost - self.bound <= COST_ROUNDING * self._graph.total_cost

    def run(self) -> None:
        graph, budget = self._graph, self._budget_bytes
        if any(graph.step_bytes(node) > budget for node in range(len(graph))):
            self.impossible = True
            return
        self._offer(range(len(graph)))
        for weight in COST_WEIGHTS:
            if self.proven or (self.best is not None and self._deadline.left <= 0.0):
                return
            order = evicting(graph, budget_bytes=budget, cost_weight=weight)
            if order is not None:
                self._offer(order)
        small = self._every_step_count() <= EVERY_STEP_LIMIT
        keep = 0.0 if small else BOUND_PART * self._seconds
        for depth in NEARBY_DEPTHS:
            if self.proven or self._deadline.left <= keep:
                break
            near = nearby(graph, budget_bytes=budget, depth=depth, cost_limit=self._cost_limit, order=self.best or ())
            self._select(near, self._deadline.left - keep)
        if not self.proven and self._every_step_count() <= EVERY_STEP_LIMIT:
            outcome = self._select(everything(graph, cost_limit=self._cost_limit), self._deadline.left)
            self._bounded(outcome)
            self.impossible = outcome.finished and self.best is None
        elif not self.proven:
            self._bound_by_checkpoints()

    @property
    def _cost_limit(self) -> float:
        """No repeated step of a better schedule costs more."""
        return self._cost - self._graph.total_cost

    def _every_step_count(self) -> int:
        stages = len(self._graph) + bool(self._graph.outputs)
        return sum(stages - 1 - node for node in self._graph.repeatable(self._cost_limit))

    def _offer(self, order: Sequence[int]) -> None:
        tidy = without_unread(self._graph, order)
        replayed = replay(self._graph, tidy)
        if replayed.peak_bytes <= self._budget_bytes and replayed.cost < self._cost:
            self.best, self._cost = tidy, replayed.cost

    def _select(self, candidates: Candidates, seconds: float) -> Outcome:
        """The cheapest selection from the candidates; offers it."""
        outcome = minimise(
            self._graph,
            formulate(self._graph, candidates, budget_bytes=self._budget_bytes),
            budget_bytes=self._budget_bytes,
            cutoff=self._cost,
            deadline=self._deadline.within(seconds),
        )
        if outcome.order is not None:
            self._offer(outcome.order)
        return outcome

    def _bounded(self, outcome: Outcome) -> None:
        """Takes the bound of a search that left no schedule out."""
        self.bound = max(self.bound, min(outcome.lower_bound, self._cost))

    def _bound_by_checkpoints(self) -> None:
        own = np.asarray(replay(self._graph, range(len(self._graph))).step_bytes)
        exceeding = np.nonzero(own > self._budget_bytes)[0]
        for count in CHECKPOINTS:
            if self.proven or self._deadline.left <= 0.0:
                return
            spread = np.linspace(0, len(exceeding) - 1, min(count, len(exceeding)))
            checkpoints = exceeding[np.unique(spread.astype(int))].tolist()
            relaxed = between_checkpoints(self._graph, checkpoints, cost_limit=self._cost_limit)
            self._bounded(self._select(relaxed, self._deadline.left))
