"""Which steps a schedule may be selected from.

Comes in: a `ScheduleGraph`, a budget, and how far to look. Goes out: `Candidates` in stages. Stage `t` ends with the
first computation of node `t`; before it, some earlier nodes may be computed again, each once, in the order of the graph.
One more stage follows the last node, for outputs. That is the problem as Checkmate (Jain et al. 2020) and Moccasin
(Bartan et al. 2023) define it; `everything` holds all of it, `nearby` the few steps that matter most,
`between_checkpoints` is a relaxation that merges stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.planner.schedule.referee import replay


@dataclass(frozen=True)
class Candidates:
    """Steps to select from.

    Attributes:
      nodes: the node that each step computes; the first step of each node is mandatory.
      mandatory: by step.
      counted: by step, whether a bound must respect its bytes; fewer than all make a relaxation.
    """

    nodes: np.ndarray
    mandatory: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.nodes)

    def active(self, chosen: np.ndarray) -> list[int]:
        """The nodes of the mandatory steps and of those `chosen`, in order."""
        return self.nodes[self.mandatory | chosen].tolist()


def in_stages(stages: Sequence[Iterable[int]]) -> Candidates:
    """Candidates from the nodes that may be computed again in each stage, the one after the last node included."""
    nodes: list[int] = []
    mandatory: list[bool] = []
    for stage, again in enumerate(stages):
        nodes += sorted(again)
        mandatory += [False] * (len(nodes) - len(mandatory))
        if stage < len(stages) - 1:
            nodes.append(stage)
            mandatory.append(True)
    return Candidates(np.asarray(nodes), np.asarray(mandatory), np.ones(len(nodes), dtype=bool))


def everything(graph: ScheduleGraph, *, cost_limit: float) -> Candidates:
    """Every node in every later stage, but for nodes that cost more than the limit."""
    cheap = graph.repeatable(cost_limit)
    last = cheap if graph.outputs else []
    return in_stages([*(cheap[: bisect_left(cheap, stage)] for stage in range(len(graph))), last])


def nearby(
    graph: ScheduleGraph, *, budget_bytes: int, depth: int, cost_limit: float, order: Sequence[int] = ()
) -> Candidates:
    """Steps right before the first computation that reads them, and the steps that those need in turn.

    Args:
      depth: 1 computes again only what the stage's own node reads, 2 also what those steps read, and so on.
      order: a known schedule, whose steps are added.
    """
    near = nearby_stages(graph, budget_bytes=budget_bytes, depth=depth, cost_limit=cost_limit)
    return in_stages([again | known for again, known in zip(near, stages_of(graph, order), strict=True)])


def nearby_stages(graph: ScheduleGraph, *, budget_bytes: int, depth: int, cost_limit: float) -> list[set[int]]:
    """By stage, the nodes of `nearby`.

    A value is worth a step only if it could be dropped meanwhile where the graph's own order exceeds the budget.
    """
    exceeds = np.asarray(replay(graph, range(len(graph))).step_bytes) > budget_bytes
    exceeding_before = [0, *np.cumsum(exceeds).tolist()]
    cheap = set(graph.repeatable(cost_limit))
    stages: list[set[int]] = []
    for stage in range(len(graph) + 1):
        again: set[int] = set()
        reads = set(graph.reads[stage] if stage < len(graph) else graph.outputs)
        for _ in range(depth):
            reached: set[int] = set()
            for value in reads:
                readers, node = graph.readers[value], graph.maker[value]
                number = bisect_left(readers, stage)
                last_event = readers[number - 1] if number else node
                droppable = exceeding_before[stage] > exceeding_before[last_event + 1]
                if droppable and node in cheap:
                    reached.add(node)
            reached -= again
            again |= reached
            reads = {value for node in reached for value in graph.reads[node]}
        stages.append(again)
    return stages


def stages_of(graph: ScheduleGraph, order: Sequence[int]) -> list[set[int]]:
    """By stage: the nodes that a schedule computes again in it; the last stage follows the last node."""
    stages: list[set[int]] = [set() for _ in range(len(graph) + 1)]
    stage = 0
    for node in order:
        if node == stage and stage < len(graph):
            stage += 1
        else:
            stages[stage].add(node)
    return stages


def checkpoints_of(graph: ScheduleGraph, *, budget_bytes: int, count: int) -> list[int]:
    """Nodes that split the bytes by which the graph's own order exceeds a budget into parts of equal size."""
    own = np.asarray(replay(graph, range(len(graph))).step_bytes, dtype=np.float64)
    excess = np.cumsum(np.maximum(own - budget_bytes, 0.0))
    shares = (np.arange(count) + 0.5) / count
    return np.unique(np.searchsorted(excess, shares * excess[-1])).tolist()


def between_checkpoints(graph: ScheduleGraph, checkpoints: Sequence[int], *, cost_limit: float) -> Candidates:
    """A relaxation: bytes count at a few first computations only, and between two of them a node is computed once.

    Whatever a schedule computes between two checkpoints, it could compute in the order of the graph if bytes did not
    count there, and computing a node twice costs no less than once. So what this allows is no dearer than any schedule.

    Args:
      checkpoints: nodes, increasing.
    """
    cheap = np.zeros(len(graph), dtype=bool)
    cheap[graph.repeatable(cost_limit)] = True
    nodes: list[np.ndarray] = []
    mandatory: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    last = len(graph) - 1
    begin = 0
    ends = [*dict.fromkeys([*checkpoints, last]), *([last] if graph.outputs else [])]
    for checkpoint in ends:
        new = np.arange(checkpoint + 1) >= begin
        chosen = new | cheap[: checkpoint + 1]
        nodes.append(np.nonzero(chosen)[0])
        mandatory.append(new[chosen])
        counted.append((nodes[-1] == checkpoint) & mandatory[-1])
        begin = checkpoint + 1
    return Candidates(np.concatenate(nodes), np.concatenate(mandatory), np.concatenate(counted))
