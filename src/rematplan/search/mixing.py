"""Different choices for different blocks: a chain priced from measured candidates, and its solutions as candidates.

Comes in: candidates that treat all blocks alike, with their figures. Goes out: candidates that mix them, each with the
memory and time that the chain predicts. What a region keeps is known; what else is live while it runs, and what it costs
in time, is what its candidate's figures leave over. So the chain reproduces the candidates that it was made from; of those
that do the same with a stretch of blocks only the first, whose figures stand for the others there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rematplan.errors import InfeasibleBudget
from rematplan.planner.blocks import Block
from rematplan.planner.chain import Chain, Choice
from rematplan.planner.chain import Span as ChainSpan
from rematplan.planner.solve import Solution, ranked, solve
from rematplan.program.configuration import Configuration, Region
from rematplan.search.candidates import MIXED, Candidate, Span
from rematplan.search.extrapolate import Figures
from rematplan.search.problem import Problem

PLAIN_LABEL = "plain"


@dataclass(frozen=True)
class Priced:
    """A candidate and its figures."""

    candidate: Candidate
    figures: Figures


@dataclass(frozen=True)
class Mix:
    """A candidate that mixes others, which are called `sources`, and what the chain predicts for it."""

    candidate: Candidate
    sources: frozenset[str]
    predicted_bytes: int
    predicted_seconds: float
    bound_seconds: float


def mixes(problem: Problem, plain: Figures, priced: Sequence[Priced], *, budget_bytes: int, count: int) -> list[Mix]:
    """The fastest mixtures under the budget, by the chain's prices; empty if nothing fits.

    Args:
      plain: figures of the program without regions.
      priced: candidates made of regions over the chain of blocks.
    """
    usable = _usable(priced)
    if not usable:
        return []
    chain, parts = _chain(problem, plain, usable)
    try:
        solutions = ranked(chain, budget_bytes=budget_bytes, points=count)
    except InfeasibleBudget:
        return []
    return [_mix(solution, parts) for solution in solutions]


def fastest(problem: Problem, plain: Figures, priced: Sequence[Priced], *, budget_bytes: int) -> float | None:
    """Seconds that no mixture under the budget is faster than, by the chain's prices; None if none fits.

    Args:
      plain, priced: as in `mixes`.
    """
    usable = _usable(priced)
    if not usable:
        return None
    chain, _ = _chain(problem, plain, usable)
    try:
        return solve(chain, budget_bytes=budget_bytes).bound_seconds
    except InfeasibleBudget:
        return None


def _usable(priced: Sequence[Priced]) -> list[Priced]:
    return [p for p in priced if p.candidate.spans and not p.candidate.hand_written]


Parts = dict[tuple[str, int, int], tuple[tuple[Region, ...], tuple[Span, ...]]]


def _chain(problem: Problem, plain: Figures, priced: Sequence[Priced]) -> tuple[Chain, Parts]:
    chain = problem.coarse
    base = fixed_bytes(plain)
    work = sum(b.flops for b in chain) or 1.0
    parts: Parts = {}
    options: dict[tuple[int, int], list[Choice]] = {}

    # the candidate with least memory says what is live besides what is kept; plain blocks keep the rest
    least = min(priced, key=lambda p: p.figures.required_bytes)
    room = max(least.figures.required_bytes - base - least.candidate.kept_bytes, 0)
    covered = [b for b in chain if any(s.start < b.stop and b.start < s.stop for s in least.candidate.spans)]
    each = max(plain.required_bytes - base - room, 0) // max(len(covered) - 1, 1)
    for block in chain:
        keeps = each if block in covered else 0
        # a plain block is not replayed: what it keeps stands in for that workspace
        choice = Choice(PLAIN_LABEL, keeps, 0, max(room - keeps, 0), plain.seconds * block.flops / work)
        options.setdefault((block.index, block.index + 1), []).append(choice)
        parts[PLAIN_LABEL, block.index, block.index + 1] = ((), ())

    # of candidates that do the same with a stretch of blocks, the one that is measured first stands for it
    seen: set[tuple[int, int, tuple[Region, ...]]] = set()
    for p in priced:
        spans = grouped_by_blocks(chain, p.candidate)
        kept = p.candidate.kept_bytes
        free = p.figures.required_bytes - base
        scale = min(1.0, max(free, 0) / kept) if kept else 1.0
        workspace = max(free - kept, 0)
        extra = p.figures.seconds - plain.seconds
        recompute = sum(s.recompute_seconds for s in p.candidate.spans)
        area = sum(b.flops for b in chain for a, z in spans if a <= b.index < z) or 1.0
        for (a, z), (regions, inside) in spans.items():
            if (a, z, regions) in seen:
                continue
            seen.add((a, z, regions))
            flops = sum(b.flops for b in chain[a:z])
            share = sum(s.recompute_seconds for s in inside) / recompute if recompute else flops / area
            choice = Choice(
                p.candidate.name,
                int(scale * sum(s.kept_bytes for s in inside)),
                0,
                workspace,
                plain.seconds * flops / work + extra * share,
            )
            options.setdefault((a, z), []).append(choice)
            parts[p.candidate.name, a, z] = (regions, inside)
    return Chain(len(chain), tuple(ChainSpan(a, z, tuple(c)) for (a, z), c in options.items()), base), parts


def fixed_bytes(plain: Figures) -> int:
    """Arguments and outputs, which live all the time."""
    line = sum(w * (m.argument_bytes + m.output_bytes - m.alias_bytes) for w, m in plain.measurements)
    return int(line)


def grouped_by_blocks(
    chain: Sequence[Block], candidate: Candidate
) -> dict[tuple[int, int], tuple[tuple[Region, ...], tuple[Span, ...]]]:
    """The candidate's regions by the shortest stretches of whole blocks that hold them."""
    found: dict[tuple[int, int], tuple[tuple[Region, ...], tuple[Span, ...]]] = {}
    for region, span in zip(candidate.configuration.regions, candidate.spans, strict=True):
        touched = [b.index for b in chain if b.start < region.stop and region.start < b.stop]
        key = (touched[0], touched[-1] + 1)
        regions, spans = found.get(key, ((), ()))
        found[key] = ((*regions, region), (*spans, span))
    return found


def _mix(solution: Solution, parts: Parts) -> Mix:
    regions: list[Region] = []
    spans: list[Span] = []
    for pick in solution.selection:
        some, inside = parts[pick.choice.label, pick.span.start, pick.span.stop]
        regions += some
        spans += inside
    candidate = Candidate(f"mixed: {solution.label}", Configuration(tuple(regions)), MIXED, spans=tuple(spans))
    sources = frozenset(pick.choice.label for pick in solution.selection)
    return Mix(candidate, sources, solution.peak_bytes, solution.seconds, solution.bound_seconds)
