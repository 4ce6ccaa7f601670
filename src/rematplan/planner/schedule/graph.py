"""The scheduling problem as plain data: nodes in a fixed order, each with a cost, a size in bytes and the nodes it reads.

Comes in: a parsed JSON graph (`nodes` with `cost` and `bytes`, `edges` as index pairs), or numbers. Goes out: a checked
`ScheduleGraph`. What the costs mean (seconds, operations) this module does not know; it only adds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rematplan.errors import InputError


@dataclass(frozen=True)
class ScheduleGraph:
    """Nodes in the order in which each is computed for the first time.

    Attributes:
      costs: by node, what one computation costs; not negative.
      sizes: by node, bytes of its value.
      inputs: by node, the earlier nodes that it reads, increasing, each once.
      outputs: nodes whose values must be live at the end, increasing. Others may be dropped after their last reader; a
        value that nothing reads is live in its own step only.
    """

    costs: tuple[float, ...]
    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.costs)
        if len(self.sizes) != count or len(self.inputs) != count:
            raise InputError(f"{count} costs, {len(self.sizes)} sizes and {len(self.inputs)} input lists: one per node")
        for node, cost in enumerate(self.costs):
            if not (math.isfinite(cost) and cost >= 0):
                raise InputError(f"node {node} costs {cost}: a finite number, not negative, is needed")
            if self.sizes[node] < 0:
                raise InputError(f"node {node} has {self.sizes[node]} bytes: not negative is needed")
            reads = self.inputs[node]
            if any(not 0 <= i < node for i in reads):
                raise InputError(f"node {node} reads {reads}: the order is not topological, reorder the nodes")
            if list(reads) != sorted(set(reads)):
                raise InputError(f"node {node} reads {reads}: give inputs in increasing order, each once")
        if list(self.outputs) != sorted(set(self.outputs)) or any(not 0 <= o < count for o in self.outputs):
            raise InputError(f"outputs {self.outputs} must be nodes in increasing order, each once")

    def __len__(self) -> int:
        return len(self.costs)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By node: the later nodes that read it, increasing."""
        found: list[list[int]] = [[] for _ in self.costs]
        for node, reads in enumerate(self.inputs):
            for i in reads:
                found[i].append(node)
        return tuple(tuple(r) for r in found)

    @cached_property
    def total_cost(self) -> float:
        """Every node once."""
        return add(self.costs)

    def step_bytes(self, node: int) -> int:
        """What computing a node needs by itself: its value and its inputs."""
        return self.sizes[node] + sum(self.sizes[i] for i in self.inputs[node])


def add(costs: Sequence[float]) -> float:
    """Sum of costs: exact for integers, correctly rounded otherwise, so equal for equal steps in any order."""
    return sum(costs) if all(isinstance(c, int) for c in costs) else math.fsum(costs)


def parse(data: Mapping[str, Any]) -> ScheduleGraph:
    """A graph from parsed JSON: `nodes` (mappings with `cost`, `bytes`), `edges` (pairs), optionally `outputs`.

    Raises:
      InputError: a key is missing, or the graph is not one.
    """
    try:
        nodes, edges = data["nodes"], data["edges"]
        costs = tuple(n["cost"] for n in nodes)
        sizes = tuple(int(n["bytes"]) for n in nodes)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a graph needs nodes with cost and bytes, and edges: {error!r}") from error
    inputs: list[set[int]] = [set() for _ in costs]
    for edge in edges:
        source, target = edge
        if not 0 <= source < target < len(costs):
            raise InputError(
                f"edge {tuple(edge)}: the order of {len(costs)} nodes is not topological, reorder the nodes"
            )
        inputs[target].add(source)
    return ScheduleGraph(costs, sizes, tuple(tuple(sorted(i)) for i in inputs), tuple(sorted(data.get("outputs", ()))))
