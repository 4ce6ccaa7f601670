"""What one target has room for: values of a sweep, tried without and with plans.

Comes in: a sweep, a target and a limit. Goes out: trials for `largest`, with the figures behind them, and plans. Does not know
which values are tried, nor how plans are found.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rematplan._measure import lowered, measure_lowered
from rematplan._plan import Plan
from rematplan.errors import CompilerError, InfeasibleBudget
from rematplan.program.configuration import Offload, OwnRegions
from rematplan.records import FitPoint
from rematplan.search import _search, plan
from rematplan.search.largest import Trial
from rematplan.search.planning import FINALISTS, JUST_ABOVE, Search
from rematplan.search.problem import Problem
from rematplan.search.transfer import look_for_fast_ones, nearest_alike, predicted_plain_seconds, transferred
from rematplan.sweep import Sweep
from rematplan.target.compiler import Method, Options
from rematplan.target.measurement import Measurement
from rematplan.target.target import Kind, Target
from rematplan.units import format_bytes, format_bytes_up
from rematplan.workload import Workload

Progress = Callable[[str], None]

# The share of the limit that a TPU probe may miss: its need is up to 6 % too low and, with the code, 4 % too high.
_PROBE_TOO_LOW, _PROBE_TOO_HIGH = 0.94, JUST_ABOVE
# Where no more was predicted to fit, and where more time was predicted, by so much, no compile says otherwise.
_SURELY_TOO_LARGE = 1.1
_SURELY_SLOWER = 1.05
# Of plans that are probed to need a little more than there is, so many are compiled before a value is given up.
_DOUBTFUL_COMPILES = 2
_DOES_NOT_FIT = math.nextafter(1.0, math.inf)


class Capacity:
    """Trials of one target.

    Attributes:
      plain, planned: figures of what was tried, by value.
      plans: compiled in full.
      refusals: why there is no plan for a value, once it was looked at closely.
    """

    def __init__(
        self,
        sweep: Sweep,
        target: Target,
        limit_bytes: int,
        *,
        slowdown: float | None,
        own_regions: OwnRegions,
        offload: Offload,
        progress: Progress,
    ):
        self.sweep = sweep
        self.target = target
        self.limit_bytes = limit_bytes
        self.slowdown = slowdown
        self.plain: dict[int, FitPoint] = {}
        self.planned: dict[int, FitPoint] = {}
        self.plans: dict[int, Plan] = {}
        self.refusals: dict[int, InfeasibleBudget] = {}
        self._own_regions, self._offload = own_regions, offload
        self._say = progress
        self._searches: dict[int, Search] = {}
        self._problems: list[Problem] = []
        self._transfers = True
        self._plain_probes = self._plain_compiles = 0

    @property
    def probes(self) -> int:
        """How many were asked for."""
        problems = [*self._problems, *(s.problem for s in self._searches.values())]
        return self._plain_probes + sum(problem.probes for problem in problems)

    @property
    def compiles(self) -> int:
        """How many were asked for."""
        return self._plain_compiles + sum(s.problem.compiles for s in self._searches.values())

    def try_plain(self, value: int) -> Trial | None:
        """What a value needs without a plan."""
        return self._try(value, self.plain, self._probe_plain)

    def try_plan(self, value: int) -> Trial | None:
        """What a value needs with its smallest plan, or how much longer its fastest takes; nothing is compiled in full."""
        return self._try(value, self.planned, self._probe_plan)

    def confirm_plain(self, trial: Trial) -> Trial:
        """Asks the compiler, with the limit as its memory."""
        work = self._workload(trial.value)
        self._say(f"{self._at(trial.value)}: compiling without checkpointing")
        m = self._measure_plain(work, Method.COMPILE, self.limit_bytes)
        fits = m.fits_limit is not False and m.required_bytes <= self.limit_bytes
        self.plain[trial.value] = self._plain_point(trial.value, m, fits=fits)
        return Trial(trial.value, _load(m.required_bytes / self.limit_bytes, fits=fits))

    def confirm_plan(self, trial: Trial) -> Trial:
        """Plans for a value, and compiles the plan in full."""
        try:
            confirmed = self._confirmed(trial.value, expected=trial.fits)
        except CompilerError as error:
            confirmed = self._refused(trial.value, self.planned, error)
        # what was found near by was not what this value wants: from now on each is searched for itself
        self._transfers = self._transfers and confirmed.fits == trial.fits
        return confirmed

    def _confirmed(self, value: int, *, expected: bool) -> Trial:
        limit = self.limit_bytes
        try:
            if not expected:  # what is probed to need a little too much is compiled, but not all of that kind
                search = self._searched(value, self._workload(value))
                _met(limit, lambda: search.plan(limit, finalists=1, most_compiles=_DOUBTFUL_COMPILES))
            found, (plain_seconds, plain_source) = self._plan(value, finalists=1)
            if self._too_slow(found, plain_seconds):  # the first that fits may be a few percent slower than the best
                found, (plain_seconds, plain_source) = self._plan(value, finalists=FINALISTS)
        except InfeasibleBudget as error:
            self.refusals[value] = error
            self.planned[value] = self._without_room(
                value, error.minimum_bytes, self._source(self._searches[value].problem)
            )
            return Trial(value, _load(error.minimum_bytes / self.limit_bytes, fits=False))
        figures = found.measured
        point = FitPoint(
            value,
            fits=not self._too_slow(found, plain_seconds),
            required_bytes=figures["required_bytes"],
            seconds=figures["seconds"],
            plain_seconds=plain_seconds,
            source=figures["source"],
            clock=figures["sources"].get("seconds", ""),
            plain_source=plain_source,
        )
        if not point.fits:
            point = self._too_long(point)
            self.refusals[value] = self._slow_refusal(point)
        else:
            self.plans[value] = found
        self.planned[value] = point
        return Trial(value, _load(self._pressure(point), fits=point.fits))

    def _try(
        self, value: int, points: dict[int, FitPoint], probe: Callable[[int, Workload], tuple[FitPoint, Trial]]
    ) -> Trial | None:
        work = self.sweep.workload(value)
        if work is None:
            return None
        try:
            point, trial = probe(value, work)
        except CompilerError as error:
            return self._refused(value, points, error)
        points[value] = point
        return trial

    def _refused(self, value: int, points: dict[int, FitPoint], error: CompilerError) -> Trial:
        """Compilers refuse programs that are far too large in other ways than by their memory.

        Raises:
          CompilerError: where nothing else fits, so that it may be for any reason.
        """
        if not any(p.fits for other, p in (*self.plain.items(), *points.items()) if other != value):
            raise error
        points[value] = FitPoint(
            value, False, None, None, None, "compiled", f"the compiler refused the program: {error}"
        )
        return Trial(value, math.inf)

    def _probe_plain(self, value: int, work: Workload) -> tuple[FitPoint, Trial]:
        self._say(f"{self._at(value)}: probing without checkpointing")
        m = self._measure_plain(work, Method.PROBE, None)
        load = m.required_bytes / self.limit_bytes
        sure = self.target.kind is not Kind.TPU or not _PROBE_TOO_LOW < load < _PROBE_TOO_HIGH
        return self._plain_point(value, m, fits=load <= 1), Trial(value, load, sure)

    def _probe_plan(self, value: int, work: Workload) -> tuple[FitPoint, Trial]:
        found_fitting = any(p.fits for p in (*self.plain.values(), *self.planned.values()))
        if self._transfers and value not in self._searches:
            found_near_by = self._transferred(value, work)
            if found_near_by is not None:
                return found_near_by
        search = self._searched(value, work)
        exact = self.target.kind is not Kind.TPU and not search.problem.folds
        try:
            found = _met(self.limit_bytes, lambda: search.estimate(self.limit_bytes)).best.measurement
        except InfeasibleBudget as error:
            load = error.minimum_bytes / self.limit_bytes
            sure = found_fitting and (exact or load > _SURELY_TOO_LARGE)
            self._look_for_fast_ones(search)
            point = self._without_room(value, error.minimum_bytes, self._source(search.problem))
            return point, Trial(value, _load(load, fits=False), sure)
        plain_seconds = predicted_plain_seconds(search)
        source = self._source(search.problem)
        clock = found.sources.get("seconds", "")
        point = FitPoint(
            value, True, found.required_bytes, found.seconds, plain_seconds, source, clock=clock, plain_source=source
        )
        if self.slowdown is None:
            # what is made for the limit uses it up; where the limit is reached, the smallest says
            return point, Trial(value, min(search.probes.smallest_bytes() / self.limit_bytes, 1.0), sure=False)
        load = self._pressure(point)
        if load <= 1:
            return point, Trial(value, None, sure=False)
        self._look_for_fast_ones(search)
        return self._too_long(point), Trial(value, load, sure=found_fitting and (exact or load > _SURELY_SLOWER))

    def _look_for_fast_ones(self, search: Search) -> None:
        if self._transfers and self.slowdown is not None:
            look_for_fast_ones(search, slowdown=self.slowdown)

    def _transferred(self, value: int, work: Workload) -> tuple[FitPoint, Trial] | None:
        """By what was found for a value near by; None if there is none, or the program is another one."""
        if not self._searches:
            return None
        problem = Problem(work, self.target, progress=self._saying(value), own_regions=self._own_regions)
        search = nearest_alike(self._searches, problem, value)
        found = transferred(search, problem, slowdown=self.slowdown) if search is not None else None
        if found is None:
            return None
        self._problems.append(problem)
        figures, plain = found
        needs, source = figures.required_bytes, self._source(problem)
        point = FitPoint(
            value,
            fits=True,
            required_bytes=needs,
            seconds=figures.seconds,
            plain_seconds=plain.seconds if plain is not None else None,
            source=source,
            clock=figures.as_measurement().sources.get("seconds", ""),
            plain_source=source if plain is not None else "",
        )
        load = self._pressure(point)
        if load > 1:
            has_room = needs <= self.limit_bytes
            point = self._too_long(point) if has_room else self._without_room(value, needs, source)
        return point, Trial(value, load, sure=False)

    def _plan(self, value: int, *, finalists: int) -> tuple[Plan, tuple[float | None, str]]:
        """A plan, and the seconds that no checkpointing takes, by the same clock, with their source."""
        work = self._workload(value)
        self._searched(value, work)
        make = lambda: plan(
            work,
            budget=self.limit_bytes,
            target=self.target,
            finalists=finalists,
            own_regions=self._own_regions,
            offload=self._offload,
            progress=self._saying(value),
        )
        found = _met(self.limit_bytes, make)
        return found, self._plain_seconds(value, work, found.measured["sources"].get("seconds", ""))

    def _plain_seconds(self, value: int, work: Workload, clock: str) -> tuple[float | None, str]:
        """As compiled in full where the chip has room for it, else by the prices of the search."""
        known = self.plain.get(value)
        memory = self.target.memory_bytes
        needs = known.required_bytes if known is not None and known.required_bytes is not None else 0
        if self.target.kind is not Kind.TPU or memory is None or needs <= memory:
            self._say(f"{self._at(value)}: compiling without checkpointing")
            with contextlib.suppress(CompilerError):  # too large for it in another way than by its memory
                m = self._measure_plain(work, Method.COMPILE, None)
                if m.sources.get("seconds") == clock:
                    return m.seconds, m.source.value
        predicted = predicted_plain_seconds(self._searches[value])
        return predicted, "predicted" if predicted is not None else ""

    def _measure_plain(self, work: Workload, method: Method, limit_bytes: int | None) -> Measurement:
        self._plain_probes += method is Method.PROBE
        self._plain_compiles += method is Method.COMPILE
        options = Options(method=method, limit_bytes=limit_bytes)
        return measure_lowered(lowered(work, None, self.target, options=options), self.target)

    def _workload(self, value: int) -> Workload:
        work = self.sweep.workload(value)
        assert work is not None
        return work

    def _searched(self, value: int, work: Workload) -> Search:
        if value not in self._searches:
            self._searches[value] = _search(work, self.target, self._own_regions, self._offload, self._saying(value))
        return self._searches[value]

    def _saying(self, value: int) -> Progress:
        return lambda message: self._say(f"{self._at(value)}: {message}")

    def _at(self, value: int) -> str:
        return f"{self.target.name}, {self.sweep.vary}={value}"

    def _source(self, problem: Problem) -> str:
        if problem.folds:
            return "predicted"
        return "probed" if self.target.kind is Kind.TPU else "compiled"

    def _pressure(self, point: FitPoint) -> float:
        """The larger share of what it may need and of what it may take."""
        assert point.required_bytes is not None
        room = point.required_bytes / self.limit_bytes
        if self.slowdown is None or point.slowdown is None:
            return room
        return max(room, point.slowdown / self.slowdown)

    def _too_slow(self, found: Plan, plain_seconds: float | None) -> bool:
        seconds = found.measured["seconds"]
        if self.slowdown is None or not seconds or not plain_seconds:
            return False
        return seconds > self.slowdown * plain_seconds

    def _plain_point(self, value: int, m: Measurement, *, fits: bool) -> FitPoint:
        reason = "" if fits else f"it needs {self._excess(m.required_bytes)}"
        clock = m.sources.get("seconds", "")
        source = m.source.value
        return FitPoint(value, fits, m.required_bytes, m.seconds, m.seconds, source, reason, clock, source)

    def _without_room(self, value: int, needs: int, source: str) -> FitPoint:
        reason = f"its smallest plan needs {self._excess(needs)}"
        return FitPoint(value, False, needs, None, None, source, reason)

    def _excess(self, needs: int) -> str:
        more = needs - self.limit_bytes
        beyond = f"{format_bytes(more)} more than there is" if more > 0 else "and the compiler refused it"
        return f"{format_bytes(needs)}, {beyond}"

    def _too_long(self, point: FitPoint) -> FitPoint:
        reason = f"its fastest plan takes {point.slowdown:.3f} times as long as no checkpointing"
        return replace(point, fits=False, reason=reason)

    def _slow_refusal(self, point: FitPoint) -> InfeasibleBudget:
        """What is said if even the least value is too slow; without checkpointing nothing is slower than itself."""
        known = self.plain.get(point.value)
        needs = (known.required_bytes if known is not None else None) or 0
        message = (
            f"{self._at(point.value)} fits the budget of {format_bytes(self.limit_bytes)}, but {point.reason}, and "
            f"{self.slowdown:g} times are allowed. Without checkpointing it needs {format_bytes_up(needs)}: raise the budget, "
            "or allow more."
        )
        return InfeasibleBudget(message, minimum_bytes=needs, parts={"without checkpointing": needs})


def fixed_load(trials: Sequence[Trial]) -> float | None:
    """What would be taken at value 0, by the line through the least value and the largest that fits; None if unknown."""
    fitting = [t for t in trials if t.fits and t.load is not None]
    if len(fitting) < 2:
        return None
    first, last = fitting[0], fitting[-1]
    assert first.load is not None and last.load is not None
    return max(first.load - first.value * (last.load - first.load) / (last.value - first.value), 0.0)


T = TypeVar("T")


def _met(limit_bytes: int, make: Callable[[], T]) -> T:
    """Tries again where looking for the smallest plan, after nothing else fitted, found one that does."""
    try:
        return make()
    except InfeasibleBudget as error:
        if error.minimum_bytes > limit_bytes:
            raise
    return make()


def _load(load: float, *, fits: bool) -> float:
    """A share that says what the compiler says, however it is rounded."""
    return min(load, 1.0) if fits else max(load, _DOES_NOT_FIT)
