"""Configurations worth measuring: where regions may lie, and what each may save.

Comes in: a problem. Goes out: `Candidate`s: every hand-written configuration, and for each way of grouping blocks into
regions the save sets of one common price per byte (`planner/menu.py`), from "nothing saved" on. Does not measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rematplan.errors import PlanMismatch
from rematplan.planner.baselines import DOTS_NO_BATCH, baselines, heavy_loops
from rematplan.planner.blocks import Block, Granularity, blocks
from rematplan.planner.fitting import fitting
from rematplan.planner.menu import SaveSet, menu, stretch
from rematplan.program.configuration import Configuration, Region, in_every_iteration
from rematplan.program.graph import Graph, Subprogram, ValueKind
from rematplan.program.saving import as_planned, by_name
from rematplan.search.extrapolate import read_from_before
from rematplan.search.problem import Problem
from rematplan.units import format_bytes

# Save sets that leave less than this share of the recomputation are not worth their bytes: what is left is elementwise
# work that compilers fuse away.
LEAST_RECOMPUTE_SHARE = 0.04
# Two save sets whose bytes differ by less than this share of what the regions keep anyway are one choice: the larger.
SAME_BYTES_SHARE = 0.02
# A block with less than this share of an average block's work is left outside regions when it is first: an embedding.
LIGHT_SHARE = 1 / 8
MENU_LIMIT = 24
# The integer program of larger regions takes seconds.
FITTED_OPERATIONS = 250
ONE_BLOCK = "regions of one block"
PARTS = "regions of a part of a block"
ONE_REGION = "one region around all blocks"
TRIMMED = "one region, trimmed"
MIXED = "mixed"


@dataclass(frozen=True)
class Span:
    """One region of a candidate: operations, what it keeps, and what it recomputes (a roofline, for shares only)."""

    start: int
    stop: int
    kept_bytes: int
    recompute_seconds: float


@dataclass(frozen=True)
class Candidate:
    """A configuration that may be measured.

    Attributes:
      grouping: how blocks are grouped into regions; candidates of one grouping differ in what they save.
      level: 0 saves nothing; higher levels save more.
      period: after how many repeated blocks the configuration repeats; None if it does not.
      spans: its regions; empty if it is not made of regions over the chain of blocks.
    """

    name: str
    configuration: Configuration
    grouping: str
    level: int = 0
    period: int | None = None
    spans: tuple[Span, ...] = ()
    hand_written: bool = False
    compiler_rematerializes: bool = False

    @property
    def kept_bytes(self) -> int:
        """What all regions keep: their inputs and what they save."""
        return sum(s.kept_bytes for s in self.spans)


def hand_written(problem: Problem) -> list[Candidate]:
    """Every hand-written configuration, doing exactly what it does by hand."""
    found = []
    for b in baselines(problem.graph):
        try:
            configuration = as_planned(problem.traced, b.configuration)
        except PlanMismatch:  # JAX itself cannot run it
            continue
        loops_only = not b.configuration.regions
        period = {"plain": 1, "per-block": 1, "dots": 1, "dots_with_no_batch_dims": 1, "whole": 1, "whole-dots": 1}.get(
            b.name
        )
        if b.name.startswith("every-"):
            period = int(b.name.removeprefix("every-"))
        repeats = period is not None and (loops_only or problem.cut_to(configuration, period) is not None)
        found.append(
            Candidate(
                b.name,
                configuration,
                grouping="hand-written",
                period=period if repeats else None,
                hand_written=True,
                compiler_rematerializes=b.compiler_rematerializes,
            )
        )
    return found


def groupings(problem: Problem) -> dict[str, tuple[list[tuple[int, int]], int | None]]:
    """Ways to lay regions over the chain: name -> operation ranges, and the repeated period."""
    coarse = _inner(problem.coarse)
    found: dict[str, tuple[list[tuple[int, int]], int | None]] = {}
    sizes = sorted({1, 2, 3, 4, round(math.sqrt(len(coarse))), *((8,) if len(coarse) >= 16 else ())})
    for size in sizes:
        if size == 1 or 1 < size < len(coarse):
            found[ONE_BLOCK if size == 1 else f"regions of {size} blocks"] = (_grouped(coarse, size), size)
    fine = _inner(problem.fine)
    if len(fine) > len(coarse):
        found[PARTS] = (_grouped(fine, 1), 1)
    if len(coarse) > 1:
        found[ONE_REGION] = (_grouped(coarse, len(coarse)), 1)
    everything = [b for b in problem.coarse if b.flops > 0]
    if len(everything) > len(coarse):
        found["regions of one block, ends included"] = (_grouped(everything, 1), 1)
    return found


def _inner(chain: Sequence[Block]) -> list[Block]:
    """The chain without a light first block (an embedding) and without a last block that ends in the loss."""
    average = sum(b.flops for b in chain) / len(chain)
    kept = list(chain)
    while len(kept) > 1 and kept[0].flops < LIGHT_SHARE * average:
        kept = kept[1:]
    return kept[:-1] if len(kept) > 1 else kept


def _grouped(chain: Sequence[Block], size: int) -> list[tuple[int, int]]:
    """Ranges of `size` consecutive blocks; a block that must not be recomputed ends a group and stands in none."""
    ranges: list[tuple[int, int]] = []
    group: list[Block] = []
    for block in chain:
        if block.barrier or len(group) == size:
            if group:
                ranges.append((group[0].start, group[-1].stop))
            group = []
        if not block.barrier:
            group.append(block)
    if group:
        ranges.append((group[0].start, group[-1].stop))
    return ranges


class Menus:
    """Save sets of regions; regions of the same structure share one menu."""

    def __init__(self, problem: Problem, graph: Graph, chain: Sequence[Block]):
        self._problem = problem
        self._graph = graph
        self._keys = {b.start: b for b in chain}
        self._known: dict[tuple[str, ...], tuple[int, tuple[SaveSet, ...]]] = {}

    def of(self, start: int, stop: int) -> tuple[SaveSet, ...]:
        """The menu of the region `[start, stop)`."""
        key = self._structure(start, stop)
        if key not in self._known:
            self._known[key] = (
                start,
                menu(stretch(self._graph, start, stop, rates=self._problem.rates), limit=MENU_LIMIT),
            )
        origin, sets = self._known[key]
        return sets if origin == start else tuple(self._moved(s, origin, start) for s in sets)

    def _structure(self, start: int, stop: int) -> tuple[str, ...]:
        keys, position = [], start
        while position < stop:
            block = self._keys.get(position)
            if block is None:
                return (f"{start}:{stop}",)
            keys.append(block.key)
            position = block.stop
        return tuple(keys)

    def _moved(self, chosen: SaveSet, origin: int, start: int) -> SaveSet:
        values = []
        for v in chosen.values:
            op = self._graph.operations[self._graph.producer[v]]
            twin = self._graph.operations[op.index - origin + start]
            values.append(twin.outputs[op.outputs.index(v)])
        return SaveSet(tuple(values), chosen.recompute_seconds, chosen.saved_bytes)


def levels(menus: Sequence[tuple[SaveSet, ...]], most: int) -> list[float]:
    """Prices per byte that give different save sets, highest first; infinity saves nothing.

    Args:
      menus: of all regions of one grouping.
      most: how many prices at most.
    """
    nothing = sum(m[0].recompute_seconds for m in menus)
    prices = sorted({p for m in set(menus) for p in _prices(m)}, reverse=True)
    found = [math.inf]
    base = max(sum(m[0].saved_bytes for m in menus), 1)
    largest = max((m[-1].saved_bytes for m in menus), default=0) * len(menus)
    for price in prices:
        chosen = [at_price(m, price) for m in menus]
        size, left = sum(c.saved_bytes for c in chosen), sum(c.recompute_seconds for c in chosen)
        previous = sum(at_price(m, found[-1]).saved_bytes for m in menus)
        if size - previous < SAME_BYTES_SHARE * max(base, largest / 8) and len(found) > 1:
            found[-1] = price  # hardly more bytes: the cheaper of the two in time
        else:
            found.append(price)
        if left < LEAST_RECOMPUTE_SHARE * nothing:
            break
    return found if len(found) <= most else [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def _prices(sets: Sequence[SaveSet]) -> list[float]:
    return [
        (a.recompute_seconds - b.recompute_seconds) / (b.saved_bytes - a.saved_bytes)
        for a, b in pairwise(sets)
        if b.saved_bytes > a.saved_bytes
    ]


def at_price(sets: Sequence[SaveSet], price: float) -> SaveSet:
    """The cheapest set when a saved byte costs `price` seconds; of equal ones the larger."""
    if math.isinf(price):
        return sets[0]
    return min(sets, key=lambda s: (s.recompute_seconds + price * (1 - 1e-9) * s.saved_bytes, -s.saved_bytes))


def over_chain(problem: Problem, *, most_levels: int) -> dict[str, list[Candidate]]:
    """For each grouping its candidates by level."""
    menus = Menus(problem, problem.graph, problem.coarse)
    fine_menus = Menus(problem, problem.graph, problem.fine)
    found: dict[str, list[Candidate]] = {}
    for name, (ranges, period) in groupings(problem).items():
        source = fine_menus if name == PARTS else menus
        sets = [source.of(start, stop) for start, stop in ranges]
        found[name] = []
        for number, price in enumerate(levels(sets, most_levels)):
            chosen = [at_price(s, price) for s in sets]
            found[name].append(_candidate(problem, name, number, ranges, chosen, period))
    return found


def products_in_one_region(problem: Problem) -> list[Candidate]:
    """One region around all blocks that saves matrix products as they are, before what is fused into them.

    A minimum cut saves a bias or an activation with the product where that recomputes less; a compiler that fuses the
    product with what follows may do better with the bare product.
    """
    ranges, _ = groupings(problem).get(ONE_REGION, ([], None))
    if len(ranges) != 1:
        return []
    ((start, stop),) = ranges
    region = Region(start, stop, policy=DOTS_NO_BATCH)
    configuration = by_name(problem.traced, Configuration((region,)))
    return [Candidate(f"{ONE_REGION}, saving products", configuration, ONE_REGION, period=1)]


def _candidate(
    problem: Problem,
    grouping: str,
    level: int,
    ranges: Sequence[tuple[int, int]],
    chosen: Sequence[SaveSet],
    period: int | None,
) -> Candidate:
    graph = problem.graph
    regions = tuple(Region(start, stop, frozenset(s.values)) for (start, stop), s in zip(ranges, chosen, strict=True))
    spans = tuple(
        Span(start, stop, region_input_bytes(graph, start, stop) + s.saved_bytes, s.recompute_seconds)
        for (start, stop), s in zip(ranges, chosen, strict=True)
    )
    saved = sum(s.saved_bytes for s in chosen)
    name = f"{grouping}, saving " + (format_bytes(saved) if saved else "nothing")
    return Candidate(name, Configuration(regions), grouping, level, period, spans)


def trimmed(problem: Problem, candidate: Candidate, over_bytes: int) -> list[Candidate]:
    """A candidate of one region, saving nothing in as many first blocks as bring it `over_bytes` down, and in one more.

    What is recomputed in the first blocks is recomputed last, when most of what was kept has been freed. Beside them the
    set that recomputes least within the bytes that are left, wherever it lies.
    """
    (region,) = candidate.configuration.regions
    graph = problem.graph
    inside = [b for b in problem.coarse if region.start < b.stop and b.start < region.stop and b.flops > 0]
    sizes = [sum(graph.values[v].bytes for v in region.saved if b.start <= graph.producer[v] < b.stop) for b in inside]
    enough = next((k for k in range(1, len(inside)) if sum(sizes[:k]) >= over_bytes), None)
    found = []
    for count in () if enough is None else (enough, enough + 1):
        if count >= len(inside):
            continue
        saved = frozenset(v for v in region.saved if graph.producer[v] >= inside[count].start)
        name = f"{candidate.name}, nothing in the first {count} of {len(inside)} blocks"
        # no spans: the chain does not mix it with others, it is cut to the budget itself
        found.append(Candidate(name, Configuration((replace(region, saved=saved),)), TRIMMED))
    if region.stop - region.start > FITTED_OPERATIONS:
        return found
    kept = sum(graph.values[v].bytes for v in region.saved)
    least = fitting(stretch(graph, region.start, region.stop, rates=problem.rates), limit_bytes=kept - over_bytes)
    if least.values:
        name = f"{ONE_REGION}, saving {format_bytes(least.saved_bytes)} that recompute least"
        found.append(Candidate(name, Configuration((replace(region, saved=frozenset(least.values)),)), TRIMMED))
    return found


def region_input_bytes(graph: Graph, start: int, stop: int) -> int:
    """Bytes of intermediates that a region reads from before it; `jax.checkpoint` keeps them."""
    read = (graph.values[v] for v in read_from_before(graph, start, stop))
    return sum(value.bytes for value in read if value.kind is ValueKind.INTERMEDIATE)


def in_loops(problem: Problem, *, most_levels: int) -> list[Candidate]:
    """Candidates that checkpoint the bodies of loops; empty if no loop does a meaningful share of the work."""
    loops = heavy_loops(problem.graph)
    if not loops:
        return []
    found: list[Candidate] = []
    for granularity in ("whole body", "coarse", "fine"):
        laid = {op.index: _body_ranges(op.subprogram, granularity) for op in loops if op.subprogram is not None}
        if granularity != "whole body" and all(len(r) < 2 for r in laid.values()):
            continue
        sets = {
            op.index: [
                menu(stretch(op.subprogram.graph, a, b, rates=problem.rates), limit=MENU_LIMIT)
                for a, b in laid[op.index]
            ]
            for op in loops
            if op.subprogram is not None
        }
        for level, price in enumerate(levels([m for ms in sets.values() for m in ms], most_levels)):
            bodies, saved = [], 0
            for op in loops:
                assert op.subprogram is not None
                chosen = [at_price(m, price) for m in sets[op.index]]
                saved += sum(s.saved_bytes for s in chosen) * op.subprogram.length
                regions = tuple(
                    Region(a, b, frozenset(s.values), prevent_cse=False)
                    for (a, b), s in zip(laid[op.index], chosen, strict=True)
                )
                bodies.append((op.index, in_every_iteration(Configuration(regions))))
            what = "loop body in one region" if granularity == "whole body" else f"loop body in {granularity} regions"
            name = f"{what}, saving " + (format_bytes(saved) if saved else "nothing")
            found.append(Candidate(name, Configuration(loops=tuple(bodies)), f"loop, {granularity}", level))
    return found


def _body_ranges(loop: Subprogram, granularity: str) -> list[tuple[int, int]]:
    body = loop.graph
    if granularity == "whole body":
        cuts = [op.index for op in body.operations if op.barrier]
        edges = [
            (-1, cuts[0]) if cuts else (-1, len(body.operations)),
            *zip(cuts, [*cuts[1:], len(body.operations)], strict=False),
        ]
        return [(a + 1, b) for a, b in edges if b > a + 1]
    carries = body.inputs[loop.constants : loop.constants + loop.carries]
    size = Granularity.COARSE if granularity == "coarse" else Granularity.FINE
    chain = blocks(body, granularity=size, transient_inputs=carries)
    return _grouped([b for b in chain if b.flops > 0], 1)
