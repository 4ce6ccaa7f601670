"""The largest whole number that fits, with few trials. Knows no programs, chips or compilers.

Comes in: a range, and a function that tries one value and says what it takes of what there is. Goes out: a value that fits,
and the next one, which does not. What a program needs is nearly straight in its batch and bent in its length, so trials
stand where a line through known ones crosses the limit; where that gets nowhere, the range is halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# How far the next value is where no slope is known: beyond one that merely fits, and beyond one with a load; and the most
# that a known slope is trusted for.
NEXT_STEP, FIRST_STEP, GREATEST_STEP = 2, 4, 8
# Lines that did not halve what is left, one after the other, before it is halved.
PATIENCE = 2
# So many values around a wanted one are tried at most where some are not valid, before doublings of one that is.
NEAREST_VALID = 128
# From so many times the least value on, a line is believed that reaches the limit only beyond what an array can have.
FARTHEST = 1024
# More elements than an array can have along one axis.
GREATEST_VALUE = 2**31 - 1


@dataclass(frozen=True)
class Trial:
    """What one value takes.

    Attributes:
      load: a share of what there is; more than 1 does not fit. None: it is known to fit, but not how well.
      sure: whether a closer look would say nothing new.
    """

    value: int
    load: float | None
    sure: bool = True

    @property
    def fits(self) -> bool:
        """Whether it takes no more than there is."""
        return self.load is None or self.load <= 1


@dataclass(frozen=True)
class Span:
    """Multiples of a number from `low` to `high`, both included; without `high`, as far as an array can reach."""

    low: int
    high: int | None = None
    multiple_of: int = 1

    @property
    def first(self) -> int:
        """The least value."""
        return -(-self.low // self.multiple_of) * self.multiple_of

    @property
    def last(self) -> int:
        """The greatest value; below `first` if there is none."""
        high = GREATEST_VALUE if self.high is None else self.high
        return high // self.multiple_of * self.multiple_of

    def below(self, value: float) -> int:
        """The greatest multiple that is not above."""
        return int(min(value, self.last) // self.multiple_of) * self.multiple_of


@dataclass(frozen=True)
class Largest:
    """What was found.

    Attributes:
      best: the largest that fits; None if the least value does not.
      above: the next valid value, which does not fit; None if there is none in the range.
      trials: everything that was tried, by value.
    """

    best: Trial | None
    above: Trial | None
    trials: tuple[Trial, ...]


class NoValidValueError(Exception):
    """No value near the lower end is valid."""


class UnlimitedError(Exception):
    """The load does not grow with the value.

    Attributes:
      trial: the greatest that was tried.
    """

    def __init__(self, trial: Trial):
        super().__init__(f"{trial.value} takes hardly more than less")
        self.trial = trial


Try = Callable[[int], Trial | None]


def largest(
    span: Span,
    try_value: Try,
    *,
    confirm: Callable[[Trial], Trial] = lambda trial: trial,
    known: Sequence[Trial] = (),
    fixed_load: float | None = None,
) -> Largest:
    """The largest value that fits.

    If what fits is not everything up to some value, the answer is one of those that fit while the next does not.

    Args:
      span: where to look.
      try_value: what a value takes; None if the value is not valid.
      confirm: looks more closely at a trial that is not sure and would be part of the answer.
      known: trials from before.
      fixed_load: what there would be at value 0, for the first line.

    Raises:
      NoValidValueError: none of the first values is valid.
      UnlimitedError: without an upper end, the load does not grow.
    """
    looked = _Looked(span, try_value, known, fixed_load)
    while True:
        best, above = looked.bracket()
        if best is None and looked.lowest() is None:
            raise NoValidValueError
        best, above = looked.bracket()
        trial = looked.next(best, above) if best is not None else None
        if trial is not None:
            continue
        doubtful = next((t for t in (best, above) if t is not None and not t.sure), None)
        if doubtful is None:
            return Largest(best, above, looked.trials)
        looked.replace(doubtful, confirm(doubtful))


class _Looked:
    """What was tried, and what to try next."""

    def __init__(self, span: Span, try_value: Try, known: Sequence[Trial], fixed_load: float | None):
        self._span = span
        self._try = try_value
        self._seen: dict[int, Trial | None] = {t.value: t for t in known}
        self._known = frozenset(self._seen)
        self._anchor = [] if fixed_load is None else [(0, fixed_load)]
        self._width: int | None = None
        self._stalled = 0
        self._reach = span.multiple_of

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(t for _, t in sorted(self._seen.items()) if t is not None)

    def bracket(self) -> tuple[Trial | None, Trial | None]:
        """The largest that fits, and the least above it that does not."""
        best = max((t for t in self.trials if t.fits), key=lambda t: t.value, default=None)
        least = best.value if best is not None else 0
        return best, next((t for t in self.trials if not t.fits and t.value > least), None)

    def replace(self, trial: Trial, confirmed: Trial) -> None:
        """A closer look at a value that was tried; it has the last word.

        Where it says otherwise, others that were tried like this one are as doubtful, and are tried again if need be.
        """
        if confirmed.fits != trial.fits:
            doubtful = lambda t: not t.sure and t.fits == trial.fits and t.value not in self._known
            self._seen = {value: t for value, t in self._seen.items() if t is None or not doubtful(t)}
        self._seen[trial.value] = Trial(trial.value, confirmed.load)
        self._width, self._stalled = None, 0

    def lowest(self) -> Trial | None:
        """Tries the least valid value."""
        span = self._span
        upward = range(span.first, min(span.last, span.first + NEAREST_VALID * span.multiple_of) + 1, span.multiple_of)
        return self._first_valid(iter(upward))

    def next(self, best: Trial, above: Trial | None) -> Trial | None:
        """Tries a value above the best and below the one that does not fit; None if no valid one is left there."""
        step = self._span.multiple_of
        least, most = best.value + step, above.value - step if above is not None else self._span.last
        if least > most:
            return None
        wanted = self._between(best, above) if above is not None else self._beyond(best)
        wanted = max(least, min(self._span.below(wanted), most))
        doubled = [best.value << n for n in range(1, 32) if least <= best.value << n <= most]
        around = self._first_valid(_outward(wanted, least, most, step))
        # where hardly any value is valid, it is mostly powers of two that are
        return around or self._first_valid(iter(sorted(doubled, key=lambda value: abs(value - wanted))))

    def _between(self, best: Trial, above: Trial) -> float:
        width = above.value - best.value
        self._stalled = self._stalled + 1 if self._width is not None and 2 * width > self._width else 0
        self._width = width
        middle = best.value + width // 2
        points = self._points([best])
        if self._stalled >= PATIENCE or not points or above.load is None or math.isinf(above.load):
            self._stalled = 0
            return middle
        return _crossing(points[-1], (above.value, above.load))

    def _beyond(self, best: Trial) -> float:
        points = self._points([t for t in self.trials if t.fits])
        if self._span.high is None and len(points) > 1:
            self._refuse_unlimited(best, points)
        if len(points) < 2:
            return (NEXT_STEP if best.load is None else FIRST_STEP) * best.value
        crossing = _crossing(points[-2], points[-1])
        if crossing < best.value + self._reach:  # a line that always falls short must not creep
            crossing = best.value + self._reach
            self._reach *= 2
        return min(crossing, GREATEST_STEP * best.value)

    def _points(self, trials: Sequence[Trial]) -> list[tuple[int, float]]:
        known = [(t.value, t.load) for t in trials if t.load is not None]
        return [*self._anchor, *known]

    def _refuse_unlimited(self, best: Trial, points: Sequence[tuple[int, float]]) -> None:
        if best.value >= FARTHEST * self._span.first and _crossing(points[0], points[-1]) > GREATEST_VALUE:
            raise UnlimitedError(best)

    def _first_valid(self, values: Iterator[int]) -> Trial | None:
        for _, value in zip(range(NEAREST_VALID), values, strict=False):
            if value not in self._seen:
                self._seen[value] = self._try(value)
            trial = self._seen[value]
            if trial is not None:
                return trial
        return None


def _crossing(one: tuple[int, float], other: tuple[int, float]) -> float:
    """Where the line through two points reaches 1; infinite if it does not rise."""
    (x0, y0), (x1, y1) = one, other
    if y1 <= y0:
        return math.inf
    return x0 + (1 - y0) / (y1 - y0) * (x1 - x0)


def _outward(wanted: int, least: int, most: int, step: int) -> Iterator[int]:
    """The wanted value, then those around it, the nearest first."""
    yield wanted
    below, above = wanted - step, wanted + step
    while below >= least or above <= most:
        if below >= least:
            yield below
        if above <= most:
            yield above
        below, above = below - step, above + step
