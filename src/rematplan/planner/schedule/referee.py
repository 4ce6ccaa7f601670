"""The referee: replays a schedule and counts what is live at every step.

Comes in: a `ScheduleGraph` and the node computed at every step. Goes out: bytes at every step, the peak, the cost. It
walks the steps twice with sets and shares nothing with the solvers.

A value is live from the step that makes it to the last step that reads it before it is made again; what a step reads and
makes is live during it; outputs of the graph are live to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.planner.schedule.graph import ScheduleGraph, add


@dataclass(frozen=True)
class Replay:
    """A schedule, replayed.

    Attributes:
      cost: of all steps.
      peak_bytes: the most that is live at any step.
      step_bytes: live bytes by step.
      peak_step: the first step with the most bytes.
      peak_values: the values live at it.
    """

    cost: float
    peak_bytes: int
    step_bytes: tuple[int, ...]
    peak_step: int
    peak_values: tuple[int, ...]


def replay(graph: ScheduleGraph, order: Sequence[int]) -> Replay:
    """Runs a schedule on paper.

    Raises:
      ValueError: a node is never computed, one that must not be is computed again, or nodes are computed for the first
        time in another order than the graph's.
    """
    known, once = 0, set(graph.once)
    for step, node in enumerate(order):
        if node == known < len(graph):
            known += 1
        elif not 0 <= node < known:
            raise ValueError(f"step {step} computes node {node}, and {known} of {len(graph)} were known before")
        elif node in once:
            raise ValueError(f"step {step} computes node {node} again")
    if known != len(graph):
        raise ValueError(f"node {known} is never computed")

    # Backwards: which values some later step reads before they are made again.
    wanted = set(graph.outputs)
    kept: list[frozenset[int]] = []
    for node in reversed(order):
        wanted.difference_update(graph.makes[node])
        kept.append(frozenset(wanted))  # lives through this step from before it, besides what it reads
        wanted.update(graph.reads[node])
    assert not wanted, "values are made before they are read, and nodes are first computed in order"
    kept.reverse()

    sizes: list[int] = []
    peak_bytes, peak_step, peak_values = 0, 0, frozenset[int]()
    for step, (node, through) in enumerate(zip(order, kept, strict=True)):
        live = through.union(graph.makes[node], graph.reads[node])
        sizes.append(sum(graph.sizes[v] for v in live))
        if sizes[-1] > peak_bytes:
            peak_bytes, peak_step, peak_values = sizes[-1], step, live
    return Replay(
        cost=add([graph.costs[node] for node in order]),
        peak_bytes=peak_bytes,
        step_bytes=tuple(sizes),
        peak_step=peak_step,
        peak_values=tuple(sorted(peak_values)),
    )
