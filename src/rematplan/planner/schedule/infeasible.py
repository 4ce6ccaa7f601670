"""What to say when no schedule fits a budget: the smallest budget that does, and what its peak consists of.

Comes in: a graph and the budget that failed. Goes out: the error to raise.
"""

from __future__ import annotations

from rematplan.errors import InfeasibleBudget
from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.minimise import Deadline
from rematplan.planner.schedule.referee import replay
from rematplan.planner.schedule.smallest import smallest


def infeasible(
    graph: ScheduleGraph, budget_bytes: int, *, proven: bool, deadline: Deadline, seed: int
) -> InfeasibleBudget:
    """The error for a budget that no schedule was found for.

    Args:
      proven: whether there is none.
      deadline: for the search of the smallest budget.
    """
    largest = max(range(len(graph)), key=graph.step_bytes)
    needed = graph.step_bytes(largest)
    least_bytes = max(needed, budget_bytes + 1)
    order = smallest(graph, least_bytes=least_bytes, deadline=deadline, seed=seed)
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
        problem = f"no schedule fits {budget_bytes} bytes (what node {largest} reads and makes is {needed} bytes)"
    elif proven:
        problem = f"no schedule fits {budget_bytes} bytes (every selection of steps was ruled out)"
    else:
        problem = f"no schedule was found that fits {budget_bytes} bytes, nor a proof that there is none"
    message = f"{problem}; the smallest peak found is {replayed.peak_bytes} bytes ({listed}): raise the budget to that"
    return InfeasibleBudget(message, minimum_bytes=replayed.peak_bytes, parts=parts)
