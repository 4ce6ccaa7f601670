"""The search: measure candidates cheaply, mix them, compile the best whole, correct.

Comes in: a workload, a target and budgets. Goes out: plans that the target's compiler says fit. Everything measured for
one budget serves the next. Does not know how candidates are made, chains solved or programs compiled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rematplan._jax_private import new_remat
from rematplan.errors import InfeasibleBudget
from rematplan.program.configuration import Offload, OwnRegions
from rematplan.search.candidates import (
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
from rematplan.search.loops import fastest_mixture, in_chunks, mixtures, offloaded
from rematplan.search.mixing import Mix, Priced, mixes
from rematplan.search.nesting import NESTED, nested
from rematplan.search.prices import Prices
from rematplan.search.problem import Figures, Problem, Progress
from rematplan.target.compiler import Method, Options
from rematplan.target.measurement import Measurement
from rematplan.target.target import Target
from rematplan.units import format_bytes, format_bytes_up
from rematplan.workload import Workload

# Probes cost in proportion to the program; a compile costs a fixed time and more. So many operations may be probed in
# all, between so many probes.
PROBED_OPERATIONS = 20_000
PROBES = (22, 60)
PROBES_PER_BUDGET = 8  # even when the others are spent
LEVELS = 7
# Mixtures that are compiled beside uniform candidates, at most.
MIXES = 2
MIX_ROUNDS = 2
# A candidate predicted to be this much faster than the best compiled one is worth a compile.
WORTH_COMPILING = 0.995
# Nests are predicted less well; where one level of regions fits, a nest has to promise this much.
WORTH_NESTING = 0.97
NEST_ROUNDS = 3
# Seconds within this are a tie, which the smaller program wins.
TIE = 1.002
# Needs are predicted to within a percent, mostly too high. What is said to need so much more than the budget is compiled all
# the same if it is so much faster.
JUST_ABOVE = 1.01
WORTH_A_TRY = 0.97
# Predictions this far above the budget are still compiled when nothing predicted to fit is left.
NEARLY = 1.03
MOST_COMPILES = 6
# One after the other: a TPU compile keeps two cores busy, and each teaches the prices of the next choice.
FINALISTS = 3


@dataclass(frozen=True)
class Compiled:
    """A candidate and the compiler's figures for it at one budget; those of its probe in an estimate."""

    candidate: Candidate
    predicted: dict[str, Any]
    measurement: Measurement


@dataclass(frozen=True)
class Found:
    """What the search found for one budget.

    Attributes:
      best: the plan.
      others: what else was compiled for this budget.
      bound_seconds: no plan of the families that were searched is faster under this budget, by the prices of the search.
      search: what it took: seconds, probes, compiles.
    """

    budget_bytes: int
    best: Compiled
    others: tuple[Compiled, ...]
    bound_seconds: float | None
    search: dict[str, Any]


class Search:
    """Finds plans for one workload on one target."""

    def __init__(
        self,
        work: Workload,
        target: Target,
        *,
        progress: Progress,
        own_regions: OwnRegions = OwnRegions.KEEP,
        offload: Offload = Offload.NEVER,
    ):
        self.started = time.monotonic()
        self._offload = offload
        self.problem = Problem(work, target, progress=progress, own_regions=own_regions)
        self.target = target
        self.prices = Prices(target)
        self.measured: dict[Any, Priced] = {}
        self.plain: Figures | None = None
        self.compiled: dict[tuple[Any, int | None], Compiled] = {}
        most = PROBED_OPERATIONS // max(len(self.problem.graph.operations), 1)
        self.probes_left = min(max(most, PROBES[0]), PROBES[1])
        self._over_chain = over_chain(self.problem, most_levels=LEVELS)
        self._hand_written = hand_written(self.problem)
        self._first_wave()

    # measuring cheaply

    def _probe(self, candidates: Sequence[Candidate]) -> None:
        known = {c.configuration for c in (p.candidate for p in self.measured.values())}
        fresh: dict[Any, Candidate] = {}
        for c in candidates:
            if c.configuration not in known and c.configuration not in fresh:
                fresh[c.configuration] = c
        chosen = list(fresh.values())[: max(self.probes_left, 0)]
        if not chosen:
            return
        self.probes_left -= len(chosen)
        tasks = [(c.name, c.configuration, c.period) for c in chosen]
        for c, figures in zip(chosen, self.problem.figures(tasks, self.prices.seconds), strict=True):
            self.measured[c.configuration] = Priced(c, figures)

    def _first_wave(self) -> None:
        """Hand-written configurations, loop bodies, one block a region at every level, others saving nothing."""
        self._probe([c for c in self._hand_written if not c.compiler_rematerializes])
        plain = next(c for c in self._hand_written if c.name == "plain")
        self.plain = self.measured[plain.configuration].figures
        loops = in_loops(self.problem, most_levels=LEVELS)
        self._probe(loops)
        if not new_remat():
            self._probe(in_chunks(self.problem, loops))
            if self._offload is Offload.HOST:
                self._probe(offloaded(self.problem, loops))
        self._probe([c for name, levels in self._over_chain.items() if name == ONE_BLOCK for c in levels])
        self._probe([levels[0] for levels in self._over_chain.values()])
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

    def _seconds(self, priced: Priced) -> float:
        """Seconds by the newest prices: every full compile teaches some."""
        if not priced.figures.measurements:
            return priced.figures.seconds
        return sum(w * self.prices.seconds(m) for w, m in priced.figures.measurements)

    def _repriced(self) -> list[Priced]:
        found = [replace(p, figures=replace(p.figures, seconds=self._seconds(p))) for p in self.measured.values()]
        self.measured = {p.candidate.configuration: p for p in found}
        return found

    # one budget

    def plan(self, budget: int | None, *, finalists: int = FINALISTS) -> Found:
        """The cheapest plan found that fits; without a budget, the fastest.

        Args:
          finalists: of those that fit, how many are compiled at most. With one, the first that fits is taken.

        Raises:
          InfeasibleBudget: nothing found fits.
        """
        limit = budget if budget is not None else self.target.memory_bytes
        begun = (time.monotonic(), self.problem.probes, self.problem.compiles)
        self.probes_left = max(self.probes_left, PROBES_PER_BUDGET + MIXES * MIX_ROUNDS)
        self._second_wave(limit if limit is not None else 1 << 62)
        tried = self._compiled_before(limit)
        bound: float | None = None
        fitting = 0
        for _ in range(MOST_COMPILES):
            ranked, bound = self._ranked(limit, tried)
            best = _best(tried)
            todo = [r for r in ranked if r[0].configuration not in tried]
            todo = [r for r in todo if best is None or r[1] < WORTH_COMPILING * _time(best.measurement)]
            if not todo:
                break
            compiled = self._compile(todo[0], limit)
            tried[compiled.candidate.configuration] = compiled
            fitting += compiled.measurement.fits_limit is not False
            if fitting >= finalists:
                break
        best = _best(tried)
        if best is None:
            raise self._infeasible(limit, tried)
        seconds, probes, compiles = begun
        spent = {
            "seconds": time.monotonic() - seconds if self.compiled else 0.0,
            "probes": self.problem.probes - probes,
            "compiles": self.problem.compiles - compiles,
            "total_seconds": time.monotonic() - self.started,
            "total_probes": self.problem.probes,
            "total_compiles": self.problem.compiles,
        }
        if bound is not None:
            # prices are predictions: what was measured to be faster than they allow is the better bound
            bound = min(bound, _time(best.measurement))
        others = tuple(c for c in tried.values() if c is not best)
        return Found(limit or best.measurement.required_bytes, best, others, bound, spent)

    def estimate(self, budget: int) -> Found:
        """The plan expected to be the fastest that fits, without compiling it; its figures are those of its probe.

        Raises:
          InfeasibleBudget: nothing is expected to fit.
        """
        self.probes_left = max(self.probes_left, PROBES_PER_BUDGET + MIXES * MIX_ROUNDS)
        self._second_wave(budget)
        tried = self._compiled_before(budget)
        ranked, bound = self._ranked(budget, tried)
        best = _best(tried)
        probed = [r for r in ranked if self.measured[r[0].configuration].figures.measurements]
        expected = [r for r in probed if r[2]["required_bytes"] <= budget]
        if expected and (best is None or expected[0][1] < _time(best.measurement)):
            candidate, seconds, predicted = expected[0]
            figures = replace(self.measured[candidate.configuration].figures, seconds=seconds)
            best = Compiled(candidate, predicted, _with_fit(figures.as_measurement(), budget))
        if best is None:
            raise self._infeasible(budget, tried)
        spent = {
            "total_seconds": time.monotonic() - self.started,
            "total_probes": self.problem.probes,
            "total_compiles": self.problem.compiles,
        }
        others = tuple(c for c in tried.values() if c is not best)
        return Found(budget, best, others, bound if bound is None else min(bound, _time(best.measurement)), spent)

    def _compiled_before(self, limit: int | None) -> dict[Any, Compiled]:
        """What compiled under a smaller budget, and so fits this one."""
        most = limit if limit is not None else 1 << 62
        return {
            configuration: compiled
            for (configuration, at), compiled in self.compiled.items()
            if at is not None and at <= most and compiled.measurement.fits_limit
        }

    def _ranked(
        self, limit: int | None, tried: dict[Any, Compiled]
    ) -> tuple[list[tuple[Candidate, float, dict[str, Any]]], float | None]:
        """Candidates predicted to fit, fastest first, with the seconds and figures predicted for them.

        Where nothing is predicted to fit and nothing that was compiled does, the nearest misses are given.
        """
        priced = self._repriced()
        plain = next(p.figures for p in priced if p.candidate.name == "plain")
        most = limit if limit is not None else 1 << 62
        margin = _margins(tried, most)
        rows = [(p.candidate, p.figures.seconds, _predicted(p.figures)) for p in priced]
        # the least of each family of plans, by the same prices
        least = [self._mix(plain, priced, most), self._split_loops(most), self._nest(plain, most)]
        self._trim(most, tried)
        rows += [
            (p.candidate, p.figures.seconds, _predicted(p.figures))
            for p in self.measured.values()
            if all(p.candidate is not c for c, _, _ in rows)
        ]
        need = lambda r: r[2]["required_bytes"] + margin.get(r[0].grouping, 0)  # noqa: E731
        fitting = [r for r in rows if need(r) <= most]
        quickest = min((r[1] for r in fitting), default=math.inf)
        fitting += [r for r in rows if most < need(r) <= JUST_ABOVE * most and r[1] < WORTH_A_TRY * quickest < math.inf]
        if not fitting and all(c.measurement.fits_limit is False for c in tried.values()):
            fitting = [r for r in rows if r[2]["required_bytes"] <= NEARLY * most]
        least += [r[1] for r in rows if r[2]["required_bytes"] <= most]
        bound = min((seconds for seconds in least if seconds is not None), default=None)
        return sorted(fitting, key=lambda r: (r[1], r[0].kept_bytes)), bound

    def _trim(self, budget: int, tried: dict[Any, Compiled]) -> None:
        """Probes single regions that are over the budget with less saved, so that they just fit."""
        for p in list(self.measured.values()):
            regions = p.candidate.configuration.regions
            if len(regions) != 1 or not regions[0].saved or p.candidate.grouping == TRIMMED:
                continue
            compiled = tried.get(p.candidate.configuration)
            needs = p.figures.required_bytes
            if compiled is not None and compiled.measurement.fits_limit is False:
                needs = max(compiled.measurement.required_bytes, budget + 1)
            if needs > budget:
                self._probe(trimmed(self.problem, p.candidate, needs - budget))

    def _mix(self, plain: Figures, priced: Sequence[Priced], budget: int) -> float | None:
        """Probes the chain's fastest mixtures; where they need more than it said, asks it again for so much less.

        Returns:
          The chain's least seconds under the budget; None if it has no selection that fits.
        """
        uniform = [p for p in priced if p.candidate.grouping != "mixed"]
        room, bound = budget, None
        for _ in range(MIX_ROUNDS):
            mixed = mixes(self.problem, plain, uniform, budget_bytes=room, count=MIXES)
            if not mixed:
                break
            bound = bound if bound is not None else min(m.bound_seconds for m in mixed)
            if self.problem.repeated is not None:
                # a mixture does not repeat: its probe would cost in proportion to depth, and peaks of chains add up
                self._predict(mixed)
                break
            self._probe([m.candidate for m in mixed])
            probed = [(m, self.measured.get(m.candidate.configuration)) for m in mixed]
            over = [p.figures.required_bytes - m.predicted_bytes for m, p in probed if p is not None]
            if not over or any(p is not None and p.figures.required_bytes <= budget for _, p in probed):
                break
            room = min(room, budget) - max(min(over), 1)
        return bound

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
          Seconds of the fastest nest under the budget; None if none fits.
        """
        if new_remat():
            return None
        room, bound = budget, None
        for _ in range(NEST_ROUNDS):
            priced = list(self.measured.values())
            flat = [p for p in priced if p.candidate.grouping != NESTED]
            known = [p for p in flat if budget is not None and p.figures.required_bytes <= budget]
            found = nested(self.problem, plain, priced, budget_bytes=room)
            if found is not None and bound is None:
                bound = found.predicted_seconds
            if found is None or found.candidate.configuration in self.measured:
                break
            if known and found.predicted_seconds > WORTH_NESTING * min(p.figures.seconds for p in known):
                break
            self.probes_left = max(self.probes_left, 1)
            self._probe([found.candidate])
            needs = self.measured[found.candidate.configuration].figures.required_bytes
            if budget is None or room is None:
                break
            room += budget - needs  # what was predicted too high or too low
        return bound

    def _compile(self, chosen: tuple[Candidate, float, dict[str, Any]], limit: int | None) -> Compiled:
        candidate, _, predicted = chosen
        m = self.problem.compile(
            candidate.name, candidate.configuration, Options(method=Method.COMPILE, limit_bytes=limit)
        )
        self.prices.learn(m)
        compiled = self.compiled[candidate.configuration, limit] = Compiled(candidate, predicted, _with_fit(m, limit))
        return compiled

    def _infeasible(self, limit: int | None, tried: dict[Any, Compiled]) -> InfeasibleBudget:
        """The smallest need among everything measured, and what it consists of."""
        self.smallest_bytes()
        probed = [p for p in self.measured.values() if p.figures.measurements]
        rows = [(p.figures.required_bytes, p.candidate, p.figures.measurements[-1][1]) for p in probed]
        smallest, candidate, m = min(rows, key=lambda r: r[0])
        compiled = [c.measurement for c in tried.values() if c.candidate.configuration == candidate.configuration]
        if compiled:
            smallest, m = compiled[0].required_bytes, compiled[0]
        parts = {
            "arguments": m.argument_bytes,
            "outputs": m.output_bytes - m.alias_bytes,
            "kept and temporary": max(smallest - m.argument_bytes - m.output_bytes + m.alias_bytes - m.code_bytes, 0),
            "code": m.code_bytes,
        }
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        message = (
            f"the budget of {format_bytes(limit or 0)} cannot be met on {self.target.name}: the smallest plan found "
            f"({candidate.name}) needs {format_bytes_up(smallest)} ({listed}). Raise the budget to that, cut the batch, "
            "or shard."
        )
        return InfeasibleBudget(message, minimum_bytes=smallest, parts=parts)

    def hand_written_rows(self) -> list[tuple[Candidate, Figures]]:
        """Figures of every hand-written configuration, as far as measured."""
        rows = []
        for c in self._hand_written:
            priced = self.measured.get(c.configuration)
            if priced is not None and not c.compiler_rematerializes:
                rows.append((c, replace(priced.figures, seconds=self._seconds(priced))))
        return rows

    def smallest_bytes(self) -> int:
        """The least that any candidate needs, regions inside regions included."""
        if self.plain is not None:
            self._nest(self.plain, None)
        return min(p.figures.required_bytes for p in self.measured.values() if p.figures.measurements)


def _margins(tried: dict[Any, Compiled], budget: int) -> dict[str, int]:
    """By grouping: bytes that programs of that kind need beyond what was predicted, where one did not fit."""
    margins: dict[str, int] = {}
    for c in tried.values():
        if c.measurement.fits_limit is False:
            short = budget - int(c.predicted["required_bytes"]) + 1
            margins[c.candidate.grouping] = max(margins.get(c.candidate.grouping, 0), short)
    return margins


def _time(m: Measurement) -> float:
    return m.seconds if m.seconds is not None else float("inf")


def _best(tried: dict[Any, Compiled]) -> Compiled | None:
    """The fastest that fits; of ties a plan that treats all blocks alike, then the smallest."""
    fitting = [c for c in tried.values() if c.measurement.fits_limit is not False]
    if not fitting:
        return None
    fastest = min(_time(c.measurement) for c in fitting)
    return min(
        (c for c in fitting if _time(c.measurement) <= TIE * fastest), key=lambda c: c.measurement.required_bytes
    )


def _with_fit(m: Measurement, limit: int | None) -> Measurement:
    if m.fits_limit is not None or limit is None:
        return m
    return replace(m, limit_bytes=limit, fits_limit=m.required_bytes <= limit)


def _predicted(figures: Figures) -> dict[str, Any]:
    return {
        "required_bytes": figures.required_bytes,
        "peak_bytes": figures.peak_bytes,
        "seconds": figures.seconds,
        "source": _source(figures),
    }


def _source(figures: Figures) -> str:
    if not figures.measurements:
        return "predicted from the choices that it mixes"
    return "predicted from programs with repeated blocks cut out" if figures.folded else "probed"
