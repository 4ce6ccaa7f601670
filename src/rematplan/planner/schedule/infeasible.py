"""What to say when no schedule fits a budget: the smallest budget that does, and what its peak consists of.

Comes in: a graph and the budget that failed. Goes out: the error to raise.
"""

from __future__ import annotations

from rematplan.errors import InfeasibleBudget
from rematplan.planner.schedule.eviction import COST_WEIGHTS, evicting
from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.referee import replay

# Halvings of the range between what one step needs and the peak of the graph's own order.
HALVINGS = 12


def infeasible(graph: ScheduleGraph, budget_bytes: int, *, proven: bool) -> InfeasibleBudget:
    """The error for a budget that no schedule was found for.

    Args:
      proven: whether there is none.
    """
    largest = max(range(len(graph)), key=graph.step_bytes)
    needed = graph.step_bytes(largest)
    order = smallest(graph, above_bytes=max(needed, budget_bytes + 1) - 1)
    replayed = replay(graph, order)
    node = order[replayed.peak_step]
    parts = {
        f"what node {node} makes": graph.bytes_of(graph.makes[node]),
        "what it reads": graph.bytes_of(graph.reads[node]),
        "what is kept for later": replayed.peak_bytes - graph.step_bytes(node),
    }
    parts = {name: size for name, size in parts.items() if size}
    listed = ", ".join(f"{name} {size}" for name, size in parts.items())
    if needed > budget_bytes:
        why = f"what node {largest} reads and makes is {needed} bytes"
    else:
        why = "proven" if proven else "none was found, which is no proof: more time may find one"
    message = (
        f"no schedule fits {budget_bytes} bytes ({why}); the smallest peak found is {replayed.peak_bytes} bytes "
        f"({listed}): raise the budget to that"
    )
    return InfeasibleBudget(message, minimum_bytes=replayed.peak_bytes, parts=parts)


def smallest(graph: ScheduleGraph, *, above_bytes: int) -> list[int]:
    """A schedule of small peak: by bisection over budgets above a given one."""
    best = list(range(len(graph)))
    low, high = above_bytes, replay(graph, best).peak_bytes
    for _ in range(HALVINGS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        tried = (evicting(graph, budget_bytes=middle, cost_weight=weight) for weight in COST_WEIGHTS)
        order = next((order for order in tried if order is not None), None)
        if order is None:
            low = middle
        else:
            best, high = order, replay(graph, order).peak_bytes
    return best
