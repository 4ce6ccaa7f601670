"""The largest value that fits: against brute force, on straight, bent, noisy and arbitrary loads, and in few trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematplan.search.largest import Largest, NoValidValueError, Span, Trial, UnlimitedError, largest


@dataclass
class Asked:
    """A load by value, and which values were asked for."""

    load: Callable[[int], float | None]
    values: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    off: Callable[[int], float] = lambda _value: 0.0

    def __call__(self, value: int) -> Trial | None:
        self.values.append(value)
        load = self.load(value)
        return None if load is None else Trial(value, load + self.off(value), sure=self.off(value) == 0.0)

    def confirm(self, trial: Trial) -> Trial:
        self.confirmed.append(trial.value)
        return Trial(trial.value, self.load(trial.value))


def by_brute_force(span: Span, load: Callable[[int], float | None]) -> tuple[int | None, int | None]:
    """The largest that fits before the first that does not, and that first one; for loads that only grow."""
    best = None
    for value in range(span.first, span.last + 1, span.multiple_of):
        taken = load(value)
        if taken is None:
            continue
        if taken > 1:
            return best, value
        best = value
    return best, None


def values_of(found: Largest) -> tuple[int | None, int | None]:
    return (found.best.value if found.best else None), (found.above.value if found.above else None)


spans = st.builds(
    lambda low, count, multiple: Span(low, (-(-low // multiple) + count) * multiple, multiple),
    st.integers(1, 50), st.integers(0, 300), st.integers(1, 16),
)  # fmt: skip
SEEDS = st.integers(0, 2**32)


def rising(span: Span, jumps: list[float]) -> Callable[[int], float]:
    """Any load that never falls: a sum of jumps at values of the span."""
    heights = [sum(jumps[: n + 1]) for n in range(len(jumps))]
    return lambda value: heights[min((value - span.first) // span.multiple_of, len(heights) - 1)]


@given(spans, st.lists(st.floats(0, 0.2), min_size=1, max_size=60))
def test_any_load_that_never_falls_is_answered_as_by_brute_force(span, jumps):
    load = rising(span, jumps)
    asked = Asked(load)
    found = largest(span, asked)
    assert values_of(found) == by_brute_force(span, load)
    assert len(asked.values) == len(set(asked.values))
    count = (span.last - span.first) // span.multiple_of + 1
    assert len(asked.values) <= 4 + 3 * math.log2(count + 1) + math.log2(count + 1)


@given(st.floats(0, 0.9), st.integers(1, 10**6), st.integers(1, 64))
def test_a_straight_load_takes_a_handful_of_trials_however_far_it_goes(fixed, root, multiple):
    load = lambda value: fixed + (1 - fixed) * value / root
    asked, span = Asked(load), Span(1, None, multiple)
    found = largest(span, asked, fixed_load=fixed)
    best, above = values_of(found)
    assert above is not None and load(above) > 1
    assert best is None or (load(best) <= 1 and above == best + multiple)
    assert len(asked.values) <= 6 + max(math.log(max(root / span.first, 1), 8), 0)


@given(st.floats(0, 0.5), st.floats(0.1, 3.0), st.integers(1, 2000))
def test_a_bent_load_is_answered_exactly(fixed, power, root):
    load = lambda value: fixed + (1 - fixed) * (value / root) ** power
    asked = Asked(load)
    best, above = values_of(largest(Span(1, 3000), asked))
    assert (best, above) == by_brute_force(Span(1, 3000), load)
    assert len(asked.values) <= 4 + 3 * math.log2(3000)


@given(spans, st.floats(0.2, 3), SEEDS, st.floats(0, 0.2))
def test_where_loads_waver_the_answer_fits_and_the_next_does_not(span, scale, seed, amplitude):
    """Compilers' needs are not quite monotonic: within the band where they waver the answer is one of its boundaries."""
    wave = lambda value: amplitude * math.sin(value * 12.9898 + seed)
    load = lambda value: scale * value / span.last + wave(value)
    asked = Asked(load)
    best, above = values_of(largest(span, asked))
    assert best is None or load(best) <= 1
    assert above is None or load(above) > 1
    if best is not None and above is not None:
        assert above == best + span.multiple_of
    if best is None:
        assert above == span.first
    if above is None:
        assert best == span.last
    count = (span.last - span.first) // span.multiple_of + 1
    assert len(asked.values) <= 4 + 4 * math.log2(count + 1)
    surely = [v for v in range(span.first, span.last + 1, span.multiple_of) if scale * v / span.last <= 1 - amplitude]
    assert not surely or (best is not None and best >= surely[-1])


@given(spans, st.lists(st.floats(0, 0.2), min_size=1, max_size=60), st.integers(2, 9), st.integers(0, 8))
def test_values_that_are_not_valid_are_left_out(span, jumps, modulus, remainder):
    whole = rising(span, jumps)
    load = lambda value: whole(value) if value % modulus == remainder % modulus else None
    asked = Asked(load)
    valid = [v for v in range(span.first, span.last + 1, span.multiple_of) if load(v) is not None]
    if not valid:
        with pytest.raises(NoValidValueError):
            largest(span, asked)
        return
    assert values_of(largest(span, asked)) == by_brute_force(span, load)


@given(spans, st.floats(0.3, 4), st.floats(-0.2, 0.2).filter(bool))
def test_what_a_closer_look_says_decides(span, scale, off):
    """Trials are all wrong in the same direction; the answer is right, and both of its ends were looked at."""
    load = lambda value: scale * value / span.last
    asked = Asked(load, off=lambda _value: off)
    best, above = values_of(largest(span, asked, confirm=asked.confirm))
    assert (best, above) == by_brute_force(span, load)
    assert {v for v in (best, above) if v is not None} <= set(asked.confirmed)


def test_where_hardly_any_value_is_valid_powers_of_two_are_found():
    asked = Asked(lambda value: value / 3000 if value & (value - 1) == 0 else None)
    assert values_of(largest(Span(1, None), asked)) == (2048, 4096)
    asked = Asked(lambda value: value / 3000 if value & (value - 1) == 0 else None)
    assert values_of(largest(Span(512, 2048), asked)) == (2048, None)


def test_a_known_value_is_not_tried_again_but_looked_at():
    asked = Asked(lambda value: value / 100, off=lambda _value: 1e-6)
    known = Trial(60, None, sure=False)
    found = largest(Span(1), asked, confirm=asked.confirm, known=[known], fixed_load=0.0)
    assert values_of(found) == (100, 101)
    assert min(asked.values) > 60
    asked = Asked(lambda value: 0.5 if value <= 60 else 2.0)
    assert values_of(largest(Span(1), asked, confirm=asked.confirm, known=[known])) == (60, 61)
    assert asked.confirmed == [60]


def test_the_least_value_does_not_fit():
    asked = Asked(lambda value: 1.0 + value)
    found = largest(Span(3, None, 4), asked)
    assert values_of(found) == (None, 4)
    assert asked.values == [4]


def test_everything_in_the_range_fits():
    found = largest(Span(5, 23, 4), Asked(lambda value: value / 1000))
    assert values_of(found) == (20, None)


def test_a_load_that_does_not_grow_is_said_to_be_unlimited():
    with pytest.raises(UnlimitedError) as caught:
        largest(Span(1), Asked(lambda value: 0.5 + 1e-10 * value))
    assert 1000 < caught.value.trial.value < 10**5


def test_a_program_that_was_refused_for_another_reason_only_bounds():
    asked = Asked(lambda value: value / 1000 if value < 500 else math.inf)
    assert values_of(largest(Span(1, 4000), asked)) == (499, 500)
