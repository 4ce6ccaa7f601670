"""Regions inside regions: against brute force, against Revolve's optimum, and replayed."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import checkpoint_schedules
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.errors import InfeasibleBudget
from rematplan.planner.nesting import Kept, Line, Nest, Stage, StageChoice, bound_seconds, minimum_budget, solve
from rematplan.planner.simulate import replay_nest

TAPE = 64  # bytes of one step's tape: two never fit beside each other


def uniform(steps: int) -> Line:
    """Steps of one second forward, whose states take a byte and whose tapes cannot be kept for each other."""
    return [Stage("step", 1, 1.0, 0, (StageChoice("tape", TAPE, 0, 0.0),)) for _ in range(steps)]


def revolve(steps: int, checkpoints: int) -> int:
    """Forward steps of the optimal schedule, the one before each backward step counted (Griewank and Walther 2000)."""
    repetitions = 0
    while math.comb(checkpoints + repetitions, checkpoints) < steps:
        repetitions += 1
    return repetitions * steps - math.comb(checkpoints + repetitions, repetitions - 1) + steps


@pytest.mark.parametrize(
    ("steps", "checkpoints", "published"), [(100, 10, 322), (1000, 10, 4636), (1000, 30, 3472), (24, 4, None)]
)
def test_a_uniform_line_takes_revolves_forward_steps(steps: int, checkpoints: int, published: int | None) -> None:
    expected = revolve(steps, checkpoints)
    assert published in (None, expected)
    # Revolve counts the input of the line as a checkpoint, but not the state that is being worked on
    budget = TAPE + checkpoints
    nest = solve(uniform(steps), budget_bytes=budget, grid=budget)
    replayed = replay_nest(uniform(steps), nest)
    assert nest.seconds == replayed.seconds == sum(replayed.forward_runs) == expected
    assert replayed.peak_bytes <= budget


@pytest.mark.parametrize(("steps", "checkpoints"), [(10, 3), (24, 4), (37, 5), (100, 10)])
def test_a_uniform_line_takes_as_many_forward_steps_as_published_schedules(steps: int, checkpoints: int) -> None:
    schedule = checkpoint_schedules.Revolve(steps, checkpoints)
    forward = [action for action in schedule if isinstance(action, checkpoint_schedules.Forward)]
    published = sum(min(action.n1, steps) - action.n0 for action in forward)
    budget = TAPE + checkpoints
    replayed = replay_nest(uniform(steps), solve(uniform(steps), budget_bytes=budget, grid=budget))
    assert sum(replayed.forward_runs) == published


def test_one_byte_less_than_the_minimum_fits_nothing() -> None:
    least = minimum_budget(uniform(6), grid=TAPE * 2)
    assert least == TAPE + 1  # everything runs again from the input for each step
    assert solve(uniform(6), budget_bytes=least, grid=least).seconds == 6 * 7 / 2
    with pytest.raises(InfeasibleBudget) as caught:
        solve(uniform(6), budget_bytes=least - 1, grid=least)
    assert caught.value.minimum_bytes == least


sizes = st.integers(0, 6)
stages = st.builds(
    lambda size, seconds, workspace, gradient, menu: Stage(
        str((size, seconds, workspace, gradient, menu)),
        size,
        float(seconds),
        workspace,
        tuple(StageChoice(str(i), kept, work, float(back)) for i, (kept, work, back) in enumerate(menu)),
        gradient,
    ),
    sizes,
    st.integers(1, 5),
    sizes,
    st.integers(0, 2),
    st.lists(st.tuples(sizes, sizes, st.integers(0, 9)), min_size=1, max_size=2),
)


def every_nest(line: Line, start: int, stop: int) -> list[tuple[Kept | Nest, ...]]:
    """All ways to keep stages and to put stretches into regions, nested as deep as it goes."""

    @functools.cache
    def ways(a: int, b: int) -> list[tuple[Kept | Nest, ...]]:
        if a == b:
            return [()]
        found = [(Kept(a, c), *rest) for c in line[a].choices for rest in ways(a + 1, b)]
        for k in range(a + 1, b):  # a region around the whole stretch only repeats it
            for inside in ways(a, k):
                found += [(Nest(a, k, inside, 0.0), *rest) for rest in ways(k, b)]
        return found

    return ways(start, stop)


@settings(max_examples=150, deadline=None)
@given(st.lists(stages, min_size=1, max_size=4), st.integers(1, 40))
def test_no_nest_that_fits_is_faster(line: list[Stage], budget: int) -> None:
    replays = [replay_nest(line, Nest(0, len(line), parts, 0.0)) for parts in every_nest(line, 0, len(line))]
    fitting = [r.seconds for r in replays if r.peak_bytes <= budget]
    if not fitting:
        with pytest.raises(InfeasibleBudget) as caught:
            solve(line, budget_bytes=budget, grid=budget)
        assert caught.value.minimum_bytes == min(r.peak_bytes for r in replays)
        return
    nest = solve(line, budget_bytes=budget, grid=budget)
    replayed = replay_nest(line, nest)
    assert replayed.seconds == pytest.approx(nest.seconds)
    assert replayed.peak_bytes <= budget
    assert nest.seconds == pytest.approx(min(fitting))


def test_the_referee_holds_a_gradient_beside_the_input_that_it_is_of() -> None:
    line = [Stage(key, size, 1.0, 0, (StageChoice("all", 0, 0, 0.0),), size) for key, size in (("a", 0), ("b", 1))]
    assert minimum_budget(line) == 2
    assert replay_nest(line, solve(line, budget_bytes=2)).peak_bytes == 2


@settings(max_examples=20, deadline=None)
@given(st.lists(stages, min_size=8, max_size=20), st.integers(20, 60), st.integers(4, 30))
def test_a_coarse_grid_never_overruns_the_budget(line: list[Stage], budget: int, grid: int) -> None:
    try:
        nest = solve(line, budget_bytes=budget, grid=grid)
    except InfeasibleBudget:
        return
    replayed = replay_nest(line, nest)
    assert replayed.peak_bytes <= budget
    assert replayed.seconds == pytest.approx(nest.seconds)


@settings(max_examples=150, deadline=None)
@given(st.lists(stages, min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 60))
def test_no_nest_that_fits_is_faster_than_the_bound_on_any_grid(line: list[Stage], budget: int, grid: int) -> None:
    replays = [replay_nest(line, Nest(0, len(line), parts, 0.0)) for parts in every_nest(line, 0, len(line))]
    least = min((r.seconds for r in replays if r.peak_bytes <= budget), default=math.inf)
    assert bound_seconds(line, budget_bytes=budget, grid=grid) <= least
    assert bound_seconds(line, budget_bytes=budget, grid=budget) == pytest.approx(least)  # a cell is a byte


def test_sizes_rounded_up_are_no_bound() -> None:
    line = [Stage("a", 8, 1.0, 8, (StageChoice("all", 11, 8, 2.0), StageChoice("some", 3, 8, 2.5))) for _ in range(9)]
    exact = solve(line, budget_bytes=133, grid=133).seconds
    rounded = solve(line, budget_bytes=133, grid=13).seconds
    assert bound_seconds(line, budget_bytes=133, grid=13) <= exact < rounded


def test_more_memory_is_never_slower_and_less_needs_deeper_nests() -> None:
    line = [Stage("a", 8, 1.0, 8, (StageChoice("all", 24, 8, 2.0), StageChoice("some", 8, 8, 2.5))) for _ in range(27)]
    least = minimum_budget(line)
    nests = [solve(line, budget_bytes=b) for b in range(least, 1000, 40)]
    assert all(a.seconds >= b.seconds for a, b in pairwise(nests))
    assert nests[0].depth > 1 and nests[-1].depth == 0
