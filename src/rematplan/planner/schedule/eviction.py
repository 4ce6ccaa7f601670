"""A first schedule, quickly: run the graph in order, drop what is cheapest to bring back, bring it back when it is read.

Comes in: a `ScheduleGraph`, a budget and how much cost weighs against bytes and time. Goes out: a schedule that fits,
or None where this rule runs into a wall. The rule is that of dynamic tensor rematerialization (Kirisame et al. 2021)
with the future known: drop the value with the least cost per byte and step until it is read again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.referee import replay

# Exponents of the cost to bring a value back: 1 is the rule as published, 0 drops what is read last (Belady).
COST_WEIGHTS = (1.0, 0.5, 0.0)
# Where the rule fails under a tight budget, it is tried again with the regret of each value off by a random factor: the
# exponential of a normal variable of this standard deviation.
NOISE = 1.0


def evicting(
    graph: ScheduleGraph, *, budget_bytes: int, cost_weight: float, rng: np.random.Generator | None = None
) -> list[int] | None:
    """A schedule within the budget; None if the rule drops what it cannot do without.

    Args:
      rng: draws a random factor for each value's regret; None follows the rule.
    """
    factors = np.ones(len(graph.sizes)) if rng is None else np.exp(NOISE * rng.normal(size=len(graph.sizes)))
    run = _Run(graph, budget_bytes, cost_weight, factors.tolist())
    for node in range(len(graph)):
        if not run.stage(node, graph.reads[node]):
            return None
    if not run.stage(None, graph.outputs):
        return None
    order = without_unread(graph, run.order)
    return order if replay(graph, order).peak_bytes <= budget_bytes else None


def without_unread(graph: ScheduleGraph, order: Sequence[int]) -> list[int]:
    """The schedule without repeated steps that make nothing that is read before it is made again."""
    first = {node: step for step, node in reversed(list(enumerate(order)))}
    wanted = set(graph.outputs)
    kept: list[int] = []
    for step in range(len(order) - 1, -1, -1):
        node = order[step]
        if first[node] == step or not wanted.isdisjoint(graph.makes[node]):
            kept.append(node)
            wanted.difference_update(graph.makes[node])
            wanted.update(graph.reads[node])
    return kept[::-1]


class _Run:
    """A schedule in the making: what is live, and the steps so far."""

    def __init__(self, graph: ScheduleGraph, budget_bytes: int, cost_weight: float, factors: list[float]) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._cost_weight = cost_weight
        self._factors = factors
        self._live: set[int] = set()
        self._used = 0
        self._outputs = set(graph.outputs)
        self._once = set(graph.once)
        self.order: list[int] = []

    def stage(self, node: int | None, reads: Sequence[int]) -> bool:
        """The first computation of a node (None: of none), after what has to be computed again for what it reads."""
        graph = self._graph
        again: set[int] = set()
        missing = [v for v in reads if v not in self._live]
        while missing:
            maker = graph.maker[missing.pop()]
            if maker in self._once:
                return False
            if maker not in again:
                again.add(maker)
                missing += [v for v in graph.reads[maker] if v not in self._live]
        steps = sorted(again)
        last_read = dict.fromkeys(reads, len(steps))
        if node is not None:
            steps.append(node)
        for number, step in enumerate(steps):
            for value in graph.reads[step]:
                last_read[value] = max(number, last_read.get(value, 0))
        for number, step in enumerate(steps):
            pinned = {v for v, last in last_read.items() if last >= number}
            made = [v for v in graph.makes[step] if v not in self._live]
            if not self._make_room(
                graph.bytes_of(made), pinned.union(graph.makes[step]), len(graph) if node is None else node
            ):
                return False
            self._live.update(made)
            self._used += graph.bytes_of(made)
            self.order.append(step)
        return True

    def _make_room(self, size: int, pinned: set[int], stage: int) -> bool:
        excess = self._used + size - self._budget_bytes
        if excess <= 0:
            return True
        droppable = sorted((self._regret(v, stage), v) for v in self._live - pinned)
        for _, value in droppable:
            self._live.discard(value)
            self._used -= self._graph.sizes[value]
            excess -= self._graph.sizes[value]
            if excess <= 0:
                return True
        return False

    def _regret(self, value: int, stage: int) -> float:
        """How much dropping a value costs per byte and stage until it is read again; negative if it never is."""
        graph = self._graph
        read = self._next_read(value, stage)
        for reader in graph.readers[value]:
            # what was dropped is made again when it is read, and then reads this
            if reader < stage:
                dropped = [v for v in graph.makes[reader] if v not in self._live]
                read = min([read, *(self._next_read(v, stage) for v in dropped)])
        if read > len(graph):
            return -1.0
        maker = graph.maker[value]
        if maker in self._once:
            return math.inf
        lost = {graph.maker[v] for v in graph.reads[maker] if v not in self._live}
        cost = graph.costs[maker] + sum(graph.costs[node] for node in lost)
        return self._factors[value] * cost**self._cost_weight / (max(graph.sizes[value], 1) * (read - stage + 1))

    def _next_read(self, value: int, stage: int) -> int:
        """The stage that reads a value next: that after the last node for outputs, one more for what is never read."""
        readers = self._graph.readers[value]
        number = bisect_left(readers, stage)
        if number < len(readers):
            return readers[number]
        return len(self._graph) + (value not in self._outputs)
