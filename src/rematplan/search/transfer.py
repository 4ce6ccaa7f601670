"""What was found for one value of a sweep, probed at another: one probe, or two, in place of a whole search.

Plans are of a structure, not of shapes, and how much longer they take hardly changes with a batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

from rematplan.errors import InfeasibleBudget
from rematplan.search.extrapolate import Figures
from rematplan.search.planning import Search
from rematplan.search.problem import Problem

# Budgets between the smallest plan and none, to learn what a slowdown allows.
BUDGETS_TRIED = 5


def nearest_alike(searches: Mapping[int, Search], problem: Problem, value: int) -> Search | None:
    """The search of the nearest value whose program has the same structure; None if there is none."""
    nearest = sorted(searches, key=lambda known: abs(math.log(known / value)))
    alike = (searches[known] for known in nearest)
    return next((s for s in alike if s.problem.graph.fingerprint == problem.graph.fingerprint), None)


def transferred(search: Search, problem: Problem, *, slowdown: float | None) -> tuple[Figures, Figures | None] | None:
    """Probes the smallest plan of a search that is fast enough on another program of the same structure.

    Returns:
      Its figures and, where time matters, those without checkpointing; None if nothing was fast enough.
    """
    known = [p for p in search.probes.repriced() if p.figures.measurements]
    plain = next(p for p in known if p.candidate.name == "plain")
    if slowdown is not None:
        known = [p for p in known if p.figures.seconds <= slowdown * plain.figures.seconds]
        if not known:
            return None
    smallest = min(known, key=lambda p: p.figures.required_bytes)
    asked = [smallest.candidate] + ([plain.candidate] if slowdown is not None else [])
    tasks = [(c.name, c.configuration, c.period) for c in asked]
    figures, *without = problem.figures(tasks, search.prices.seconds)
    return figures, without[0] if without else None


def look_for_fast_ones(search: Search, *, slowdown: float) -> None:
    """Makes plans for other budgets, so that the search knows about the smallest plan that is fast enough."""
    least, most = search.probes.smallest_bytes(), search.probes.plain.required_bytes
    for _ in range(BUDGETS_TRIED):
        budget = (least + most) // 2
        with contextlib.suppress(InfeasibleBudget):
            seconds, plain_seconds = search.estimate(budget).best.measurement.seconds, predicted_plain_seconds(search)
            if seconds and plain_seconds and seconds <= slowdown * plain_seconds:
                most = budget
                continue
        least = budget


def predicted_plain_seconds(search: Search) -> float | None:
    """Seconds without checkpointing, by the prices of the search."""
    rows = search.probes.hand_written_rows()
    return next((figures.seconds for c, figures in rows if c.name == "plain"), None)
