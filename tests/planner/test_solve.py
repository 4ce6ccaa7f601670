"""The solver against its referees, and on chains whose optimum is known."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.errors import InfeasibleBudget
from rematplan.planner import labels
from rematplan.planner.chain import Chain, Choice, Pick, Span, describe
from rematplan.planner.simulate import Phase, replay
from rematplan.planner.solve import frontier, minimum_budget, ranked, solve
from rematplan.planner.tidy import tidy
from tests.planner.chains import all_selections, by_brute_force, by_integer_program, small_chains, uniform_chain


def switch(a: str, b: str) -> float:
    """A cost between neighbours that depends on order and can be negative."""
    return {"ab": 3.0, "ba": 1.0, "bc": -1.0}.get(a + b, 0.0)


def outcome(chain, budget, **options):
    try:
        return solve(chain, budget_bytes=budget, **options).seconds
    except InfeasibleBudget:
        return None


@settings(max_examples=200, deadline=None)
@given(chain=small_chains(), budget=st.integers(0, 80))
def test_same_seconds_as_brute_force(chain, budget):
    assert outcome(chain, budget) == by_brute_force(chain, budget)


@settings(max_examples=100, deadline=None)
@given(chain=small_chains(), budget=st.integers(0, 80))
def test_same_seconds_as_brute_force_with_costs_between_neighbours(chain, budget):
    expected = by_brute_force(chain, budget, switch_seconds=switch)
    assert outcome(chain, budget, switch_seconds=switch) == expected


@settings(max_examples=60, deadline=None)
@given(chain=small_chains(most_blocks=7), budget=st.integers(20, 90))
def test_same_seconds_as_the_integer_program(chain, budget):
    expected = by_integer_program(chain, budget)
    found = outcome(chain, budget)
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(chain=small_chains(), budget=st.integers(0, 80), grid=st.integers(1, 6))
def test_exact_on_a_coarse_grid_and_with_few_labels(chain, budget, grid):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "GRID", grid)
        patch.setattr(labels, "WIDTHS", (1, 2, 10**6))
        assert outcome(chain, budget) == by_brute_force(chain, budget)
        patch.setattr(labels, "WIDTHS", (1,))
        try:
            hasty = solve(chain, budget_bytes=budget)
        except InfeasibleBudget:
            return
        # one label a node may miss the optimum, but then the bound says so
        best = by_brute_force(chain, budget)
        assert hasty.bound_seconds <= best <= hasty.seconds
        assert hasty.peak_bytes <= budget


@settings(max_examples=100, deadline=None)
@given(chain=small_chains())
def test_minimum_budget_is_the_smallest_peak_and_the_error_carries_it(chain):
    smallest = min(replay(chain, s).peak_bytes for s in all_selections(chain))
    assert minimum_budget(chain) == smallest
    assert solve(chain, budget_bytes=smallest).peak_bytes == smallest
    if smallest:
        with pytest.raises(InfeasibleBudget, match=f"smallest peak is {smallest} bytes") as error:
            solve(chain, budget_bytes=smallest - 1)
        assert error.value.minimum_bytes == smallest == sum(error.value.parts.values())


@settings(max_examples=100, deadline=None)
@given(chain=small_chains(most_blocks=4), budget=st.integers(10, 80))
def test_ranked_is_the_order_of_all_kinds(chain, budget):
    best: dict[frozenset, float] = {}
    for selection in all_selections(chain):
        r = replay(chain, selection)
        kind = frozenset(p.choice.label for p in selection)
        if r.peak_bytes <= budget:
            best[kind] = min(best.get(kind, math.inf), r.seconds)
    if not best:
        with pytest.raises(InfeasibleBudget):
            ranked(chain, budget_bytes=budget, points=4)
        return
    found = ranked(chain, budget_bytes=budget, points=4)
    assert [s.seconds for s in found] == sorted(best.values())[:4]
    assert len({s.kind for s in found}) == len(found)
    for s in found:
        assert s.seconds == best[s.kind]


@settings(max_examples=100, deadline=None)
@given(chain=small_chains(most_blocks=4), budget=st.integers(10, 80))
def test_the_bounds_of_ranked_hold_for_every_kind_that_was_not_given_before(chain, budget):
    replays = [(replay(chain, s), frozenset(p.choice.label for p in s)) for s in all_selections(chain)]
    fitting = [(r.seconds, kind) for r, kind in replays if r.peak_bytes <= budget]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "WIDTHS", (1,))  # which may miss the optimum
        try:
            found = ranked(chain, budget_bytes=budget, points=4)
        except InfeasibleBudget:
            return
    given_before = set()
    for solution in found:
        assert solution.bound_seconds <= min(seconds for seconds, kind in fitting if kind not in given_before)
        given_before.add(solution.kind)


@settings(max_examples=50, deadline=None)
@given(chain=small_chains())
def test_frontier_runs_from_the_smallest_peak_to_the_fastest(chain):
    found = frontier(chain, points=6)
    replays = [replay(chain, s) for s in all_selections(chain)]
    assert found[0].peak_bytes == min(r.peak_bytes for r in replays)
    assert found[-1].seconds == min(r.seconds for r in replays)
    assert all(a.seconds > b.seconds for a, b in itertools.pairwise(found))


def test_replay_counts_every_position_by_hand():
    first, second = (Span(i, i + 1, (Choice("x", 10 + i, 3, 7, 1.0),)) for i in range(2))
    chain = Chain(2, (first, second), base_bytes=100, gradient_bytes=(20, 30), turn_bytes=5)
    r = replay(chain, (Pick(first, first.choices[0]), Pick(second, second.choices[0])), switch_seconds=lambda a, b: 0.5)
    assert [(p.phase, p.pick, p.bytes) for p in r.positions] == [
        (Phase.FORWARD, 0, 103),
        (Phase.FORWARD, 1, 113),
        (Phase.TURN, None, 126),
        (Phase.BACKWARD, 1, 128),
        (Phase.BACKWARD, 0, 147),  # 10 kept, 30 of gradients, 7 of workspace
        (Phase.END, None, 150),
    ]
    assert (r.peak_bytes, r.seconds) == (150, 2.5)
    with pytest.raises(ValueError, match="ends at block 1 of 2"):
        replay(chain, (Pick(first, first.choices[0]),))
    with pytest.raises(ValueError, match="block 0 is covered twice or not at all"):
        replay(chain, (Pick(second, second.choices[0]),))


def test_kept_bytes_go_where_gradients_are_not():
    # early blocks run backward last, beside most gradients; what late blocks keep is freed before those pile up
    keep, full = Choice("keep", 50, 0, 10, 1.0), Choice("full", 0, 0, 10, 2.0)
    spans = tuple(Span(i, i + 1, (keep, full)) for i in range(4))
    chain = Chain(4, spans, gradient_bytes=(50,) * 4)
    assert minimum_budget(chain) == 200  # all gradients, at the end
    found = solve(chain, budget_bytes=200)
    # at block i's turn 50 * (3 - i) of gradients and 10 of workspace are live; each block but one may keep its 50
    assert found.seconds == 5.0
    assert solve(chain, budget_bytes=210).seconds == 4.0


def test_uniform_chain_keeps_as_many_as_fit():
    # six equal blocks: each fast one costs 10 bytes; 35 bytes of room for kept bytes allow three
    choices = (Choice("fast", 10, 0, 0, 1.0), Choice("slow", 0, 0, 0, 3.0))
    chain = uniform_chain(6, choices=choices, base_bytes=65)
    found = solve(chain, budget_bytes=100)
    assert (found.seconds, found.peak_bytes, found.bound_seconds) == (3 * 1.0 + 3 * 3.0, 95, 12.0)
    assert sorted(p.choice.label for p in found.selection) == ["fast"] * 3 + ["slow"] * 3


def test_uniform_chain_of_regions_has_the_square_root_peak():
    # n blocks in regions of k: n/k kept inputs of c bytes, k blocks of w bytes replayed; the least sum is 2 sqrt(n c w)
    n, c, w = 64, 4, 4
    chain = uniform_chain(n, choices=(Choice("full", c, 0, w, 1.0),), longest=16)
    by_hand = min(math.ceil(n / k) * c + k * w for k in range(1, 17))
    assert by_hand == 2 * math.isqrt(n * c * w)
    # regions of different lengths do better: late regions can be shorter, because more is kept while they are replayed
    # lengths l, l-1, ...: after r regions r c + l_r w stays level
    level = next(m for m in range(1, 99) if sum(max(0, (m - r) * w // w) for r in range(1, m + 1)) >= n)
    assert minimum_budget(chain) == level * c < by_hand


@pytest.mark.parametrize("interaction", [None, lambda a, b: 1e-6 * (a != b)], ids=["independent", "neighbours"])
def test_ninety_six_blocks_with_twelve_choices_on_spans_up_to_eight_take_seconds(interaction):
    random = np.random.default_rng(0)
    spans = []
    rows = [(int(random.integers(1, 10**8)), int(random.integers(1, 10**8)), float(random.random())) for _ in range(12)]
    for start in range(96):
        for length in range(1, min(8, 96 - start) + 1):
            choices = tuple(
                Choice(
                    f"c{i}",
                    kept,
                    kept // 2,
                    length * work // 4,
                    1e-3 * length * (1 + s - kept / 3e8) - 1e-5 * length**0.5,
                )
                for i, (kept, work, s) in enumerate(rows)
            )
            spans.append(Span(start, start + length, choices))
    chain = Chain(96, tuple(spans), base_bytes=10**9, gradient_bytes=(10**7,) * 96, turn_bytes=10**6)
    low = minimum_budget(chain)
    start = time.process_time()
    found = solve(chain, budget_bytes=int(1.3 * low), switch_seconds=interaction)
    assert time.process_time() - start < 20  # a few seconds where this was written
    assert found.bound_seconds == found.seconds
    assert found.peak_bytes <= 1.3 * low


def test_like_picks_stand_together_where_blocks_repeat():
    a, b, c = (Choice(x, kept, 0, 0, seconds) for x, kept, seconds in (("a", 0, 3.0), ("b", 10, 1.0), ("c", 4, 2.0)))
    chain = uniform_chain(6, choices=(a, b, c))
    mixed = tuple(Pick(s, choice) for s, choice in zip(chain.spans, (b, a, c, a, b, c), strict=True))
    assert describe(tidy(chain, mixed)) == "2 x a, 2 x c, 2 x b"
    assert describe(solve(chain, budget_bytes=35).selection).count(",") <= 2


def test_picks_are_not_moved_where_that_costs_memory():
    # the block that keeps much needs little workspace; behind the other it would stand beside that one's
    little, much = Choice("little", 1, 0, 0, 1.0), Choice("much", 5, 0, 0, 1.0)
    busy = tuple(Span(i, i + 1, (little, replace(much, backward_workspace_bytes=50))) for i in range(2))
    chain = Chain(2, busy)
    early = (Pick(busy[0], busy[0].choices[1]), Pick(busy[1], little))
    assert replay(chain, early).peak_bytes == 55
    assert tidy(chain, early) == early  # the other order peaks at 56


@settings(max_examples=100, deadline=None)
@given(chain=small_chains(), data=st.data())
def test_tidy_changes_neither_seconds_nor_picks_and_never_raises_the_peak(chain, data):
    selection = data.draw(st.sampled_from(list(itertools.islice(all_selections(chain), 200))))
    tidied = tidy(chain, selection)
    before, after = replay(chain, selection), replay(chain, tidied)
    assert after.seconds == before.seconds
    assert after.peak_bytes <= before.peak_bytes
    assert sorted(p.choice.label for p in tidied) == sorted(p.choice.label for p in selection)
    assert all(p.choice in p.span.choices for p in tidied)


def test_chains_that_cannot_be_solved_are_refused():
    choice = Choice("x", 1, 1, 1, 1.0)
    with pytest.raises(ValueError, match="covers all 2 blocks"):
        Chain(2, (Span(0, 1, (choice,)),))
    with pytest.raises(ValueError, match="does not lie in 1 blocks"):
        Chain(1, (Span(0, 2, (choice,)),))
    with pytest.raises(ValueError, match="1 entries for 2 blocks"):
        Chain(2, (Span(0, 2, (choice,)),), gradient_bytes=(1,))
    with pytest.raises(ValueError, match="negative"):
        Chain(1, (Span(0, 1, (Choice("x", -1, 0, 0, 1.0),)),))


def test_description_of_a_selection():
    a, b = Choice("full", 0, 0, 0, 1.0), Choice("plain", 0, 0, 0, 1.0)
    picks = [Pick(Span(0, 1, (a,)), a), Pick(Span(1, 2, (a,)), a), Pick(Span(2, 5, (b,)), b)]
    assert describe(tuple(picks)) == "2 x full, 1 x plain[3]"
