"""A graph -> the positions where it is best cut.

Comes in: a `Graph`. Goes out: `CutPoint`s between operations where few bytes are live, from the last use of every
intermediate. Parameters, inputs and constants live anyway and do not count; nor does a value that is only kept because
the program returns it. Between two heavy operations (matrix products, convolutions, loops) at most one cut is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rematplan.program.graph import Graph, Nesting, Operation, ValueKind

# An operation is heavy from this share of the average operation's work on: with some fifteen elementwise operations to
# a matrix product the average is far below a product and far above an elementwise operation.
HEAVY_SHARE_OF_MEAN = 1 / 8
# ... and does so many FLOPs per element of its largest array. Elementwise operations and reductions do one, an
# activation function that is one operation some ten, a depthwise 3x3 convolution 18.
HEAVY_FLOPS_PER_ELEMENT = 16
# A block with less than this share of the program's work is joined to a neighbour: half a layer of a 200-layer model
# has more.
SMALLEST_BLOCK_SHARE = 1 / 1024
# Byte counts this close are equal for the choice of a cut: small values (scalars, masks) come and go.
TOLERANCE = 1.05
# A value that crosses this share of the program, and at least so many heavy operations, is a side value: a mask or
# positions that every layer reads, the outermost skip of a U-Net. It says nothing about where to cut.
SIDE_SHARE = 0.5
SIDE_HEAVY_OPERATIONS = 8
# Of several values live at a cut, at most this many may have been made by the last few heavy operations: a U-Net
# carries its skips and the value in flight, but a cut between queries, keys, values and their use is none.
MOST_RECENT_VALUES = 2
RECENT_HEAVY_OPERATIONS = 4
# Blocks that begin like at least this share of the most frequent beginning are equal: first and last layers differ.
OPENING_SHARE = 0.5
# A live value smaller than this share of all live bytes does not count as a second value at a cut.
SMALL_SHARE = 0.1


@dataclass(frozen=True)
class CutPoint:
    """A position between two operations.

    Attributes:
      position: index of the operation after the cut.
      live: intermediates live across it, side values included.
      live_bytes: their size without side values.
      depth: how deep in the module tree the boundary lies that it coincides with; small for large modules.
    """

    position: int
    live: tuple[int, ...]
    live_bytes: int
    depth: int


def cut_points(graph: Graph, *, transient_inputs: Collection[int] = ()) -> tuple[CutPoint, ...]:
    """Good positions to cut, in order.

    Of the positions between two heavy operations, the one with the fewest live bytes is a candidate; within 5 % one
    wins that begins a block as others begin (so that repeated layers are cut alike), then the shallowest module
    boundary, then the last. A candidate is good if one single value is live and is no larger than
    what is live at one of the neighbouring candidates, or if it has no more live bytes than both neighbours and at most
    two of its values were just made.

    Args:
      transient_inputs: inputs that count like intermediates, because they do not live anyway: in the body of a loop,
        the carry and the slices of stacked inputs.
    """
    count = len(graph.operations)
    if count < 2:
        return ()
    side = set(side_values(graph))
    crossing = crossing_bytes(graph, without=side, transient_inputs=transient_inputs)
    heavy = heavy_operations(graph)
    if not heavy:
        return ()
    stretches = [[p for p in range(a + 1, b + 1) if 0 < p < count] for a, b in pairwise([-1, *heavy, count])]
    ties = [_fewest_bytes(positions, crossing) for positions in stretches if positions]

    liveness = _Liveness(graph, crossing, transient_inputs)
    gaps = [liveness.at(_best_position(graph, positions, {})) for positions in ties]
    good = [i for i in range(len(gaps)) if _is_good(graph, gaps, i, heavy, side)]
    if good and 0 < crossing[0] <= gaps[good[0]].live_bytes and gaps[good[0]].position <= heavy[0]:
        # before the first heavy operation nothing is gained over the start itself, where a loop's carry is live
        del good[0]
    openings = Counter(_opening(graph, gaps[i].position) for i in good)
    points = [liveness.at(_best_position(graph, ties[i], openings)) for i in good]
    return tuple(_drop_small_blocks(points, work(graph)))


def side_values(graph: Graph) -> tuple[int, ...]:
    """Intermediates that are live across most of the program, in order of definition."""
    heavy = np.asarray(heavy_operations(graph))
    reads, made_by = last_read(graph), producers(graph)
    least = max(SIDE_HEAVY_OPERATIONS, SIDE_SHARE * len(heavy))
    found: list[int] = []
    for value in graph.values:
        if value.kind is ValueKind.INTERMEDIATE and reads[value.id] > made_by[value.id]:
            crossed = np.searchsorted(heavy, reads[value.id]) - np.searchsorted(heavy, made_by[value.id], side="right")
            if crossed >= least:
                found.append(value.id)
    return tuple(found)


def heavy_operations(graph: Graph) -> tuple[int, ...]:
    """Indices of the operations that do a meaningful share of the work: products, convolutions and loops.

    Of a program without any, all operations with a meaningful share count.
    """
    weight = work(graph)
    threshold = HEAVY_SHARE_OF_MEAN * float(np.mean(weight)) if len(weight) else 0.0
    large = [i for i, w in enumerate(weight) if w >= threshold and w > 0]
    intense = [i for i in large if _is_intense(graph, graph.operations[i])]
    return tuple(intense or large)


def _is_intense(graph: Graph, operation: Operation) -> bool:
    if operation.subprogram is not None and operation.subprogram.kind is Nesting.LOOP:
        return True
    values = (graph.values[v] for v in (*operation.inputs, *operation.outputs))
    elements = max((math.prod(v.shape) // v.parts for v in values), default=0)
    return operation.flops >= HEAVY_FLOPS_PER_ELEMENT * elements


def work(graph: Graph) -> Sequence[float]:
    """FLOPs by operation; bytes written where the program has no arithmetic at all."""
    flops = [op.flops for op in graph.operations]
    if any(flops):
        return flops
    return [float(sum(graph.values[v].bytes for v in op.outputs)) for op in graph.operations]


def last_read(graph: Graph) -> tuple[int, ...]:
    """By value id: the last operation that reads it, -1 if none. Unlike `Graph.last_use`, returning is not reading."""
    last = [-1] * len(graph.values)
    for op in graph.operations:
        for v in op.inputs:
            last[v] = op.index
    return tuple(last)


def producers(graph: Graph) -> tuple[int, ...]:
    """By value id: the operation that defines it, -1 for parameters, inputs and constants."""
    made_by = [-1] * len(graph.values)
    for op in graph.operations:
        for v in op.outputs:
            made_by[v] = op.index
    return tuple(made_by)


def common_depth(a: str, b: str) -> int:
    """How many leading parts two module paths share: `common_depth("net/0/up", "net/0/down") == 2`."""
    depth = 0
    for x, y in zip(_parts(a), _parts(b), strict=False):
        if x != y:
            break
        depth += 1
    return depth


def boundary_depth(a: str, b: str) -> int:
    """Depth of the boundary between operations of two modules; inside one, deeper than any of its boundaries."""
    return len(_parts(a)) + 1 if a == b else common_depth(a, b)


def seam_depth(graph: Graph, position: int) -> int:
    """`boundary_depth` between the operations before and after a position."""
    return boundary_depth(graph.operations[position - 1].module, graph.operations[position].module)


def _parts(path: str) -> list[str]:
    return path.split("/") if path else []


def crossing_bytes(graph: Graph, *, without: Collection[int] = (), transient_inputs: Collection[int] = ()) -> list[int]:
    """By position: bytes of intermediates that are defined before it and read at or after it.

    Args:
      without: value ids that do not count.
      transient_inputs: inputs that count until they are last read.
    """
    change = np.zeros(len(graph.operations) + 2, dtype=np.int64)
    reads, made_by = last_read(graph), producers(graph)
    for value in graph.values:
        counts = value.kind is ValueKind.INTERMEDIATE or value.id in transient_inputs
        if counts and reads[value.id] > made_by[value.id] and value.id not in without:
            change[made_by[value.id] + 1] += value.bytes
            change[reads[value.id] + 1] -= value.bytes
    return np.cumsum(change).tolist()


def _fewest_bytes(positions: Sequence[int], crossing: Sequence[int]) -> list[int]:
    limit = TOLERANCE * min(crossing[p] for p in positions)
    return [p for p in positions if crossing[p] <= limit]


def _opening(graph: Graph, position: int) -> str:
    """What a block that starts here would begin with."""
    operation = graph.operations[position]
    return operation.signature or operation.primitive


def _best_position(graph: Graph, positions: Sequence[int], openings: Mapping[str, int]) -> int:
    often = OPENING_SHARE * max(openings.get(_opening(graph, p), 0) for p in positions)
    return min(positions, key=lambda p: (openings.get(_opening(graph, p), 0) < often, seam_depth(graph, p), -p))


class _Liveness:
    """Describes positions as cut points."""

    def __init__(self, graph: Graph, crossing: Sequence[int], transient_inputs: Collection[int]) -> None:
        self._graph, self._crossing = graph, crossing
        self._reads = np.asarray(last_read(graph))
        self._made_by = np.asarray(producers(graph))
        self._counts = self._made_by >= 0
        self._counts[list(transient_inputs)] = True

    def at(self, position: int) -> CutPoint:
        live = np.flatnonzero(self._counts & (self._made_by < position) & (self._reads >= position))
        depth = seam_depth(self._graph, position)
        return CutPoint(position, tuple(live.tolist()), self._crossing[position], depth)


def _is_good(graph: Graph, gaps: Sequence[CutPoint], index: int, heavy: Sequence[int], side: set[int]) -> bool:
    """Whether a candidate is worth a cut; see `cut_points`."""
    here = gaps[index].live_bytes
    if gaps[index].position > heavy[-1]:
        # light operations at the end, such as a loss, stay with the last heavy one; `blocks` may split them off
        return False
    left = gaps[index - 1].live_bytes if index else float("inf")
    right = gaps[index + 1].live_bytes if index + 1 < len(gaps) else 0
    large = [v for v in gaps[index].live if v not in side and graph.values[v].bytes >= SMALL_SHARE * here]
    if len(large) == 1:
        return here <= TOLERANCE * max(left, right)
    since = [h for h in heavy if h < gaps[index].position][-RECENT_HEAVY_OPERATIONS:][:1]
    made_since = {v for op in graph.operations[since[0] if since else 0 : gaps[index].position] for v in op.outputs}
    recent = made_since.intersection(large)
    return here <= TOLERANCE * min(left, right) and len(recent) <= MOST_RECENT_VALUES


def _drop_small_blocks(points: list[CutPoint], weight: Sequence[float]) -> list[CutPoint]:
    """Joins blocks that do too little; the first and the last may be small (an embedding, a loss)."""
    done = np.concatenate([[0.0], np.cumsum(weight)])
    least = SMALLEST_BLOCK_SHARE * float(done[-1])
    kept = list(points)
    index = 0
    while index + 1 < len(kept):
        left, right = kept[index], kept[index + 1]
        if done[right.position] - done[left.position] >= least:
            index += 1
            continue
        # of the two cuts around the small block, the one with more live bytes goes
        del kept[index + 1 if right.live_bytes >= left.live_bytes else index]
        index = max(0, index - 1)
    return kept
