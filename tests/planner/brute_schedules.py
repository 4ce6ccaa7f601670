"""The cheapest schedule of a small graph by search over live sets, for tests.

Dijkstra over what is live. A value is dropped only when a step would not fit otherwise: what is live can always be
dropped later, so this loses nothing.
"""

from __future__ import annotations

import heapq
from enum import Enum

from rematplan.planner.schedule import ScheduleGraph


class Rule(Enum):
    """What may be computed again before a first computation."""

    IN_ORDER = "in order"  # earlier nodes in the graph's order, each at most once
    ANY = "any"  # earlier nodes in any order, as often as wanted


def cheapest(graph: ScheduleGraph, budget_bytes: int, rule: Rule = Rule.IN_ORDER) -> float | None:
    """The cost of the cheapest schedule within the budget; None if there is none."""
    end = len(graph)
    best = {(0, 0, 0): 0.0}
    queue: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]  # cost, stage, next node that may be computed, live
    while queue:
        cost, stage, first, live = heapq.heappop(queue)
        if cost > best[stage, first, live]:
            continue
        if stage == end and all(live >> output & 1 for output in graph.outputs):
            return cost  # else outputs are computed again after the last node
        for node in range(first if rule is Rule.IN_ORDER else 0, min(stage, end - 1) + 1):
            again = node < stage
            if again and (node in graph.once or all(live >> v & 1 for v in graph.makes[node])):
                continue
            if not all(live >> v & 1 for v in graph.reads[node]):
                continue
            after = live | sum(1 << v for v in graph.makes[node])
            if sum(size for v, size in enumerate(graph.sizes) if after >> v & 1) <= budget_bytes:
                state = (stage, node + 1, after) if again else (stage + 1, 0, after)
                arrivals = [(cost + graph.costs[node], *state)]
            else:
                keep = {*graph.makes[node], *graph.reads[node]}
                droppable = [v for v in range(len(graph.sizes)) if live >> v & 1 and v not in keep]
                arrivals = [(cost, stage, first, live & ~(1 << v)) for v in droppable]
            for reached, *key in arrivals:
                state = (key[0], key[1] if rule is Rule.IN_ORDER else 0, key[2])
                if reached < best.get(state, float("inf")):
                    best[state] = reached
                    heapq.heappush(queue, (reached, *state))
    return None
