"""A graph -> a chain of blocks, repeated ones recognised.

Comes in: a `Graph`. Goes out: `Block`s that cover its operations in order, and `Run`s of repeated blocks. Blocks
meet at cut points (`cuts.py`), where few bytes are live. Two blocks with the same key compute the same thing up to
scalar literals, so that they can be planned and measured once. Knows neither JAX nor budgets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from rematplan.planner.cuts import common_depth, cut_points, heavy_operations, last_read, producers, seam_depth, work
from rematplan.planner.keys import Keys
from rematplan.program.graph import Graph, Operation, ValueKind

# How many blocks back a repetition is looked for when its last copy is longer than the others.
LONGEST_PATTERN = 8


class Granularity(Enum):
    """How finely a program is cut."""

    FINE = "fine"  # at every good cut point: attention and MLP of a transformer layer are two blocks
    COARSE = "coarse"  # one block for each period of a repeated pattern: a transformer layer is one block


@dataclass(frozen=True)
class Block:
    """The operations `[start, stop)` of a graph.

    Attributes:
      index: position in the chain.
      inputs: intermediates of earlier blocks that this block reads, in order of first use.
      arguments: parameters, inputs and constants that it reads, in order of first use.
      outputs: values defined here that later blocks read or the program returns.
      live_in, live_out: all intermediates that are live across its start and its stop, read here or not.
      key: equal for blocks of the same structure: operations, wiring, shapes and dtypes, what the backward pass needs.
        Parameters are numbered by first use; scalar literals and names may differ.
      flops: of its operations.
      module: the longest module path that all its operations share.
      barrier: holds an operation that must not stand in a region.
    """

    index: int
    start: int
    stop: int
    inputs: tuple[int, ...]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    live_in: tuple[int, ...]
    live_out: tuple[int, ...]
    key: str
    flops: float
    module: str = ""
    barrier: bool = False


@dataclass(frozen=True)
class Run:
    """`count` repetitions of `period` consecutive blocks, starting at block `first`. `keys` are those of one period."""

    first: int
    period: int
    count: int
    keys: tuple[str, ...]

    @property
    def stop(self) -> int:
        """The first block after the run."""
        return self.first + self.period * self.count


def blocks(
    graph: Graph, *, granularity: Granularity = Granularity.FINE, transient_inputs: Collection[int] = ()
) -> tuple[Block, ...]:
    """The chain of blocks of a graph. Deterministic; every operation is in exactly one block.

    Args:
      granularity: `FINE` cuts at every good cut point; `COARSE` joins each period of a repeated pattern to one block.
      transient_inputs: inputs that do not live anyway, such as the carries of a loop's body; see `cut_points`.
    """
    if not graph.operations:
        return ()
    cutter = _Cutter(graph)
    positions = [p.position for p in cut_points(graph, transient_inputs=transient_inputs)]
    positions = _with_first_copy(graph, cutter, positions)
    if _begins_with_preparation(graph, cutter.chain(positions)):
        positions = positions[1:]
    positions = _with_copies(graph, cutter, positions)
    fine = cutter.chain(positions)
    if granularity is Granularity.FINE:
        return fine
    starts = set(range(len(fine)))
    for run in runs(fine, depths=[0, *(seam_depth(graph, p) for p in positions)]):
        starts -= {run.first + k for k in range(run.period * run.count) if k % run.period}
    return cutter.chain([fine[i].start for i in sorted(starts) if i])


def runs(chain: Sequence[Block], *, depths: Sequence[int] | None = None) -> tuple[Run, ...]:
    """Runs of repeated blocks, in chain order, disjoint; the longest in work are found first.

    Args:
      depths: by block, how deep in the module tree the boundary at its start lies. Where a run can begin at several
        blocks of its period (attention first or MLP first), the one with the shallowest boundary is taken, even if that
        costs one repetition.
    """
    keys = [b.key for b in chain]
    weight = [b.flops for b in chain]
    found: list[Run] = []
    stack = [(0, len(keys))]
    while stack:
        low, high = stack.pop()
        best = _longest_run(keys, weight, low, high)
        if best is None:
            continue
        if depths is not None:
            best = _rephase(best, keys, depths, low, high)
        found.append(best)
        stack += [(low, best.first), (best.stop, high)]
    return tuple(sorted(found, key=lambda r: r.first))


def _longest_run(keys: Sequence[str], weight: Sequence[float], low: int, high: int) -> Run | None:
    done = [0.0, *accumulate(weight)]
    best: tuple[float, int, int, int] | None = None
    for period in range(1, (high - low) // 2 + 1):
        matched = 0
        for i in range(high - period - 1, low - 1, -1):
            # matched: how many keys from i on equal the key one period later
            matched = matched + 1 if keys[i] == keys[i + period] else 0
            count = 1 + matched // period
            if count < 2:
                continue
            covered = done[i + count * period] - done[i] or float(count * period)
            # most work covered, then the shortest period, then the earliest start
            candidate = (covered, -period, -i, count)
            if best is None or candidate[:3] > best[:3]:
                best = candidate
    if best is None:
        return None
    _, period, first, count = best[0], -best[1], -best[2], best[3]
    return Run(first, period, count, tuple(keys[first : first + period]))


def _rephase(run: Run, keys: Sequence[str], depths: Sequence[int], low: int, high: int) -> Run:
    """The same run begun where the module boundary is shallowest."""
    options: list[tuple[int, int, int]] = []
    for first in range(max(low, run.first - run.period + 1), run.first + run.period):
        stop = first
        while stop + run.period <= high and keys[stop : stop + run.period] == keys[first : first + run.period]:
            stop += run.period
        count = (stop - first) // run.period
        if count >= max(2, run.count - 1):
            options.append((depths[first], -count, first))
    _, count, first = min(options)
    return Run(first, run.period, -count, tuple(keys[first : first + run.period]))


def _begins_with_preparation(graph: Graph, chain: Sequence[Block]) -> bool:
    """Whether the first block only prepares inputs, and the next one is not repeated: they belong together.

    Preparing is a single light operation, or several that read no parameter. So an embedding is a block of its own.
    """
    first = chain[0]
    heavy = heavy_operations(graph)
    if len(chain) == 1 or (heavy and heavy[0] < first.stop):
        return False
    reads_parameter = any(graph.values[v].kind is ValueKind.PARAMETER for v in first.arguments)
    prepares = first.stop - first.start == 1 or not reads_parameter
    return prepares and all(b.key != chain[1].key for b in chain[2:])


def _with_first_copy(graph: Graph, cutter: _Cutter, positions: list[int]) -> list[int]:
    """Cuts before the first copy of a repetition, wherever fewest bytes are live before it.

    What comes before the first heavy operation is often smallest in an embedding's indices, in the middle of nothing.
    """
    heavy = heavy_operations(graph)
    rest = [p for p in positions if heavy and p > heavy[0]]
    if not rest:
        return positions
    for model in cutter.chain(positions):
        start = rest[0] - (model.stop - model.start)
        if model.start >= rest[0] and 0 <= start <= heavy[0] and cutter.key(start, rest[0]) == model.key:
            return [start, *rest] if start else rest
    return positions


def _with_copies(graph: Graph, cutter: _Cutter, positions: Sequence[int]) -> list[int]:
    """Cuts a block that begins as the next copy of a repetition and goes on with light operations, at the copy's end.

    So the last layer is like the others, although a norm, a mean over positions or a loss follows it without a cut.
    """
    heavy = heavy_operations(graph)
    chain = cutter.chain(positions)
    found = list(positions)
    for i, block in enumerate(chain):
        is_last = block.stop == len(graph.operations)
        for period in range(1, i + 1 if is_last else min(i // 2, LONGEST_PATTERN) + 1):
            model = chain[i - period]
            repeats = is_last or chain[i - 2 * period].key == model.key
            stop = block.start + model.stop - model.start
            light = stop < block.stop and not any(stop <= h < block.stop for h in heavy)
            if repeats and light and cutter.key(block.start, stop) == model.key:
                found.append(stop)
                break
    return sorted(found)


class _Cutter:
    """Describes stretches of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._reads, self._made_by = last_read(graph), producers(graph)
        self._returned = set(graph.outputs)
        self._weight = work(graph)
        self._keys = Keys(graph)

    def chain(self, positions: Iterable[int]) -> tuple[Block, ...]:
        """The blocks between these positions."""
        bounds = [0, *positions, len(self._graph.operations)]
        chain: list[Block] = []
        live: tuple[int, ...] = ()
        for index, (start, stop) in enumerate(pairwise(bounds)):
            chain.append(self._block(index, start, stop, live))
            live = chain[-1].live_out
        return tuple(chain)

    def key(self, start: int, stop: int) -> str:
        """The key that a block `[start, stop)` would have."""
        return self._keys(self._graph.operations[start:stop], self._outputs(start, stop))

    def _outputs(self, start: int, stop: int) -> tuple[int, ...]:
        defined = [v for op in self._graph.operations[start:stop] for v in op.outputs]
        return tuple(v for v in defined if self._reads[v] >= stop or v in self._returned)

    def _block(self, index: int, start: int, stop: int, live: tuple[int, ...]) -> Block:
        operations, values = self._graph.operations[start:stop], self._graph.values
        read = dict.fromkeys(v for op in operations for v in op.inputs)
        outside = [v for v in read if self._made_by[v] < start]
        defined = [v for op in operations for v in op.outputs]
        return Block(
            index=index,
            start=start,
            stop=stop,
            inputs=tuple(v for v in outside if values[v].kind is ValueKind.INTERMEDIATE),
            arguments=tuple(v for v in outside if values[v].kind is not ValueKind.INTERMEDIATE),
            outputs=self._outputs(start, stop),
            live_in=live,
            live_out=tuple(v for v in (*live, *defined) if self._reads[v] >= stop),
            key=self.key(start, stop),
            flops=float(sum(self._weight[start:stop])),
            module=_shared_module(operations),
            barrier=any(op.barrier for op in operations),
        )


def _shared_module(operations: Sequence[Operation]) -> str:
    paths = [op.module for op in operations if op.module]
    if not paths:
        return ""
    depth = min(common_depth(paths[0], p) for p in paths)
    return "/".join(paths[0].split("/")[:depth])
