"""What becomes of each intermediate value under a configuration.

Comes in: a graph with residuals and a configuration whose regions say by value what they save. Goes out: for every value
that the backward pass reads, how often it is saved, offloaded or recomputed. This is what regions mean by themselves, as
planners see it; `program/saved.py` reads what JAX really keeps. Does not know JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from rematplan.program.configuration import PLAIN, Configuration, LoopPart, Region, in_every_iteration
from rematplan.program.graph import Graph, Nesting, Operation


class Decision(Enum):
    """What is done with a value that the backward pass reads."""

    SAVED = "saved"
    OFFLOADED = "offloaded"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True)
class Fate:
    """What is done with a value in some of its instances.

    Attributes:
      iterations: of the loops around it, in which; empty outside of loops.
    """

    decision: Decision
    iterations: tuple[range, ...] = ()

    @property
    def count(self) -> int:
        """How many instances: one outside of loops."""
        count = 1
        for each in self.iterations:
            count *= len(each)
        return count


Place = tuple[int, ...]
"""Operation indices of the loops around a program, outermost first."""


def decisions(
    graph: Graph, configuration: Configuration, in_loops: Mapping[Place, frozenset[int]] | None = None
) -> dict[tuple[Place, int], tuple[Fate, ...]]:
    """For each value that some backward pass reads, by the loops around it and its id: what is done with it.

    Arguments and constants are there anyway and are left out. What no backward pass reads is in no fate.

    Args:
      in_loops: what policies of regions around loops save in each iteration; by themselves, regions save nothing there.
    """
    found: dict[tuple[Place, int], list[Fate]] = {}
    for place, value, fate in _decisions(graph, configuration, (), (), in_loops or {}, recomputed=False):
        found.setdefault((place, value), []).append(fate)
    return {key: tuple(fates) for key, fates in found.items()}


def _decisions(
    graph: Graph,
    configuration: Configuration,
    place: Place,
    iterations: tuple[range, ...],
    in_loops: Mapping[Place, frozenset[int]],
    *,
    recomputed: bool,
) -> Iterator[tuple[Place, int, Fate]]:
    """What happens to each value of a program and of the loops in it.

    Args:
      recomputed: the whole program runs again, so nothing of it is kept but what `in_loops` says.
    """
    whole = Region(0, len(graph.operations), in_loops.get(place, frozenset()))
    for value, decision in _of_regions(graph, (whole,) if recomputed else configuration.regions).items():
        yield place, value, Fate(decision, iterations)
    for operation in graph.operations:
        nested = operation.subprogram
        if nested is None or nested.kind is not Nesting.LOOP:
            continue
        again = recomputed or any(r.start <= operation.index < r.stop for r in configuration.regions)
        loop = configuration.loop(operation.index) or in_every_iteration(PLAIN)
        for span, body, is_chunk in _parts(loop.parts, nested.length):
            inside, kept = (*place, operation.index), {} if is_chunk else in_loops
            spans = (*iterations, span)
            yield from _decisions(nested.graph, body, inside, spans, kept, recomputed=again or is_chunk)


def _parts(parts: Iterable[LoopPart], length: int) -> Iterator[tuple[range, Configuration, bool]]:
    """Iterations that are treated alike, how, and whether they lie in chunks, which keep nothing of what is inside."""
    start = 0
    for part in parts:
        count = length - start if part.iterations is None else min(part.iterations, length - start)
        in_chunks = count - count % part.chunk if part.chunk else 0
        if in_chunks:
            yield range(start, start + in_chunks), part.body, True
        if count > in_chunks:
            yield range(start + in_chunks, start + count), part.body, False
        start += count


def _of_regions(graph: Graph, regions: Iterable[Region]) -> dict[int, Decision]:
    regions = tuple(regions)
    covered = {index for region in regions for index in range(region.start, region.stop)}
    outside = (op for op in graph.operations if op.index not in covered)
    kept = {v: Decision.SAVED for v in _needed(outside) if graph.producer[v] >= 0}
    again: set[int] = set()
    for region in regions:
        inside = graph.operations[region.start : region.stop]
        wanted = _needed(inside)
        pending, seen = list(wanted), set[int]()
        while pending:
            value = pending.pop()
            producer = graph.producer[value]
            if value in seen or producer < 0:
                continue
            seen.add(value)
            if not region.start <= producer < region.stop:
                kept.setdefault(value, Decision.SAVED)
            elif value in region.saved:
                kept[value] = Decision.OFFLOADED if value in region.offloaded else Decision.SAVED
            else:
                again.update({value} & wanted)
                pending.extend(graph.operations[producer].inputs)
    return {**dict.fromkeys(again - kept.keys(), Decision.RECOMPUTED), **kept}


def _needed(operations: Iterable[Operation]) -> set[int]:
    return {value for operation in operations for value in operation.needed}


def operation_at(graph: Graph, place: Place, value: int) -> tuple[Graph, Operation]:
    """The program that a value stands in, and the operation that computes it."""
    for index in place:
        nested = graph.operations[index].subprogram
        assert nested is not None
        graph = nested.graph
    return graph, graph.operations[graph.producer[value]]
