"""A stretch of operations -> the undominated sets of values that a checkpoint region around it may save.

Comes in: a `Graph`, a stretch `[start, stop)`, and rates to price operations. Goes out: `SaveSet`s between "nothing
saved" and "nothing recomputed". Candidates are all values of the stretch: what the backward pass needs can be saved
itself, or recomputed from anything saved above it. For a price per saved byte the cheapest set is a minimum cut
(`mincut.py`); all prices together give the lower convex hull of recompute time over bytes. Operations are priced by
`price.py`, which only ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count

from rematplan.planner.mincut import RecomputeNetwork
from rematplan.planner.price import Rates, operation_seconds
from rematplan.program.graph import Graph

# Improvements below this relative size are rounding.
RELATIVE_ROUNDING = 1e-7


@dataclass(frozen=True)
class SaveSet:
    """Values that a region saves.

    Attributes:
      values: value ids, in order of definition.
      recompute_seconds: what the backward pass recomputes in the region; a roofline, for ranking only.
      saved_bytes: size of `values`; the region's inputs, which are kept anyway, are not counted.
    """

    values: tuple[int, ...]
    recompute_seconds: float
    saved_bytes: int


@dataclass(frozen=True)
class Stretch:
    """The recompute problem of a region.

    Attributes:
      start, stop: operation indices, half-open.
      needed: values defined here that the backward pass of these operations reads, in order of definition.
      unsavable: values that cannot be saved by name: keys, tokens, complex numbers, and what takes no bytes.
      seconds: by operation of the stretch, what recomputing it costs.
    """

    graph: Graph
    start: int
    stop: int
    needed: tuple[int, ...]
    unsavable: frozenset[int]
    seconds: tuple[float, ...]

    @property
    def defined(self) -> dict[int, int]:
        """Value id -> operation, for values defined in the stretch."""
        operations = self.graph.operations[self.start : self.stop]
        return {v: op.index for op in operations for v in op.outputs}

    def recomputed(self, saved: Collection[int]) -> tuple[int, ...]:
        """Operations that the backward pass recomputes if these values are saved, in order."""
        return self._walk(saved)[0]

    def save_set(self, saved: Collection[int]) -> SaveSet:
        """Prices a set of saved values; values that no recomputation and no derivative would read are dropped."""
        recomputed, read = self._walk(saved)
        values = tuple(v for v in self.defined if v in read and v in saved)
        seconds = sum(self.seconds[i - self.start] for i in recomputed)
        return SaveSet(values, float(seconds), sum(self.graph.values[v].bytes for v in values))

    def _walk(self, saved: Collection[int]) -> tuple[tuple[int, ...], set[int]]:
        defined = self.defined
        read = set(self.needed)
        again: list[int] = []
        for op in reversed(self.graph.operations[self.start : self.stop]):
            if any(v in read and v not in saved for v in op.outputs):
                again.append(op.index)
                read.update(v for v in op.inputs if v in defined)
        return tuple(reversed(again)), read


def stretch(graph: Graph, start: int, stop: int, *, rates: Rates) -> Stretch:
    """The recompute problem of the region `[start, stop)`.

    What the region hands on is recomputed like everything else: `jax.checkpoint` keeps a region's inputs, not its outputs,
    even where the next region keeps them as its own inputs.

    Raises:
      ValueError: the stretch holds an operation with effects, which must not be recomputed.
    """
    operations = graph.operations[start:stop]
    barriers = [op.name for op in operations if op.barrier]
    if barriers:
        raise ValueError(f"operations {start} to {stop} cannot be one region: {barriers[0]} has effects")
    needed = {v for op in operations for v in op.needed}
    return Stretch(
        graph=graph,
        start=start,
        stop=stop,
        needed=tuple(v for op in operations for v in op.outputs if v in needed),
        unsavable=frozenset(v for op in operations for v in op.outputs if not _is_array(graph, v)),
        seconds=tuple(operation_seconds(graph, op, rates) for op in operations),
    )


def menu(problem: Stretch, *, limit: int | None = None) -> tuple[SaveSet, ...]:
    """The lower convex hull of recompute time over saved bytes, from nothing saved to nothing recomputed.

    Args:
      limit: at most so many sets, where the largest improvements are found first; by default all.

    Returns:
      Save sets by increasing bytes and decreasing seconds; the first saves nothing.
    """
    network = RecomputeNetwork(problem)
    nothing = problem.save_set(())
    everything = network.nothing_recomputed()
    if everything.saved_bytes == 0:
        # whatever is needed costs no bytes: saving it is always right
        return (everything,)
    found = [nothing, everything]
    order = count()  # so that equal areas are taken in the order they were found
    queue: list[tuple[float, int, SaveSet, SaveSet]] = []

    def push(low: SaveSet, high: SaveSet) -> None:
        area = (high.saved_bytes - low.saved_bytes) * (low.recompute_seconds - high.recompute_seconds)
        if area > 0:
            heapq.heappush(queue, (-area, next(order), low, high))

    push(nothing, everything)
    while queue and (limit is None or len(found) < limit):
        _, _, low, high = heapq.heappop(queue)
        price = (low.recompute_seconds - high.recompute_seconds) / (high.saved_bytes - low.saved_bytes)
        bound = low.recompute_seconds + price * low.saved_bytes
        between = network.cheapest(price, bound=bound)
        value = between.recompute_seconds + price * between.saved_bytes
        if value < bound * (1 - RELATIVE_ROUNDING):
            found.append(between)
            push(low, between)
            push(between, high)
    return _undominated(found)


def _undominated(sets: Iterable[SaveSet]) -> tuple[SaveSet, ...]:
    kept: list[SaveSet] = []
    for candidate in sorted(sets, key=lambda s: (s.saved_bytes, s.recompute_seconds, s.values)):
        if not kept or candidate.recompute_seconds < kept[-1].recompute_seconds:
            kept.append(candidate)
    return tuple(kept)


def _is_array(graph: Graph, value: int) -> bool:
    dtype = graph.values[value].dtype
    # what is saved by name goes through an operation that takes no complex numbers (jax 0.10.2)
    return graph.values[value].bytes > 0 and not dtype.startswith(("key", "token", "float0", "complex"))
