"""Schedules on general graphs: against brute force, against the chain solver, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.errors import InfeasibleBudget, InputError
from rematplan.planner import schedule, solve
from rematplan.planner.chain import Chain, Choice, Span
from rematplan.planner.schedule import ScheduleGraph, Status, parse, replay, windows
from rematplan.planner.schedule.candidates import between_checkpoints, everything, nearby, stages_of
from rematplan.planner.schedule.eviction import COST_WEIGHTS, evicting
from rematplan.planner.schedule.minimise import Deadline, minimise
from rematplan.planner.schedule.selection import formulate
from rematplan.planner.schedule.smallest import smallest
from tests.planner.brute_schedules import Rule, cheapest

# A value read at both ends of a row of others: the middle of the row is the peak, and values 0 and 1 may be dropped there.
ROW = ScheduleGraph(costs=(5, 1, 1, 1, 1), sizes=(4, 4, 4, 4, 1), reads=((), (0,), (1,), (2,), (0, 1, 3)))


@st.composite
def problems(draw: st.DrawFn, *, most_nodes: int = 12, most_values: int = 1) -> tuple[ScheduleGraph, int]:
    """A graph and a budget between what its largest step needs and the peak of its own order."""
    count = draw(st.integers(2, most_nodes))
    small = st.integers(0, 9)
    reads, makes, made = [], [], 0
    for _ in range(count):
        reads.append(tuple(sorted(draw(st.sets(st.integers(0, made - 1), max_size=3)) if made else ())))
        width = draw(st.integers(1, most_values))
        makes.append(tuple(range(made, made + width)))
        made += width
    graph = ScheduleGraph(
        costs=tuple(draw(small) for _ in range(count)),
        sizes=tuple(draw(small) for _ in range(made)),
        reads=tuple(reads),
        makes=tuple(makes),
        outputs=tuple(sorted(draw(st.sets(st.integers(0, made - 1), max_size=2)))),
        once=tuple(sorted(draw(st.sets(st.integers(0, count - 1), max_size=1)))),
    )
    least = max(graph.step_bytes(node) for node in range(count))
    most = replay(graph, range(count)).peak_bytes
    return graph, max(1, draw(st.integers(least, max(least, most))))


def cost_or_none(graph: ScheduleGraph, budget: int) -> float | None:
    try:
        found = schedule.solve(graph, budget_bytes=budget)
    except InfeasibleBudget as error:
        minimum = error.minimum_bytes
        found = None
    if found is None:
        assert minimum > budget
        return None
    replayed = replay(graph, found.order)
    assert replayed.peak_bytes == found.peak_bytes <= budget
    assert replayed.cost == found.cost == found.lower_bound
    assert found.status is Status.OPTIMAL
    return found.cost


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_same_cost_as_brute_force(problem):
    graph, budget = problem
    assert cost_or_none(graph, budget) == cheapest(graph, budget)


@settings(max_examples=40, deadline=None)
@given(problem=problems(most_nodes=6, most_values=3))
def test_same_cost_as_brute_force_with_several_values_a_node(problem):
    graph, budget = problem
    assert cost_or_none(graph, budget) == cheapest(graph, budget)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(problem=problems())
def test_same_cost_as_brute_force_often(problem):
    graph, budget = problem
    assert cost_or_none(graph, budget) == cheapest(graph, budget)


@settings(max_examples=60, deadline=None)
@given(problem=problems(most_nodes=9), data=st.data())
def test_bounds_from_checkpoints_hold_for_recomputation_in_any_order(problem, data):
    graph, budget = problem
    best = cheapest(graph, budget, Rule.ANY)
    checkpoints = sorted(data.draw(st.sets(st.integers(0, len(graph) - 1), min_size=1)))
    relaxed = formulate(graph, between_checkpoints(graph, checkpoints, cost_limit=math.inf), budget_bytes=budget)
    outcome = minimise(graph, relaxed, budget_bytes=budget, cutoff=math.inf, deadline=Deadline(60.0))
    if best is not None:
        assert outcome.finished
        assert outcome.lower_bound <= best + 1e-6


@settings(max_examples=40, deadline=None)
@given(problem=problems(), depth=st.integers(1, 2))
def test_nearby_selections_fit_and_are_never_below_the_optimum(problem, depth):
    graph, budget = problem
    program = formulate(
        graph, nearby(graph, budget_bytes=budget, depth=depth, cost_limit=math.inf), budget_bytes=budget
    )
    outcome = minimise(graph, program, budget_bytes=budget, cutoff=math.inf, deadline=Deadline(60.0))
    best = cheapest(graph, budget)
    assert outcome.finished
    if outcome.order is not None:
        replayed = replay(graph, outcome.order)
        assert best is not None
        assert replayed.peak_bytes <= budget
        assert replayed.cost >= best


@settings(max_examples=100, deadline=None)
@given(problem=problems(most_values=2), weight=st.sampled_from(COST_WEIGHTS))
def test_evicting_fits(problem, weight):
    graph, budget = problem
    order = evicting(graph, budget_bytes=budget, cost_weight=weight)
    if order is not None:
        assert replay(graph, order).peak_bytes <= budget
    if budget >= replay(graph, range(len(graph))).peak_bytes:
        assert order == list(range(len(graph)))


# ------------------------------------------------------------------------------------------------ against the chain solver


@st.composite
def blocks(draw: st.DrawFn) -> list[dict[str, int]]:
    small = st.integers(0, 9)
    keys = ("input", "inside", "weights", "cost")
    return [{key: draw(small) for key in keys} for _ in range(draw(st.integers(1, 5)))]


def as_chain(layers: list[dict[str, int]]) -> Chain:
    """Each block keeps its input and what is inside, or its input only and computes the inside again."""
    spans = []
    for i, layer in enumerate(layers):
        output = layers[i + 1]["input"] if i + 1 < len(layers) else 0
        forward = layer["input"] + layer["inside"] + output
        # the cotangents of its output and of its input are as large as these, and its gradients are made here
        backward = output + layer["input"] + layer["weights"]
        keeping = Choice("plain", layer["input"] + layer["inside"], forward, backward, 0.0)
        again = Choice("full", layer["input"], forward, backward + layer["inside"], float(layer["cost"]))
        spans.append(Span(i, i + 1, (keeping, again)))
    return Chain(len(layers), tuple(spans), gradient_bytes=tuple(layer["weights"] for layer in layers))


def as_graph(layers: list[dict[str, int]]) -> ScheduleGraph:
    """The same blocks as nodes: inside of a block, its output, and backwards cotangent and gradients of each block."""
    costs, sizes, reads, makes, once = [], [], [], [], []

    def node(cost: int, read: list[int], made: list[int]) -> list[int]:
        new = list(range(len(sizes), len(sizes) + len(made)))
        costs.append(cost)
        reads.append(tuple(sorted(read)))
        makes.append(tuple(new))
        sizes.extend(made)
        return new

    inputs, insides = [node(0, [], [layers[0]["input"]])[0]], []
    for i, layer in enumerate(layers):
        insides += node(layer["cost"], [inputs[i]], [layer["inside"]])
        inputs += node(0, [insides[i]], [layers[i + 1]["input"] if i + 1 < len(layers) else 0])
    cotangent, gradients = inputs[-1], []
    for i, layer in reversed(list(enumerate(layers))):
        cotangent, gradient = node(0, [inputs[i], insides[i], cotangent], [layer["input"], layer["weights"]])
        gradients.append(gradient)
    # only the insides may be computed again: the chain keeps the inputs of all blocks
    once = [n for n in range(len(costs)) if n not in insides]
    return ScheduleGraph(
        tuple(costs), tuple(sizes), tuple(reads), tuple(makes), outputs=tuple(sorted(gradients)), once=tuple(once)
    )


@settings(max_examples=100, deadline=None)
@given(layers=blocks(), budget=st.integers(1, 150))
def test_same_extra_cost_as_the_chain_solver(layers, budget):
    chain, graph = as_chain(layers), as_graph(layers)
    try:
        expected = solve.solve(chain, budget_bytes=budget).seconds
    except InfeasibleBudget:
        expected = None
    found = cost_or_none(graph, budget)
    assert (None if found is None else found - graph.total_cost) == expected


# ---------------------------------------------------------------------------------------------------------------- by hand


def test_drops_the_value_that_is_cheap_to_bring_back():
    found = schedule.solve(ROW, budget_bytes=13)  # its own order has 16: values 0, 1, 2 and 3 while 3 is computed
    assert found.order == (0, 1, 2, 3, 1, 4)
    assert (found.cost, found.extra_cost, found.peak_bytes, found.lower_bound) == (10, 1, 13, 10)


def test_own_order_where_it_fits():
    found = schedule.solve(ROW, budget_bytes=16)
    assert found.order == (0, 1, 2, 3, 4)
    assert found.optimal


def test_outputs_may_be_computed_again_after_the_last_node():
    graph = ScheduleGraph(costs=(1, 1, 1), sizes=(5, 5, 3), reads=((), (), (1,)), outputs=(0, 2))
    found = schedule.solve(graph, budget_bytes=10)
    assert found.order == (0, 1, 2, 0)
    assert found.peak_bytes == 8  # value 0 dies at once and is made again at the end


def test_what_must_not_be_computed_again_is_kept():
    graph = ScheduleGraph(ROW.costs, ROW.sizes, ROW.reads, once=(1,))
    assert schedule.solve(graph, budget_bytes=13).order == (0, 1, 2, 3, 0, 4)


def test_budget_below_one_step_names_it():
    with pytest.raises(InfeasibleBudget, match="what node 4 reads and makes is 13 bytes") as caught:
        schedule.solve(ROW, budget_bytes=12)
    assert caught.value.minimum_bytes == 13
    assert caught.value.parts == {"what node 4 makes": 1, "what it reads": 12}


def test_infeasible_though_every_step_fits_is_proven():
    # values 0 and 2 are outputs: both are live with value 1 or 3 at some step, in whatever order they are brought back
    graph = ScheduleGraph((1, 1, 1), (6, 3, 4), ((), (0,), (1,)), outputs=(0, 2))
    with pytest.raises(InfeasibleBudget, match="every selection of steps was ruled out") as caught:
        schedule.solve(graph, budget_bytes=9)
    assert caught.value.minimum_bytes == 10
    assert schedule.solve(graph, budget_bytes=10).order == (0, 1, 2, 0)


def test_the_smallest_peak_is_found_where_the_rule_fails():
    rng = np.random.default_rng(3)
    reads = tuple(tuple(sorted({int(v) for v in rng.integers(0, n, 3)})) if n else () for n in range(10))
    graph = ScheduleGraph((1,) * 10, tuple(rng.integers(1, 9, 10).tolist()), reads)
    least = max(graph.step_bytes(node) for node in range(10))
    order = smallest(graph, least_bytes=least, deadline=Deadline(30.0), seed=0)
    peak = replay(graph, order).peak_bytes
    assert cheapest(graph, peak) is not None
    assert cheapest(graph, peak - 1) is None


def test_windows_cover_every_stage_then_grow(monkeypatch):
    monkeypatch.setattr(windows, "FIRST_WIDTH", 20)
    half = 40  # a chain there and back: node n of the way back reads what its mirror image made
    reads = tuple(
        tuple(sorted({n - 1, 2 * half - 1 - n} if n >= half else {n - 1})) if n else () for n in range(2 * half)
    )
    graph = ScheduleGraph((1,) * 2 * half, (1,) * 2 * half, reads)
    order = evicting(graph, budget_bytes=half // 2, cost_weight=1.0)
    assert order is not None
    near = nearby(graph, budget_bytes=half // 2, depth=2, cost_limit=math.inf, order=order)
    known, wanted = stages_of(graph, order), stages_of(graph, near.nodes.tolist())
    neighbourhoods = windows.Windows(graph, budget_bytes=half // 2, seed=0)
    sizes: list[int] = []
    covered = [set(again) for again in known]
    while (candidates := neighbourhoods.next(order, cost_limit=math.inf)) is not None:
        offered = stages_of(graph, candidates.nodes.tolist())
        assert all(a <= b for a, b in zip(known, offered, strict=True))
        if not sizes or len(candidates) < len(near):
            covered = [a | b for a, b in zip(covered, offered, strict=True)]
        sizes.append(len(candidates))
    assert covered == wanted
    assert sizes[0] < len(near)
    assert sizes[-1] == len(near)


def test_without_time_the_first_schedule_is_returned_with_a_bound():
    found = schedule.solve(ROW, budget_bytes=13, time_limit_seconds=0.0)
    assert found.peak_bytes <= 13
    assert ROW.total_cost <= found.lower_bound <= found.cost


def test_the_same_twice():
    rng = np.random.default_rng(0)
    reads = tuple(tuple(sorted({int(v) for v in rng.integers(0, n, 3)})) if n else () for n in range(20))
    graph = ScheduleGraph(tuple(rng.integers(1, 9, 20).tolist()), tuple(rng.integers(1, 9, 20).tolist()), reads)
    budget = int(0.8 * replay(graph, range(20)).peak_bytes)
    one, two = (schedule.solve(graph, budget_bytes=budget) for _ in range(2))
    assert one == two
    assert one.extra_cost > 0


def test_costs_may_be_fractions():
    graph = ScheduleGraph(tuple(c / 10 for c in ROW.costs), ROW.sizes, ROW.reads)
    found = schedule.solve(graph, budget_bytes=13)
    assert found.optimal
    assert found.extra_cost == pytest.approx(0.1)


# ------------------------------------------------------------------------------------------------------------ the referee


def test_referee_counts_inputs_values_and_what_is_kept():
    replayed = replay(ROW, (0, 1, 2, 3, 1, 4))
    # value 0 is kept throughout; value 1 is dropped after node 2 and made again
    assert replayed.step_bytes == (4, 8, 12, 12, 12, 13)
    assert (replayed.peak_step, replayed.peak_values) == (5, (0, 1, 3, 4))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 1, 2, 3), "node 4 is never computed"),
        ((0, 2, 1, 3, 4), "computes node 2, and 1 of 5 were known"),
        ((0, 1, 2, 3, 4, 5), "node 5"),
    ],
)
def test_referee_refuses(order, message):
    with pytest.raises(ValueError, match=message):
        replay(ROW, order)


def test_referee_refuses_what_must_not_be_computed_again():
    with pytest.raises(ValueError, match="computes node 1 again"):
        replay(ScheduleGraph(ROW.costs, ROW.sizes, ROW.reads, once=(1,)), (0, 1, 2, 3, 1, 4))


# ------------------------------------------------------------------------------------------------------------------ input


def test_parsed_json():
    nodes = [{"cost": c, "bytes": b} for c, b in zip(ROW.costs, ROW.sizes, strict=True)]
    edges = [[0, 1], [1, 2], [2, 3], [0, 4], [1, 4], [3, 4], [3, 4]]
    assert parse({"nodes": nodes, "edges": edges}) == ROW
    assert schedule.solve({"nodes": nodes, "edges": edges}, budget_bytes=13).cost == 10


@pytest.mark.parametrize(
    "data",
    [
        {"nodes": [{"cost": 1, "bytes": 1}]},
        {"nodes": [{"cost": 1}], "edges": []},
        {"nodes": [{"cost": 1, "bytes": 1}] * 2, "edges": [[1, 0]]},
        {"nodes": [{"cost": 1, "bytes": 1}] * 2, "edges": [[0, 2]]},
        {"nodes": [{"cost": -1, "bytes": 1}], "edges": []},
        {"nodes": [{"cost": math.nan, "bytes": 1}], "edges": []},
        {"nodes": [{"cost": 1, "bytes": -1}], "edges": []},
        {"nodes": [{"cost": 1, "bytes": 1}], "edges": [], "outputs": [1]},
    ],
)
def test_what_is_no_graph_is_refused(data):
    with pytest.raises(InputError):
        schedule.solve(data, budget_bytes=10)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_what_the_solver_lets_through_by_rounding_is_not_returned(spare):
    # where node 3 is computed, values 1 and 2 are a few bytes of 20 GB too much: within the solver's tolerance
    large = 10_000_000_000
    graph = ScheduleGraph(
        costs=(1, 1, 1, 1, 1, 1), sizes=(large, 2, 1, large, 1, 1), reads=((), (), (), (0,), (3,), (1, 2, 4))
    )
    budget = 2 * large + spare
    program = formulate(graph, everything(graph, cost_limit=math.inf), budget_bytes=budget)
    outcome = minimise(graph, program, budget_bytes=budget, cutoff=math.inf, deadline=Deadline(60.0))
    assert outcome.order is not None
    assert replay(graph, outcome.order).peak_bytes <= budget
    assert outcome.lower_bound <= cheapest(graph, budget)
    found = schedule.solve(graph, budget_bytes=budget)
    assert found.peak_bytes <= budget
    assert found.cost == cheapest(graph, budget)
