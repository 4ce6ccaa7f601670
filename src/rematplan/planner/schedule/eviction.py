"""A first schedule, quickly: run the graph in order, drop what is cheapest to bring back, bring it back when it is read.

Comes in: a `ScheduleGraph`, a budget and how much cost weighs against bytes and time. Goes out: a schedule that fits,
or None where this rule runs into a wall. The rule is that of dynamic tensor rematerialization (Kirisame et al. 2021)
with the future known: drop the value with the least cost per byte and step until it is read again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.referee import replay

# Exponents of the cost to bring a value back: 1 is the rule as published, 0 drops what is read last (Belady).
COST_WEIGHTS = (1.0, 0.5, 0.0)


def evicting(graph: ScheduleGraph, *, budget_bytes: int, cost_weight: float) -> list[int] | None:
    """A schedule within the budget; None if the rule drops what it cannot do without."""
    run = _Run(graph, budget_bytes, cost_weight)
    for node in range(len(graph)):
        if not run.stage(node):
            return None
    order = without_unread(graph, run.order)
    return order if replay(graph, order).peak_bytes <= budget_bytes else None


def without_unread(graph: ScheduleGraph, order: Sequence[int]) -> list[int]:
    """The schedule without repeated steps whose value nothing reads before it is computed again."""
    first = {node: step for step, node in reversed(list(enumerate(order)))}
    wanted = set(graph.outputs)
    kept: list[int] = []
    for step in range(len(order) - 1, -1, -1):
        node = order[step]
        if node in wanted or first[node] == step:
            kept.append(node)
            wanted.discard(node)
            wanted.update(graph.inputs[node])
    return kept[::-1]


class _Run:
    def __init__(self, graph: ScheduleGraph, budget_bytes: int, cost_weight: float) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._cost_weight = cost_weight
        self._live: set[int] = set()
        self._used = 0
        self._outputs = set(graph.outputs)
        self.order: list[int] = []

    def stage(self, node: int) -> bool:
        """The first computation of a node, after what has to be computed again for it."""
        missing: set[int] = set()
        stack = [node]
        while stack:
            needed = [i for i in self._graph.inputs[stack.pop()] if i not in self._live and i not in missing]
            missing.update(needed)
            stack += needed
        steps = [*sorted(missing), node]
        last_read = {i: number for number, step in enumerate(steps) for i in self._graph.inputs[step]}
        for number, step in enumerate(steps):
            pinned = {i for i, last in last_read.items() if last >= number}
            size = self._graph.sizes[step]
            if not self._make_room(size, pinned, node):
                return False
            self._live.add(step)
            self._used += size
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
        """How much dropping a value costs per byte and stage until it is read again."""
        graph = self._graph
        read = self._next_read(value, stage)
        for reader in graph.readers[value]:
            # a reader that was dropped is computed again when it is read
            if reader < stage and reader not in self._live:
                read = min(read, self._next_read(reader, stage))
        if read == len(graph) and value not in self._outputs:
            return -1.0
        cost = graph.costs[value] + sum(graph.costs[i] for i in graph.inputs[value] if i not in self._live)
        return (cost + 1e-9) ** self._cost_weight / (max(graph.sizes[value], 1) * (read - stage + 1))

    def _next_read(self, value: int, stage: int) -> int:
        readers = self._graph.readers[value]
        number = bisect_left(readers, stage)
        return readers[number] if number < len(readers) else len(self._graph)
