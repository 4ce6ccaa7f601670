"""The search: measure candidates cheaply, mix them, compile the best whole, correct.

Comes in: a workload, a target and budgets. Goes out: plans that the target's compiler says fit. Everything measured for
one budget serves the next. Does not know how candidates are made, chains solved or programs compiled.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from rematplan import findings
from rematplan.errors import InfeasibleBudget
from rematplan.program.configuration import Offload, OwnRegions
from rematplan.search.candidates import MIXED, Candidate
from rematplan.search.extrapolate import Figures
from rematplan.search.prices import Prices
from rematplan.search.probing import Probes
from rematplan.search.problem import Problem, Progress
from rematplan.target.compiler import Method, Options
from rematplan.target.measurement import Measurement
from rematplan.target.target import Kind, Target
from rematplan.units import format_bytes, format_bytes_up
from rematplan.workload import Workload

# A candidate predicted to be this much faster than the best compiled one is worth a compile.
WORTH_COMPILING = 0.995
# Seconds within this are a tie, which the smaller program wins.
TIE = 1.002
# A TPU probe's need is up to so much too high, and what is extrapolated from shortened programs is uncertain anywhere. What is
# said to need a little more than the budget, and to be faster than what fits, is tried: most of what does not fit is refused in
# the time of a probe. (Only where the code is what is too much, the compiler has made all of it before it says so.)
JUST_ABOVE = 1.04
# Predictions this far above the budget are still compiled when nothing predicted to fit is left.
NEARLY = 1.03
MOST_COMPILES = 12  # refused ones included
# One after the other: a TPU compile keeps two cores busy, and each teaches the prices of the next choice.
FINALISTS = 3
# On several devices so many hand-written configurations more, of those whose time is predicted to be at most so many times the
# best's, and their need the budget: predictions are up to 7 % too high there.
HAND_WRITTEN = 2
ROUGHLY = 1.08


# A candidate, the seconds predicted for it, and its other figures.
Ranked = tuple[Candidate, float, dict[str, Any]]


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
      bound_seconds: no plan of the families that were searched is faster that fits this budget, by the prices of the search.
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
        self.problem = Problem(work, target, progress=progress, own_regions=own_regions)
        self.target = target
        self.prices = Prices(target)
        self.probes = Probes(self.problem, self.prices, offload=offload)
        self.compiled: dict[tuple[Any, int | None], Compiled] = {}

    def plan(
        self,
        budget: int | None,
        *,
        finalists: int = FINALISTS,
        most_compiles: int = MOST_COMPILES,
        reach: float = JUST_ABOVE,
    ) -> Found:
        """The cheapest plan found that fits; without a budget, the fastest.

        Args:
          finalists: of those that fit, how many are compiled at most. With one, the first that fits is taken.
          most_compiles: in all, refused ones included.
          reach: how far above the budget, as a share of it, predictions may be of what is compiled nevertheless.

        Raises:
          InfeasibleBudget: nothing found fits.
        """
        limit = budget if budget is not None else self.target.memory_bytes
        begun = (time.monotonic(), self.problem.probes, self.problem.compiles)
        self.probes.begin(limit if limit is not None else 1 << 62)
        tried = self._compiled_before(limit)
        last = begun[2] + most_compiles
        bound = self._compile_finalists(limit, tried, finalists=finalists, last=last, reach=reach)
        if _best(tried) is None and limit is not None and self.probes.smallest_bytes() <= limit:
            # regions inside regions, which are only looked at where nothing else is left
            bound = self._compile_finalists(limit, tried, finalists=finalists, last=last, reach=reach)
        if finalists > 1 and self.target.device_count > 1:
            self._compile_hand_written(limit, tried)
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

    def _compile_finalists(
        self, limit: int | None, tried: dict[Any, Compiled], *, finalists: int, last: int, reach: float
    ) -> float | None:
        """Compiles what is expected to be the fastest, as long as another is expected to be faster than what was compiled.

        Args:
          tried: what was compiled; more is added.
          last: compiles of the problem after which no other is begun.

        Returns:
          Seconds that no plan of the families that were searched is faster than, by the prices so far.
        """
        bound: float | None = None
        fitting = 0
        while self.problem.compiles < last:
            ranked, bound = self._ranked(limit, tried, reach)
            best = _best(tried)
            todo = [r for r in ranked if r[0].configuration not in tried]
            todo = [r for r in todo if best is None or r[1] < WORTH_COMPILING * _time(best.measurement)]
            if not todo:
                break
            if self.probes.confirm(todo[0][0].configuration):
                continue
            number = f"plan {fitting + 1} of at most {finalists}" if finalists > 1 else ""
            compiled = self._compile(todo[0], limit, number=number)
            tried[compiled.candidate.configuration] = compiled
            fitting += compiled.measurement.fits_limit is not False
            if fitting >= finalists:
                break
        return bound

    def _compile_hand_written(self, limit: int | None, tried: dict[Any, Compiled]) -> None:
        """Compiles hand-written configurations that may be faster still: on several devices predictions are rough."""
        most = ROUGHLY * limit if limit is not None else math.inf
        for _ in range(HAND_WRITTEN):
            best = _best(tried)
            if best is None:
                return
            close = ROUGHLY * _time(best.measurement)
            rows = [(p.candidate, p.figures.seconds, _predicted(p.figures)) for p in self.probes.repriced()]
            rows = [r for r in rows if r[0].hand_written and r[0].configuration not in tried]
            found = [r for r in rows if r[1] < close and r[2]["required_bytes"] <= most]
            if not found:
                return
            chosen = min(found, key=lambda r: r[1])
            tried[chosen[0].configuration] = self._compile(chosen, limit, number="")

    def estimate(self, budget: int) -> Found:
        """The plan expected to be the fastest that fits, without compiling it; its figures are those of its probe.

        Raises:
          InfeasibleBudget: nothing is expected to fit.
        """
        self.probes.begin(budget)
        tried = self._compiled_before(budget)
        ranked, bound = self._ranked(budget, tried)
        expected = self._expected(ranked, budget)
        while expected and self.probes.confirm(expected[0][0].configuration):
            ranked, bound = self._ranked(budget, tried)
            expected = self._expected(ranked, budget)
        best = _best(tried)
        if expected and (best is None or expected[0][1] < _time(best.measurement)):
            candidate, seconds, predicted = expected[0]
            figures = replace(self.probes.measured[candidate.configuration].figures, seconds=seconds)
            best = Compiled(candidate, predicted, figures.as_measurement().held_against(budget))
        if best is None:
            raise self._infeasible(budget, tried)
        spent = {
            "total_seconds": time.monotonic() - self.started,
            "total_probes": self.problem.probes,
            "total_compiles": self.problem.compiles,
        }
        others = tuple(c for c in tried.values() if c is not best)
        return Found(budget, best, others, bound if bound is None else min(bound, _time(best.measurement)), spent)

    def _expected(self, ranked: list[Ranked], budget: int) -> list[Ranked]:
        """Those that were probed and are expected to fit."""
        probed = [r for r in ranked if self.probes.measured[r[0].configuration].figures.measurements]
        return [r for r in probed if r[2]["required_bytes"] <= budget]

    def _compiled_before(self, limit: int | None) -> dict[Any, Compiled]:
        """What compiled under a smaller budget, and so fits this one; and what was refused and would have used more."""
        most = limit if limit is not None else 1 << 62
        found: dict[Any, Compiled] = {}
        for (configuration, at), compiled in self.compiled.items():
            m = compiled.measurement
            if at is not None and at <= most and m.fits_limit:
                found[configuration] = compiled
            elif m.fits_limit is False and m.required_bytes > most:
                found.setdefault(configuration, compiled)
        return found

    def _ranked(
        self, limit: int | None, tried: dict[Any, Compiled], reach: float = JUST_ABOVE
    ) -> tuple[list[Ranked], float | None]:
        """Candidates predicted to fit, fastest first, with the seconds and figures predicted for them.

        Where nothing is predicted to fit and nothing that was compiled does, the nearest misses are given.

        Args:
          reach: as in `plan`.
        """
        most = limit if limit is not None else 1 << 62
        margin = _margins(tried, most)
        unfit = {k: c.measurement for k, c in tried.items() if c.measurement.fits_limit is False}
        misses = {k: max(m.required_bytes, most + 1) for k, m in unfit.items()}
        least = self.probes.make(most, misses, mixed_margin=margin.get(MIXED, 0))
        measured = self.probes.measured.values()
        rows = [(p.candidate, p.figures.seconds, _predicted(p.figures)) for p in measured]
        folded = {p.candidate.configuration for p in measured if p.figures.folded}
        need = lambda r: r[2]["required_bytes"] + margin.get(r[0].grouping, 0)
        fitting = [r for r in rows if need(r) <= most]
        quickest = min((r[1] for r in fitting), default=math.inf)
        uncertain = lambda r: self.target.kind is Kind.TPU or r[0].configuration in folded
        above = [r for r in rows if most < need(r) <= reach * most and uncertain(r)]
        fitting += [r for r in above if r[1] < WORTH_COMPILING * quickest < math.inf]
        if not fitting and all(c.measurement.fits_limit is False for c in tried.values()):
            fitting = [r for r in rows if r[2]["required_bytes"] <= min(NEARLY, reach) * most]
        least += [r[1] for r in rows if r[2]["required_bytes"] <= most]
        return sorted(fitting, key=lambda r: (r[1], r[0].kept_bytes)), min(least, default=None)

    def _compile(self, chosen: Ranked, limit: int | None, *, number: str) -> Compiled:
        candidate, _, predicted = chosen
        options = Options(method=Method.COMPILE, limit_bytes=limit)
        m = self.problem.compile(candidate.name, candidate.configuration, options, number=number)
        self.prices.learn(m)
        compiled = self.compiled[candidate.configuration, limit] = Compiled(candidate, predicted, m.held_against(limit))
        return compiled

    def _infeasible(self, limit: int | None, tried: dict[Any, Compiled]) -> InfeasibleBudget:
        """The smallest need among everything measured, and what it consists of."""
        self.probes.smallest_bytes()
        probed = [p for p in self.probes.measured.values() if p.figures.measurements]
        rows = [(p.figures.required_bytes, p.candidate, p.figures.as_measurement()) for p in probed]
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
            f"({candidate.name}) needs {format_bytes_up(smallest)} ({format_bytes(smallest)}: {listed}). Raise the budget to "
            "that, cut the batch, or shard."
        )
        hopeless = findings.of_budget(
            argument_bytes=m.argument_bytes, output_bytes=m.output_bytes - m.alias_bytes, budget_bytes=limit or 0
        )
        if hopeless:
            message += f" {hopeless[0].code}: {hopeless[0].message}"
        return InfeasibleBudget(message, minimum_bytes=smallest, parts=parts, findings=hopeless)


def _margins(tried: dict[Any, Compiled], budget: int) -> dict[str, int]:
    """By grouping: bytes that programs of that kind need beyond what was predicted, where one did not fit."""
    margins: dict[str, int] = {}
    for c in tried.values():
        if c.measurement.fits_limit is False:
            short = max(c.measurement.required_bytes, budget + 1) - int(c.predicted["required_bytes"])
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
    if figures.folded:
        return "predicted from programs with repeated blocks cut out"
    return "probed" if figures.measurements[-1][1].cycles is None else "compiled before, without a limit"
