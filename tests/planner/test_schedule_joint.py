"""Schedules of traced programs: the joint forward and backward pass of a small network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rematplan.planner import schedule
from rematplan.planner.price import Rates, operation_seconds
from rematplan.planner.schedule import ScheduleGraph
from rematplan.program.trace import trace
from tests.planner.graphs import Builder

LAYERS, FEATURES, BATCH = 6, 8, 64


def joint_graph():
    def loss(*leaves):
        *weights, x = leaves
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    def step(*leaves):
        value, gradients = jax.value_and_grad(loss, argnums=tuple(range(LAYERS)))(*leaves)
        return [value, *gradients]

    shapes = [jax.ShapeDtypeStruct((FEATURES, FEATURES), jnp.float32)] * LAYERS
    return trace(step, [*shapes, jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32)], differentiated=()).graph


def test_joint_graph_of_a_network():
    program = joint_graph()
    graph = schedule.from_program(program)
    assert len(graph) == len(program.operations)
    assert graph.total_cost == sum(op.flops for op in program.operations)
    assert len(graph.outputs) == 1 + LAYERS
    own = schedule.replay(graph, range(len(graph)))
    budget = own.peak_bytes // 2
    found = schedule.solve(graph, budget_bytes=budget)
    assert found.optimal
    assert schedule.replay(graph, found.order).peak_bytes <= budget
    # bringing back activations costs a few products of the forward pass, never all of them
    product = 2.0 * BATCH * FEATURES * FEATURES
    assert product <= found.extra_cost < LAYERS * product


def test_costs_can_be_seconds():
    program = joint_graph()
    # a chip so fast that all costs are far below the absolute tolerances of a solver
    fast = Rates({"float32": 1e15}, bytes_per_second=1e14)
    graph = schedule.from_program(program, cost=lambda op: operation_seconds(program, op, fast))
    assert graph.total_cost < 1e-6
    peak_bytes = schedule.replay(graph, range(len(graph))).peak_bytes
    assert schedule.solve(graph, budget_bytes=peak_bytes).extra_cost == 0
    found = schedule.solve(graph, budget_bytes=peak_bytes // 2)
    assert found.optimal
    million = ScheduleGraph(tuple(1e6 * c for c in graph.costs), graph.sizes, graph.reads, graph.makes, graph.outputs)
    assert schedule.solve(million, budget_bytes=peak_bytes // 2).cost == pytest.approx(1e6 * found.cost, rel=1e-9)


def test_arguments_are_free_and_effects_happen_once():
    b = Builder()
    x = b.input(100)
    both = b.op("split", (x,), (4, 3), flops=1.0)
    printed = b.op("debug_callback", (both,), 1, barrier=True)
    y = b.op("add", (x, both + 1, printed), 2, flops=2.0)
    graph = schedule.from_program(b.graph(y))
    assert graph.sizes == (16, 12, 4, 8)  # float32; the input is not there
    assert graph.makes == ((0, 1), (2,), (3,))
    assert graph.reads == ((), (0,), (1, 2))
    assert graph.outputs == (3,)
    assert graph.once == (1,)
    assert schedule.replay(graph, (0, 1, 2)).step_bytes == (28, 32, 24)


def test_sharing_of_several_values():
    # two values of one node, dropped one by one: value 0 right after node 1, value 1 made again at the end
    graph = ScheduleGraph(
        costs=(1, 1, 1, 1), sizes=(4, 4, 1, 9, 1), reads=((), (0,), (2,), (1, 3)), makes=((0, 1), (2,), (3,), (4,))
    )
    assert schedule.replay(graph, (0, 1, 2, 3)).step_bytes == (8, 9, 14, 14)
    with pytest.raises(Exception, match="no schedule fits 13 bytes"):
        schedule.solve(graph, budget_bytes=13)
    assert schedule.solve(graph, budget_bytes=14).order == (0, 1, 2, 3)
