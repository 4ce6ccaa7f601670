"""What is known of candidates from probes, and which are probed.

Comes in: a problem and prices. Goes out: candidates with their figures: a first wave for any budget, a second for one, and
mixtures, trimmed regions, nests and split loops that are made from those to fit a budget. Compiles nothing in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rematplan._jax_private import new_remat
from rematplan.program.configuration import Offload
from rematplan.search.candidates import (
    MIXED,
    ONE_BLOCK,
    ONE_REGION,
    TRIMMED,
    Candidate,
    hand_written,
    in_loops,
    over_chain,
    products_in_one_region,
    trimmed,
)
from rematplan.search.extrapolate import Figures
from rematplan.search.loops import fastest_mixture, in_chunks, mixtures, offloaded
from rematplan.search.mixing import Mix, Priced, fastest, mixes
from rematplan.search.nesting import NESTED, fastest_nest, nested
from rematplan.search.prices import Prices
from rematplan.search.problem import Problem
from rematplan.target.measurement import Source

# Probes cost in proportion to the program; a compile costs a fixed time and more. So many operations may be probed in
# all, between so many probes.
PROBED_OPERATIONS = 20_000
PROBES = (22, 60)
PROBES_PER_BUDGET = 8  # even when the others are spent
LEVELS = 7
# So many hand-written configurations whose probes are the same program under both of their limits: so are the others' then, and
# one limit is enough (GPT of 24 blocks on v5e: 29 of 29 the same; perceptrons with regions on v5e are not).
ENOUGH_ALIKE = 5
# Mixtures that are compiled beside uniform candidates, at most.
MIXES = 2
MIX_ROUNDS = 2
# Nests are predicted less well; where one level of regions fits, a nest has to promise this much.
WORTH_NESTING = 0.97
NEST_ROUNDS = 3
# A mixture of a deep program is not probed before it is compiled, which takes long: it is made to need so much less.
UNPROBED_MARGIN = 0.015


class Probes:
    """Candidates of one problem and their figures.

    Attributes:
      measured: by configuration.
      plain: figures of the program without regions.
    """

    def __init__(self, problem: Problem, prices: Prices, *, offload: Offload):
        self.problem = problem
        self.prices = prices
        self.measured: dict[Any, Priced] = {}
        self._offload = offload
        most = PROBED_OPERATIONS // max(problem.probed_operations, 1)
        self._left = min(max(most, PROBES[0]), PROBES[1])
        self._over_chain = over_chain(problem, most_levels=LEVELS)
        self._hand_written = hand_written(problem)
        self._first_wave()
        plain = next(c for c in self._hand_written if c.name == "plain")
        self.plain: Figures = self.measured[plain.configuration].figures

    def begin(self, budget: int) -> None:
        """Probes what is worth it at a budget, and allows for more."""
        self._left = max(self._left, PROBES_PER_BUDGET + MIXES * MIX_ROUNDS)
        self._second_wave(budget)

    def make(self, budget: int, misses: Mapping[Any, int], *, mixed_margin: int) -> list[float]:
        """Probes candidates that are made to fit a budget.

        Args:
          misses: what configurations turned out to need that were compiled under the budget and did not fit.
          mixed_margin: bytes that mixtures turned out to need beyond what was predicted.

        Returns:
          By kind of candidate, seconds that none of them is faster than that fits the budget, by the prices so far.
        """
        priced = self.repriced()
        plain = next(p.figures for p in priced if p.candidate.name == "plain")
        least = [self._mix(plain, priced, budget, mixed_margin), self._split_loops(budget), self._nest(plain, budget)]
        self._trim(budget, misses)
        return [seconds for seconds in least if seconds is not None]

    def _probe(self, candidates: Sequence[Candidate]) -> None:
        known = {c.configuration for c in (p.candidate for p in self.measured.values())}
        fresh: dict[Any, Candidate] = {}
        for c in candidates:
            if c.configuration not in known and c.configuration not in fresh:
                fresh[c.configuration] = c
        chosen = list(fresh.values())[: max(self._left, 0)]
        if not chosen:
            return
        self._left -= len(chosen)
        tasks = [(c.name, c.configuration, c.period) for c in chosen]
        for c, figures in zip(chosen, self.problem.figures(tasks, self.prices.seconds), strict=True):
            self.measured[c.configuration] = Priced(c, figures)

    def _first_wave(self) -> None:
        """Hand-written configurations, loop bodies, one block a region at every level, others saving nothing."""
        # a deep program is not probed whole for what mixtures of the others predict: all blocks but the last
        irregular = lambda c: self.problem.folds and c.period is None and not c.configuration.loops
        self._probe([c for c in self._hand_written if not c.compiler_rematerializes and not irregular(c)])
        probes = [p.figures.measurements[-1][1] for p in self.measured.values()]
        probes = [m for m in probes if m.source is Source.PROBED]
        self.problem.probe_once = len(probes) >= ENOUGH_ALIKE and not any(m.limit_matters for m in probes)
        loops = in_loops(self.problem, most_levels=LEVELS)
        self._probe(loops)
        if not new_remat():
            self._probe(in_chunks(self.problem, loops))
            if self._offload is Offload.HOST:
                self._probe(offloaded(self.problem, loops))
        self._probe([c for name, levels in self._over_chain.items() if name == ONE_BLOCK for c in levels])
        # one region that saves nothing needs what no region needs; written by hand it has been probed already
        whole = any(p.candidate.name == "whole" for p in self.measured.values())
        self._probe([levels[0] for name, levels in self._over_chain.items() if not (whole and name == ONE_REGION)])
        self._probe(products_in_one_region(self.problem))

    def _second_wave(self, budget: int) -> None:
        """The other groupings, at the levels that pay at this budget with one block a region."""
        levels = [p for p in self.measured.values() if p.candidate.grouping == ONE_BLOCK]
        fitting = [p for p in levels if p.figures.required_bytes <= budget]
        if fitting:
            best = min(fitting, key=lambda p: p.figures.seconds).candidate.level
        else:
            best = min(levels, key=lambda p: p.figures.required_bytes).candidate.level if levels else 0
        chosen = [c for found in self._over_chain.values() for c in found if c.level == min(best, len(found) - 1)]
        # one region is cut to the budget (`_trim`), so what saves a little too much is wanted too
        chosen += [c for c in self._over_chain.get(ONE_REGION, ()) if c.level == best + 1]
        self._probe(chosen)

    def seconds_of(self, priced: Priced) -> float:
        """Seconds by the newest prices: every full compile teaches some."""
        if not priced.figures.measurements:
            return priced.figures.seconds
        return sum(w * self.prices.seconds(m) for w, m in priced.figures.measurements)

    def confirm(self, configuration: Any) -> bool:
        """Looks more closely at what was extrapolated from one shortened program; whether there was anything to do."""
        known = self.measured[configuration]
        period = known.candidate.period
        if len(known.figures.measurements) < 3 or period is None:
            return False
        figures = self.problem.confirmed(known.figures, configuration, period, self.prices.seconds)
        self.measured[configuration] = replace(known, figures=figures)
        return True

    def _confirm_all(self, names: frozenset[str]) -> bool:
        """Looks more closely at what a mixture is made of; whether there was anything to do."""
        chosen = [k for k, p in self.measured.items() if p.candidate.name in names and not p.candidate.hand_written]
        confirmed = [self.confirm(configuration) for configuration in chosen]
        return any(confirmed)

    def repriced(self) -> list[Priced]:
        """Everything measured, by the newest prices."""
        found = [replace(p, figures=replace(p.figures, seconds=self.seconds_of(p))) for p in self.measured.values()]
        self.measured = {p.candidate.configuration: p for p in found}
        return found

    def _trim(self, budget: int, misses: Mapping[Any, int]) -> None:
        """Probes single regions that are over the budget with less saved, so that they just fit."""
        if self.problem.folds or self._left <= 0:
            return  # what is trimmed does not repeat, and would be probed whole
        for p in list(self.measured.values()):
            regions = p.candidate.configuration.regions
            if len(regions) != 1 or not regions[0].saved or p.candidate.grouping == TRIMMED:
                continue
            needs = misses.get(p.candidate.configuration, p.figures.required_bytes)
            if needs > budget:
                self._probe(trimmed(self.problem, p.candidate, needs - budget))

    def _mix(self, plain: Figures, priced: Sequence[Priced], budget: int, margin: int) -> float | None:
        """Probes the chain's fastest mixtures; where they need more than it said, asks it again for so much less.

        Returns:
          Seconds that no mixture under the whole budget is faster than, by the chain's prices; None if none fits.
        """
        uniform = [p for p in priced if p.candidate.grouping != MIXED]
        # what was only predicted, for another budget or by older prices, is predicted again
        self.measured = {k: p for k, p in self.measured.items() if p.figures.measurements}
        if self.problem.folds:
            margin = max(margin, int(UNPROBED_MARGIN * budget))
        room, bound = budget - margin, None
        for _ in range(MIX_ROUNDS):
            mixed = mixes(self.problem, plain, uniform, budget_bytes=room, count=MIXES)
            if not mixed:
                break
            if room == budget:
                bound = mixed[0].bound_seconds
            if self.problem.folds:
                # a mixture does not repeat: its probe would cost in proportion to depth, and peaks of chains add up
                sources = frozenset[str]().union(*(m.sources for m in mixed))
                if self._confirm_all(sources):
                    uniform = [p for p in self.repriced() if p.candidate.grouping != MIXED]
                    bound = None
                    mixed = mixes(self.problem, plain, uniform, budget_bytes=room, count=MIXES) or mixed
                self._predict(mixed)
                break
            self._probe([m.candidate for m in mixed])
            probed = [(m, self.measured.get(m.candidate.configuration)) for m in mixed]
            over = [p.figures.required_bytes - m.predicted_bytes for m, p in probed if p is not None]
            if not over or any(p is not None and p.figures.required_bytes <= budget for _, p in probed):
                break
            room -= max(min(over), 1)
        # what leaves a margin is made to fit, and says nothing of what else does
        return bound if bound is not None else fastest(self.problem, plain, uniform, budget_bytes=budget)

    def _predict(self, mixed: Sequence[Mix]) -> None:
        """Takes the chain's word for mixtures."""
        for m in mixed:
            known = self.measured.get(m.candidate.configuration)
            if known is None or not known.figures.measurements:
                figures = Figures(
                    m.predicted_bytes, m.predicted_bytes, m.predicted_seconds, folded=True, measurements=()
                )
                self.measured[m.candidate.configuration] = Priced(m.candidate, figures)

    def _split_loops(self, budget: int) -> float | None:
        """Probes loops of which as many iterations as fit keep more; where they need more than predicted, with fewer.

        Returns:
          Seconds that no mixture is faster than; None without loops.
        """
        bound = fastest_mixture(self.problem, list(self.measured.values()), budget_bytes=budget)
        room = budget
        for _ in range(MIX_ROUNDS):
            found = mixtures(self.problem, list(self.measured.values()), budget_bytes=room, count=MIXES)
            self._probe([m.candidate for m in found])
            probed = [(m, self.measured.get(m.candidate.configuration)) for m in found]
            over = [p.figures.required_bytes - budget for _, p in probed if p is not None]
            if not over or min(over) <= 0:
                break
            room -= min(over)
        return bound

    def _nest(self, plain: Figures, budget: int | None) -> float | None:
        """Probes regions inside regions where one level does not fit the budget, or only takes longer.

        Args:
          budget: None for the smallest need that nesting reaches.

        Returns:
          Seconds that no nest under the budget is faster than; None if none fits, or without a budget.
        """
        if new_remat():
            return None
        room, bound = budget, None
        if budget is not None:
            bound = fastest_nest(self.problem, plain, list(self.measured.values()), budget_bytes=budget)
        for _ in range(NEST_ROUNDS):
            priced = list(self.measured.values())
            flat = [p for p in priced if p.candidate.grouping != NESTED]
            known = [p for p in flat if budget is not None and p.figures.required_bytes <= budget]
            found = nested(self.problem, plain, priced, budget_bytes=room)
            if found is None or found.candidate.configuration in self.measured:
                break
            if known and found.predicted_seconds > WORTH_NESTING * min(p.figures.seconds for p in known):
                break
            self._left = max(self._left, 1)
            self._probe([found.candidate])
            needs = self.measured[found.candidate.configuration].figures.required_bytes
            if budget is None or room is None:
                break
            room += budget - needs  # what was predicted too high or too low
        return bound

    def hand_written_rows(self) -> list[tuple[Candidate, Figures]]:
        """Figures of every hand-written configuration, as far as measured."""
        rows = []
        for c in self._hand_written:
            priced = self.measured.get(c.configuration)
            if priced is not None and not c.compiler_rematerializes:
                rows.append((c, replace(priced.figures, seconds=self.seconds_of(priced))))
        return rows

    def smallest_bytes(self) -> int:
        """The least that any candidate needs, regions inside regions included."""
        self._nest(self.plain, None)
        return min(p.figures.required_bytes for p in self.measured.values() if p.figures.measurements)
