"""Regions inside regions, for budgets that one level of regions does not reach.

Comes in: candidates with one region for each block, with their figures, and a budget. Goes out: a candidate whose blocks
keep what those candidates keep, under regions nested as `planner/nesting.py` finds it fastest. What a further forward pass
costs is read from the region around the whole model where it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.errors import InfeasibleBudget
from rematplan.planner.blocks import Block
from rematplan.planner.nesting import Kept, Nest, Stage, StageChoice, bound_seconds, minimum_budget, solve
from rematplan.program.configuration import Configuration, Region
from rematplan.search.candidates import ONE_BLOCK, Candidate
from rematplan.search.extrapolate import Figures
from rematplan.search.mixing import PLAIN_LABEL, Priced, fixed_bytes, grouped_by_blocks
from rematplan.search.problem import Problem

NESTED = "nested"
# Of a step without recomputation, where no forward pass alone was measured.
FORWARD_SHARE = 1 / 3
# The least memory takes a region in a region for every block, which takes long and which Python's stack does not bear.
# From the smallest budget on, a little more is tried until regions stand no deeper than this in each other.
MOST_DEPTH = 6
MARGINS = (1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)


@dataclass(frozen=True)
class Nested:
    """A nested candidate and what the dynamic program predicts for it."""

    candidate: Candidate
    predicted_seconds: float


def nested(problem: Problem, plain: Figures, priced: Sequence[Priced], *, budget_bytes: int | None) -> Nested | None:
    """The fastest nest under the budget, or, without one, a nest that needs hardly more than the least; None if none fits.

    Args:
      plain: figures of the program without regions.
      priced: everything measured; read are the candidates with one region for each block, and the one around them all.
    """
    levels = _levels(problem, priced)
    if not levels:
        return None
    base = fixed_bytes(plain)
    line, regions = _line(problem, plain, priced, levels, base)
    if budget_bytes is None:
        least = minimum_budget(line)
        rooms = [int(margin * least) for margin in MARGINS]
    else:
        rooms = [budget_bytes - base] if budget_bytes > base else []
    nest = _shallow(line, rooms)
    if nest is None:
        return None
    found = tuple(_regions(problem.coarse, nest, regions))
    configuration = Configuration(found)
    name = f"{len(list(configuration.all_regions()))} regions nested {depth(found)} deep"
    return Nested(Candidate(name, configuration, NESTED), nest.seconds)


def fastest_nest(problem: Problem, plain: Figures, priced: Sequence[Priced], *, budget_bytes: int) -> float | None:
    """Seconds that no nest under the budget is faster than, however deep; None if none fits.

    Args:
      plain, priced: as in `nested`.
    """
    levels, base = _levels(problem, priced), fixed_bytes(plain)
    if not levels or budget_bytes <= base:
        return None
    line, _ = _line(problem, plain, priced, levels, base)
    seconds = bound_seconds(line, budget_bytes=budget_bytes - base)
    return seconds if math.isfinite(seconds) else None


def _levels(problem: Problem, priced: Sequence[Priced]) -> list[Priced]:
    """The candidates whose choices for a block can be nested; none where the chain is too short, or must not run again."""
    if len(problem.coarse) < 3 or any(b.barrier for b in problem.coarse):
        return []
    return [p for p in priced if p.candidate.grouping == ONE_BLOCK and p.candidate.spans]


def _shallow(line: Sequence[Stage], rooms: Sequence[int]) -> Nest | None:
    """The nest of the first budget at which regions do not stand too deep in each other."""
    for room in rooms:
        try:
            nest = solve(line, budget_bytes=room)
        except InfeasibleBudget:
            continue
        if nest.depth <= MOST_DEPTH:
            return nest
    return None


def depth(regions: Sequence[Region]) -> int:
    """How many regions stand inside each other."""
    return max((1 + depth(r.inner) for r in regions), default=0)


Parts = dict[tuple[str, int], tuple[Region, ...]]


def _line(
    problem: Problem, plain: Figures, priced: Sequence[Priced], levels: Sequence[Priced], base: int
) -> tuple[list[Stage], Parts]:
    """The chain as stages, and the regions that each choice of a block stands for."""
    work = sum(b.flops for b in problem.coarse) or 1.0
    forward = _forward_seconds(plain, priced)
    least = min(levels, key=lambda p: p.figures.required_bytes)
    room = max(least.figures.required_bytes - base - least.candidate.kept_bytes, 0)
    spans = [grouped_by_blocks(problem.coarse, p.candidate) for p in levels]
    covered = {a for a, z in spans[0] if z == a + 1}
    keeps = max(plain.required_bytes - base - room, 0) // max(len(covered) - 1, 1)
    stages: list[Stage] = []
    parts: Parts = {}
    for block in problem.coarse:
        share = block.flops / work
        kept = keeps if block.index in covered else 0
        own = plain.seconds * share - forward * share
        choices = [StageChoice(PLAIN_LABEL, kept, max(room - kept, 0), own)]
        parts[PLAIN_LABEL, block.index] = ()
        for p, found in zip(levels, spans, strict=True):
            if (block.index, block.index + 1) not in found:
                continue
            regions, inside = found[block.index, block.index + 1]
            recompute = sum(s.recompute_seconds for s in p.candidate.spans)
            part = sum(s.recompute_seconds for s in inside) / recompute if recompute else share
            extra = (p.figures.seconds - plain.seconds) * part
            workspace = max(p.figures.required_bytes - base - p.candidate.kept_bytes, 0)
            saved = sum(problem.graph.values[v].bytes for r in regions for v in r.saved)
            choices.append(StageChoice(p.candidate.name, saved, workspace, own + extra))
            parts[p.candidate.name, block.index] = regions
        inputs = sum(problem.graph.values[v].bytes for v in block.inputs)
        output = sum(problem.graph.values[v].bytes for v in block.outputs)
        stages.append(Stage(f"{block.key}/{kept}", inputs, forward * share, output, tuple(choices)))
    return stages, parts


def _forward_seconds(plain: Figures, priced: Sequence[Priced]) -> float:
    """One forward pass more: what the region around the whole model costs over none."""
    whole = [p.figures.seconds for p in priced if p.candidate.name == "whole"]
    extra = whole[0] - plain.seconds if whole else 0.0
    return extra if extra > 0 else FORWARD_SHARE * plain.seconds


def _regions(chain: Sequence[Block], nest: Nest, parts: Parts) -> list[Region]:
    found: list[Region] = []
    for part in nest.parts:
        if isinstance(part, Kept):
            found += parts[part.choice.label, part.stage]
            continue
        inner = tuple(_regions(chain, part, parts))
        found.append(Region(chain[part.start].start, chain[part.stop - 1].stop, inner=inner))
    return found
