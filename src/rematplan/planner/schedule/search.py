"""Schedules on a general graph: a feasible one early, better ones by wider and wider selections, and a lower bound.

Comes in: a graph and a budget. Goes out: a `Schedule`, replayed by the referee.

The rungs, each starting from the best schedule of those before, whose cost excludes most steps of the next:

1. the graph's own order, then dropping values by rule (`eviction.py`);
2. selections from steps near the reads that need them (`nearby`);
3. where the graph is small enough, selection from every step: its end is the proof of optimality;
4. else selections that look deeper, window by window (`windows.py`), and a lower bound from a relaxation that counts
   bytes at a few checkpoints only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from rematplan.planner.schedule.candidates import Candidates, between_checkpoints, checkpoints_of, everything, nearby
from rematplan.planner.schedule.eviction import COST_WEIGHTS, evicting, without_unread
from rematplan.planner.schedule.graph import ScheduleGraph, parse
from rematplan.planner.schedule.infeasible import infeasible
from rematplan.planner.schedule.minimise import Deadline, Outcome, minimise
from rematplan.planner.schedule.referee import replay
from rematplan.planner.schedule.selection import formulate
from rematplan.planner.schedule.smallest import tried
from rematplan.planner.schedule.windows import Windows

# Optional steps up to which selecting from every step is tried: its linear program then takes seconds.
EVERY_STEP_LIMIT = 70_000
# How deep nearby selections look: on small graphs before every step is tried, on large ones until one is found.
NEARBY_DEPTHS = (1, 2, 3)
# Part of the time left for each nearby selection on a small graph.
NEARBY_PART = 0.3
# Checkpoints of the bound of a large graph: few are solved fast, many bound better.
CHECKPOINTS = (4, 8, 16, 32, 64)
# Parts of the time on a large graph: kept for the bound, and the most for one window.
BOUND_PART, WINDOW_PART = 0.3, 0.1
# Part of the time for tries at random where no schedule is known, and, after all, to find the smallest budget.
TRIES_PART, SMALLEST_PART = 0.1, 0.2
# Costs this close, relative to one computation of every node, are equal.
COST_ROUNDING = 1e-9


class Status(Enum):
    """How sure the answer is."""

    #: The cost equals the lower bound.
    OPTIMAL = "optimal"
    #: The time ran out before the proof.
    FEASIBLE = "feasible"


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


def solve(
    graph: ScheduleGraph | Mapping[str, Any], *, budget_bytes: int, time_limit_seconds: float = 60.0, seed: int = 0
) -> Schedule:
    """The cheapest schedule found whose live bytes never exceed the budget.

    The result is the same on every run with the same seed whose searches end before they meet the time limit.

    Args:
      graph: or parsed JSON, as `parse` takes it.
      budget_bytes: the most that may be live at any step.
      time_limit_seconds: the search ends about then with the best it has.
      seed: of what is drawn at random on large graphs.

    Raises:
      InputError: the graph is not one.
      InfeasibleBudget: no schedule was found; carries the smallest budget for which one was, and says whether the
        budget is proven too small.
    """
    problem = graph if isinstance(graph, ScheduleGraph) else parse(graph)
    climb = _Climb(problem, budget_bytes, time_limit_seconds, seed)
    climb.run()
    if climb.best is None:
        late = Deadline(SMALLEST_PART * time_limit_seconds)
        raise infeasible(problem, budget_bytes, proven=climb.impossible, deadline=late, seed=seed)
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

    def __init__(self, graph: ScheduleGraph, budget_bytes: int, seconds: float, seed: int) -> None:
        self._graph = graph
        self._seed = seed
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
        if self.best is None:
            rng = np.random.default_rng(self._seed)
            late = self._deadline.within(TRIES_PART * self._seconds)
            order = tried(graph, budget_bytes=budget, rng=rng, deadline=late)
            if order is not None:
                self._offer(order)
        for depth in NEARBY_DEPTHS:
            if self.proven or (self.best is not None and not self._small and depth > 1):
                break
            near = nearby(graph, budget_bytes=budget, depth=depth, cost_limit=self._cost_limit, order=self.best or ())
            # on a small graph what follows finds the same and proves it
            self._select(near, self._left() * (NEARBY_PART if self._small else 1.0))
        if not self._small:
            self._look_through_windows()
        if not self.proven and self._small:
            outcome = self._select(everything(graph, cost_limit=self._cost_limit), self._left())
            self._bounded(outcome)
            self.impossible = outcome.finished and self.best is None
        elif not self.proven:
            self._bound_by_checkpoints()

    def _left(self) -> float:
        """Seconds for the search of schedules."""
        return self._deadline.left - (0.0 if self._small else BOUND_PART * self._seconds)

    def _look_through_windows(self) -> None:
        windows = Windows(self._graph, budget_bytes=self._budget_bytes, seed=self._seed)
        while self.best is not None and not self.proven and self._left() > 0.0:
            candidates = windows.next(self.best, cost_limit=self._cost_limit)
            if candidates is None:
                return
            before = self._cost
            self._select(candidates, min(self._left(), WINDOW_PART * self._seconds))
            if self._cost < before:
                windows.changed()

    @property
    def _cost_limit(self) -> float:
        """No repeated step of a better schedule costs more."""
        return self._cost - self._graph.total_cost

    @property
    def _small(self) -> bool:
        """Whether selecting from every step is worth a try."""
        stages = len(self._graph) + bool(self._graph.outputs)
        return sum(stages - 1 - node for node in self._graph.repeatable(self._cost_limit)) <= EVERY_STEP_LIMIT

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
        for count in CHECKPOINTS:
            if self.proven or self._deadline.left <= 0.0:
                return
            checkpoints = checkpoints_of(self._graph, budget_bytes=self._budget_bytes, count=count)
            relaxed = between_checkpoints(self._graph, checkpoints, cost_limit=self._cost_limit)
            self._bounded(self._select(relaxed, self._deadline.left))
