"""Prices of single operations; they only have to rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rematplan.planner.price import LEAST_SECONDS, Rates, operation_seconds
from rematplan.program.graph import Nesting, Subprogram
from tests.planner.graphs import Builder, mlp

RATES = Rates({"float32": 1000.0, "bfloat16": 4000.0}, bytes_per_second=100.0)


def seconds(primitive, elements_in, elements_out, **options):
    dtype = options.pop("operand", "float32")
    b = Builder()
    x = b.value(elements_in, dtype=dtype)
    b.op(primitive, (x,), elements_out, **options)
    return operation_seconds(b.graph(), b.operations[0], RATES)


def test_products_are_bound_by_arithmetic_or_by_memory():
    assert seconds("dot_general", 10, 10, flops=1e6) == 1000.0
    assert seconds("dot_general", 10, 10, flops=1e6, operand="bfloat16") == 250.0
    assert seconds("dot_general", 1000, 1000, flops=16e3) == (4000 + 4000) / 100


def test_elementwise_work_is_cheaper_than_its_memory_traffic_and_moves_are_nearly_free():
    elementwise, move = seconds("exp", 1000, 1000, flops=1000), seconds("reshape", 1000, 1000)
    assert elementwise == 1.0 < 8000 / 100
    assert move == pytest.approx(elementwise / 100)


def test_reductions_cost_half_of_reading_their_input():
    assert seconds("reduce_max", 1000, 1, flops=1000) == 0.5 * 4000 / 100


def test_gathers_do_not_pay_for_the_whole_table():
    assert seconds("gather", 10**6, 10) == (40 + 40) / 100


def test_loops_are_priced_by_all_their_work():
    sub = Subprogram(Nesting.LOOP, mlp(1), length=4)
    assert seconds("scan", 10, 10, flops=1e5, subprogram=sub) == 100.0


def test_collectives_pay_for_traffic_and_nothing_is_free():
    b = Builder()
    x = b.input(100)
    b.op("psum", (x,), 100)
    b.op("token", (), 0)
    graph = b.graph()
    assert operation_seconds(graph, replace(b.operations[0], collective=True), RATES) == 800 / 100
    assert operation_seconds(graph, b.operations[1], RATES) == LEAST_SECONDS


def test_unknown_dtypes_run_at_the_slowest_rate_unless_told():
    assert RATES.flops("int8") == 1000.0
    assert Rates({"float32": 1.0}, 1.0, default_flops_per_second=7.0).flops("int8") == 7.0
