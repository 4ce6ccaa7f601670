"""The scheduling problem as plain data: nodes in a fixed order, what each costs, and the values that it reads and makes.

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
      sizes: by value, its bytes.
      reads: by node, the values that it reads, increasing, each once; all made by earlier nodes.
      makes: by node, the values that it makes. Left out, every node makes one value of its own number.
      outputs: values that must be live at the end, increasing. Others may be dropped after they are last read; a value
        that nothing reads is live only in the step that makes it.
      once: nodes that must not be computed again, increasing.
    """

    costs: tuple[float, ...]
    sizes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    once: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.makes:
            object.__setattr__(self, "makes", tuple((node,) for node in range(len(self.costs))))
        count = len(self.costs)
        if len(self.reads) != count or len(self.makes) != count:
            raise InputError(f"{count} costs, but {len(self.reads)} lists of reads and {len(self.makes)} of makes")
        if sorted(v for made in self.makes for v in made) != list(range(len(self.sizes))):
            raise InputError(f"each of the {len(self.sizes)} values must be made by exactly one node")
        for value, size in enumerate(self.sizes):
            if size < 0:
                raise InputError(f"value {value} has {size} bytes: not negative is needed")
        for node, cost in enumerate(self.costs):
            if not (math.isfinite(cost) and cost >= 0):
                raise InputError(f"node {node} costs {cost}: a finite number, not negative, is needed")
            if not _increasing(self.reads[node], len(self.sizes)):
                raise InputError(f"node {node} reads {self.reads[node]}: give values in increasing order, each once")
            late = [v for v in self.reads[node] if self.maker[v] >= node]
            if late:
                raise InputError(f"node {node} reads values {late} before they are made: reorder the nodes")
        if not _increasing(self.outputs, len(self.sizes)):
            raise InputError(f"outputs {self.outputs} must be values in increasing order, each once")
        if not _increasing(self.once, count):
            raise InputError(f"nodes to compute once {self.once} must be in increasing order, each once")

    def __len__(self) -> int:
        return len(self.costs)

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """The node that makes each value."""
        found = [0] * len(self.sizes)
        for node, made in enumerate(self.makes):
            for value in made:
                found[value] = node
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each value, increasing."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for node, read in enumerate(self.reads):
            for value in read:
                found[value].append(node)
        return tuple(tuple(r) for r in found)

    @cached_property
    def total_cost(self) -> float:
        """Every node once."""
        return add(self.costs)

    def repeatable(self, cost_limit: float) -> list[int]:
        """Nodes that may be computed again and cost no more than a limit, increasing."""
        once = set(self.once)
        return [node for node, cost in enumerate(self.costs) if cost <= cost_limit and node not in once]

    def bytes_of(self, values: Sequence[int]) -> int:
        """The size of some values together."""
        return sum(self.sizes[v] for v in values)

    def step_bytes(self, node: int) -> int:
        """What computing a node needs by itself: what it reads and what it makes."""
        return self.bytes_of(self.reads[node]) + self.bytes_of(self.makes[node])


def _increasing(values: Sequence[int], count: int) -> bool:
    return list(values) == sorted(set(values)) and all(0 <= v < count for v in values)


def add(costs: Sequence[float]) -> float:
    """Sum of costs: exact for integers, correctly rounded otherwise, so equal for equal steps in any order."""
    return sum(costs) if all(isinstance(c, int) for c in costs) else math.fsum(costs)


def parse(data: Mapping[str, Any]) -> ScheduleGraph:
    """A graph from parsed JSON: `nodes` (mappings with `cost`, `bytes`), `edges` (pairs), optionally `outputs`.

    Raises:
      InputError: a key is missing, or the graph is not one.
    """
    try:
        costs = tuple(n["cost"] for n in data["nodes"])
        sizes = tuple(int(n["bytes"]) for n in data["nodes"])
        edges = [(int(source), int(target)) for source, target in data["edges"]]
        outputs = tuple(sorted(int(o) for o in data.get("outputs", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"a graph needs nodes with cost and bytes, and edges as pairs of numbers: {error!r}"
        ) from error
    reads: list[set[int]] = [set() for _ in costs]
    for source, target in edges:
        if not 0 <= source < target < len(costs):
            raise InputError(f"edge {source, target}: not in the order of {len(costs)} nodes, reorder the nodes")
        reads[target].add(source)
    return ScheduleGraph(costs, sizes, tuple(tuple(sorted(r)) for r in reads), outputs=outputs)
