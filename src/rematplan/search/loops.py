"""Loops in chunks, loops that keep values in the host's memory, and loops of which some iterations keep more than others.

Comes in: measured candidates that treat every iteration of a loop alike. Goes out: candidates in chunks, which need less
than any of those, candidates that offload, and mixtures of two, cut to a budget: what a loop needs and takes grows in a
straight line with the number of iterations that keep more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematplan.program.configuration import Configuration, LoopPlan
from rematplan.search.candidates import Candidate
from rematplan.search.mixing import Priced
from rematplan.search.problem import Problem

WHOLE_BODY = "loop, whole body"
CHUNKED = "loop, in chunks"
PARTS = "loop, in parts"
OFFLOADED = "loop, saved on the host"
# A copy to the host costs some microseconds before its first byte.
SMALLEST_OFFLOADED = 1 << 20
# A mixture has to promise this much over the best that treats all iterations alike.
WORTH_MIXING = 0.998


@dataclass(frozen=True)
class LoopMix:
    """A mixture and what the straight line says of it."""

    candidate: Candidate
    predicted_bytes: int
    predicted_seconds: float


def in_chunks(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The loops in chunks of several lengths, saving nothing in their bodies."""
    bare = next((c for c in candidates if c.grouping == WHOLE_BODY and c.level == 0), None)
    if bare is None or not _treats_iterations_alike(problem, bare.configuration):
        return []
    lengths = {index: _length(problem, index) for index, _ in bare.configuration.loops}
    longest = max(lengths.values())
    root = round(math.sqrt(longest))
    found = []
    for chunk in sorted({2, 3, root, 2 * root} - {0, 1}):
        loops = tuple(
            (
                index,
                LoopPlan(tuple(replace(p, chunk=chunk) for p in plan.parts)) if 2 * chunk <= lengths[index] else plan,
            )
            for index, plan in bare.configuration.loops
        )
        if loops != bare.configuration.loops:
            name = f"loop in chunks of {chunk}, saving nothing"
            found.append(Candidate(name, Configuration(loops=loops), CHUNKED))
    return found


def offloaded(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The loops with what they save kept in the host's memory, but for small values; none if the chip has no such link."""
    chip = problem.target.chip
    if chip is None or not chip.host_bandwidth:
        return []
    found = []
    for candidate in candidates:
        if candidate.grouping != WHOLE_BODY or not _treats_iterations_alike(problem, candidate.configuration):
            continue

        def away(index: int, body: Configuration) -> Configuration:
            values = problem.traced.bodies[index].graph.values
            (region,) = body.regions
            large = frozenset(v for v in region.saved if values[v].bytes >= SMALLEST_OFFLOADED)
            return replace(body, regions=(replace(region, offloaded=large),))

        configuration = candidate.configuration.with_bodies(away)
        if any(r.offloaded for body in _bodies(configuration) for r in body.regions):
            found.append(Candidate(f"{candidate.name}, on the host", configuration, OFFLOADED, candidate.level))
    return found


def mixtures(problem: Problem, priced: Sequence[Priced], *, budget_bytes: int, count: int) -> list[LoopMix]:
    """The fastest mixtures of two candidates that just fit the budget, fastest first."""
    alike = [p for p in priced if _treats_iterations_alike(problem, p.candidate.configuration)]
    fitting = [p for p in alike if p.figures.required_bytes <= budget_bytes]
    over = [p for p in alike if p.figures.required_bytes > budget_bytes]
    if not fitting or not over:
        return []
    best = min(p.figures.seconds for p in fitting)
    found = []
    for small in fitting:
        for large in over:
            mix = _mixture(problem, small, large, budget_bytes)
            if mix is not None and mix.predicted_seconds < WORTH_MIXING * best:
                found.append(mix)
    return sorted(found, key=lambda m: m.predicted_seconds)[:count]


def fastest_mixture(problem: Problem, priced: Sequence[Priced], *, budget_bytes: int) -> float | None:
    """Seconds that no mixture under the budget is faster than: iterations need not be whole. None if nothing fits."""
    alike = [p.figures for p in priced if _treats_iterations_alike(problem, p.candidate.configuration)]
    fitting = [f for f in alike if f.required_bytes <= budget_bytes]
    over = [f for f in alike if f.required_bytes > budget_bytes]
    if not fitting:
        return None
    between = (
        a.seconds + (budget_bytes - a.required_bytes) / (b.required_bytes - a.required_bytes) * (b.seconds - a.seconds)
        for a in fitting
        for b in over
    )
    return min([*(f.seconds for f in fitting), *between])


def _mixture(problem: Problem, small: Priced, large: Priced, budget_bytes: int) -> LoopMix | None:
    """As many iterations as fit keep what `large` keeps. They come last: what is kept late is freed early."""
    room = budget_bytes - small.figures.required_bytes
    share = room / (large.figures.required_bytes - small.figures.required_bytes)
    loops, most = [], 0.0
    for (index, one), (other, two) in zip(
        small.candidate.configuration.loops, large.candidate.configuration.loops, strict=True
    ):
        assert index == other, "candidates of one problem configure the same loops"
        length = _length(problem, index)
        keeping = int(share * length)
        most = max(most, keeping / length)
        first = replace(one.parts[0], iterations=length - keeping)
        parts = (one.parts[0],) if not keeping else (first, two.parts[0])
        loops.append((index, LoopPlan(parts)))
    if not most:
        return None
    line = lambda a, b: a + most * (b - a)
    name = f"the last {most:.0%} of iterations: {large.candidate.name}; the others: {small.candidate.name}"
    return LoopMix(
        Candidate(name, Configuration(loops=tuple(loops)), PARTS),
        int(line(small.figures.required_bytes, large.figures.required_bytes)),
        line(small.figures.seconds, large.figures.seconds),
    )


def _bodies(configuration: Configuration) -> list[Configuration]:
    return [body for _, plan in configuration.loops for body in plan.variants()]


def _treats_iterations_alike(problem: Problem, configuration: Configuration) -> bool:
    """Whether all that is configured are loops in one part, with one region around the body."""
    if configuration.regions or not configuration.loops:
        return False
    for index, plan in configuration.loops:
        whole = (0, len(problem.traced.bodies[index].equations))
        if len(plan.parts) != 1 or [(r.start, r.stop) for r in plan.parts[0].body.regions] != [whole]:
            return False
    return True


def _length(problem: Problem, index: int) -> int:
    subprogram = problem.graph.operations[index].subprogram
    assert subprogram is not None
    return subprogram.length
