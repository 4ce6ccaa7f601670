"""Large neighbourhood search: selections that look deep in one window of stages and keep to a known schedule elsewhere.

Comes in: a graph, a budget, a schedule. Goes out: one neighbourhood after the other as `Candidates`, for whoever solves
them. Windows overlap by half and run from the last stage to the first, because what is computed again for late stages
was dropped at the peak. When a whole sweep has changed nothing, windows grow; the last one holds all stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematplan.planner.schedule.candidates import Candidates, in_stages, nearby_stages, stages_of
from rematplan.planner.schedule.graph import ScheduleGraph

# Optional steps of the first windows: such a program takes HiGHS seconds.
FIRST_WIDTH = 1000
# Steps near the reads that need them, and the steps those need: deeper finds little and costs much.
DEPTH = 2


class Windows:
    """Neighbourhoods of a schedule."""

    def __init__(self, graph: ScheduleGraph, *, budget_bytes: int, seed: int) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._rng = np.random.default_rng(seed)
        self._width = FIRST_WIDTH
        self._stop = -1  # number of steps before the end of the next window; negative: a sweep is over
        self._changed = True

    def changed(self) -> None:
        """Tells that the last neighbourhood held a better schedule."""
        self._changed = True

    def next(self, order: Sequence[int], *, cost_limit: float) -> Candidates | None:
        """The next neighbourhood of a schedule; None when all have been seen."""
        near = nearby_stages(self._graph, budget_bytes=self._budget_bytes, depth=DEPTH, cost_limit=cost_limit)
        before = np.cumsum([0, *(len(again) for again in near)])
        total = int(before[-1])
        if self._stop < 0:
            if not self._changed:
                if self._width >= total:
                    return None
                self._width *= 2
            self._changed = False
            self._stop = total
            if self._width < total:
                self._stop += int(self._rng.integers(0, self._width // 2))
        stages = stages_of(self._graph, order)
        for stage, again in enumerate(near):
            if self._stop - self._width < before[stage + 1] and before[stage] < self._stop:
                stages[stage] |= again
        self._stop -= max(1, self._width // 2)
        if self._stop <= self._width // 2:
            self._stop = -1
        return in_stages(stages)
