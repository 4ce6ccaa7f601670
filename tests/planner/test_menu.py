"""The menu against brute force on small random graphs, and on programs whose best saves are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.planner import menu as menus
from rematplan.planner.fitting import fitting
from rematplan.planner.menu import SaveSet, Stretch, stretch
from rematplan.planner.mincut import RecomputeNetwork
from rematplan.planner.price import Rates
from tests.planner.graphs import UNIT, Builder, small_graphs, transformer


def all_sets(problem: Stretch) -> list[SaveSet]:
    """Every save set of the stretch, priced."""
    savable = [v for v in problem.defined if v not in problem.unsavable]
    subsets = itertools.chain.from_iterable(itertools.combinations(savable, n) for n in range(len(savable) + 1))
    return [problem.save_set(set(s)) for s in subsets]


@settings(max_examples=150, deadline=None)
@given(graph=small_graphs(most_operations=6), price=st.floats(1e-3, 100))
def test_a_cut_is_the_cheapest_of_all_save_sets(graph, price):
    problem = stretch(graph, 0, len(graph.operations), rates=UNIT)
    value = lambda s: s.recompute_seconds + price * s.saved_bytes
    best = min(map(value, all_sets(problem)))
    bound = value(problem.save_set(()))
    if bound:
        assert value(RecomputeNetwork(problem).cheapest(price, bound=bound)) == pytest.approx(best, rel=1e-6, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(graph=small_graphs(most_operations=6))
def test_the_menu_is_the_whole_lower_hull(graph):
    problem = stretch(graph, 0, len(graph.operations), rates=UNIT)
    found, everything = menus.menu(problem), all_sets(problem)
    least = min(s.recompute_seconds for s in everything)
    assert found[-1].recompute_seconds == pytest.approx(least, abs=1e-9)
    assert found[0].saved_bytes == 0 or everything[0].recompute_seconds == least
    bytes_ = [s.saved_bytes for s in found]
    assert bytes_ == sorted(set(bytes_))
    for s in everything:
        # nothing lies below the hull: at every price some set of the menu is as cheap
        for a, b in itertools.pairwise(found):
            price = (a.recompute_seconds - b.recompute_seconds) / (b.saved_bytes - a.saved_bytes)
            on_hull = a.recompute_seconds + price * a.saved_bytes
            assert s.recompute_seconds + price * s.saved_bytes >= on_hull * (1 - 1e-6) - 1e-9


@settings(max_examples=100, deadline=None)
@given(graph=small_graphs(most_operations=6), limit=st.integers(0, 200))
def test_the_set_that_fits_is_the_cheapest_of_all_that_fit(graph, limit):
    problem = stretch(graph, 0, len(graph.operations), rates=UNIT)
    best = min(s.recompute_seconds for s in all_sets(problem) if s.saved_bytes <= limit)
    found = fitting(problem, limit_bytes=limit)
    assert found.saved_bytes <= limit
    # without a byte nothing is saved, although values of no bytes could be
    assert found.recompute_seconds == pytest.approx(best, abs=1e-9) or limit == 0


def test_the_set_that_fits_may_lie_above_the_hull():
    b = Builder()
    x = b.input(10)
    values = [b.op("f", (x,), size, flops=flops, needs_output=True) for size, flops in ((10, 100), (4, 30), (4, 30))]
    problem = stretch(b.graph(*values), 0, 3, rates=UNIT)
    assert 8 * 4 not in [s.saved_bytes for s in menus.menu(problem)]  # both small ones are not on the hull
    found = fitting(problem, limit_bytes=9 * 4)
    assert (found.saved_bytes, found.values) == (8 * 4, tuple(values[1:]))


@settings(max_examples=100, deadline=None)
@given(graph=small_graphs(most_operations=6), data=st.data())
def test_a_part_of_the_program_sees_only_its_own_values(graph, data):
    start = data.draw(st.integers(0, len(graph.operations) - 1))
    stop = data.draw(st.integers(start + 1, len(graph.operations)))
    problem = stretch(graph, start, stop, rates=UNIT)
    inside = {v for op in graph.operations[start:stop] for v in op.outputs}
    for s in menus.menu(problem):
        assert inside.issuperset(s.values)
        assert all(start <= i < stop for i in problem.recomputed(s.values))
        assert not any(graph.values[v].dtype.startswith("key") for v in s.values)


def test_saved_values_stop_the_recomputation_above_them():
    b = Builder()
    x = b.input(10)
    a = b.op("f", (x,), 10, flops=100)
    c = b.op("g", (a,), 10, flops=200)
    d = b.op("h", (c,), 10, flops=400, needs_output=True)
    problem = stretch(b.graph(d), 0, 3, rates=UNIT)
    assert problem.recomputed(()) == (0, 1, 2)
    assert problem.recomputed({c}) == (2,)
    assert problem.recomputed({d}) == ()
    assert problem.save_set({a, d}).values == (d,)  # a is not read by anybody once d is saved


def test_a_small_value_above_a_needed_large_one_is_saved_although_no_derivative_reads_it():
    # softmax in miniature: the maximum is not needed by the backward pass but lies on the way to what is
    b = Builder()
    x = b.input(1000)
    top = b.op("reduce_max", (x,), 4, flops=1000)
    e = b.op("exp", (x, top), 1000, flops=1000, needs_output=True)
    found = menus.menu(stretch(b.graph(e), 0, 2, rates=UNIT))
    assert [s.values for s in found] == [(), (top,), (e,)]
    assert [s.saved_bytes for s in found] == [0, 16, 4000]


def test_menu_of_a_transformer_layer_starts_with_statistics_then_context():
    graph = transformer(1)
    named = lambda s: {graph.operations[graph.producer[v]].primitive for v in s.values}
    problem = stretch(graph, 1, len(graph.operations) - 2, rates=Rates({"float32": 100.0}, 1.0))
    found = menus.menu(problem)
    steps = [named(s) for s in found]
    statistics = {"reduce_max", "reduce_sum"}
    # softmax statistics, normalization statistics, attention context
    assert steps[:4] == [set(), statistics, statistics, statistics | {"dot_general"}]
    assert [s.saved_bytes for s in found[:4]] == [0, 2 * 160, 2 * 160 + 3 * 80, 2 * 160 + 3 * 80 + 4000]


@pytest.mark.parametrize("dtype", ["complex64", "key<fry>"])
def test_what_has_no_name_is_not_saved(dtype):
    b = Builder()
    x = b.input(10)
    y = b.op("f", (x,), 10, flops=100, needs_output=True, dtype=dtype)
    z = b.op("g", (y,), 20, flops=100, needed=(y,), needs_output=True)
    problem = stretch(b.graph(z), 0, 2, rates=UNIT)
    found = menus.menu(problem)
    assert found[-1].values == (z,)
    assert found[-1].recompute_seconds == problem.seconds[0] > 0  # y is needed and cannot be saved


def test_operations_with_effects_are_refused():
    b = Builder()
    y = b.op("io_callback", (b.input(1),), 1, barrier=True)
    with pytest.raises(ValueError, match="io_callback has effects"):
        stretch(b.graph(y), 0, 1, rates=UNIT)


def test_limit_keeps_both_ends_and_the_largest_improvement():
    graph = transformer(2)
    problem = stretch(graph, 0, len(graph.operations), rates=UNIT)
    full, few = menus.menu(problem), menus.menu(problem, limit=4)
    assert len(few) == 4 < len(full)
    assert (few[0], few[-1]) == (full[0], full[-1])
    assert set(few) <= set(full)


def test_two_thousand_operations_take_seconds():
    import time

    graph = transformer(100)
    assert len(graph.operations) > 2000
    start = time.process_time()
    found = menus.menu(stretch(graph, 0, len(graph.operations), rates=UNIT), limit=4)
    assert time.process_time() - start < 6  # four cuts, about 0.1 s each where this was written
    assert len(found) == 4
