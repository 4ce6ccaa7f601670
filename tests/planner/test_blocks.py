"""Blocks of synthetic programs whose structure is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings

from rematplan.planner.blocks import Granularity, Run, blocks, runs
from rematplan.planner.cuts import (
    boundary_depth,
    common_depth,
    crossing_bytes,
    cut_points,
    heavy_operations,
    side_values,
)
from rematplan.program.graph import Graph, Nesting, Subprogram
from tests.planner.graphs import Builder, mlp, small_graphs, transformer


def unet(levels: int, *, elements: int = 4096) -> Graph:
    """Two convolutions a level, a skip from each level down to its mirror image."""
    b = Builder()
    conv = lambda x, n, at: b.op("relu", (b.matmul(x, b.parameter(9), n, module=at),), n, flops=n, needs_output=True)
    x, skips = b.input(elements), []
    for i in range(levels):
        for k in range(2):
            x = conv(x, elements >> i, f"down/{i}/{k}")
        skips.append(x)
        x = b.op("reduce_window_max", (x,), elements >> (i + 1), flops=elements >> i, module=f"down/{i}")
    x = conv(x, elements >> levels, "middle")
    for i in reversed(range(levels)):
        up = b.op("repeat", (x,), elements >> i, module=f"up/{i}")
        x = b.op("concatenate", (up, skips.pop()), 2 * (elements >> i), module=f"up/{i}")
        for k in range(2):
            x = conv(x, elements >> i, f"up/{i}/{k}")
    return b.graph(b.op("reduce_sum", (x,), 1, flops=elements))


@settings(max_examples=100, deadline=None)
@given(graph=small_graphs(most_operations=12))
def test_blocks_cover_every_operation_once_and_their_wires_meet(graph):
    for granularity in Granularity:
        chain = blocks(graph, granularity=granularity)
        assert [i for b in chain for i in range(b.start, b.stop)] == list(range(len(graph.operations)))
        assert chain[0].live_in == () == chain[-1].live_out
        for left, right in itertools.pairwise(chain):
            assert left.live_out == right.live_in
            assert set(right.inputs) <= set(right.live_in)
        made = [v for b in chain for v in b.outputs]
        read = {v for b in chain for v in b.inputs}
        assert read <= set(made)


@settings(max_examples=50, deadline=None)
@given(graph=small_graphs(most_operations=12))
def test_crossing_bytes_are_what_liveness_says(graph):
    crossing = crossing_bytes(graph)
    for p in range(len(graph.operations)):
        live = {
            v
            for op in graph.operations[:p]
            for v in op.outputs
            if any(v in later.inputs for later in graph.operations[p:])
        }
        assert crossing[p] == sum(graph.values[v].bytes for v in live)


def test_mlp_has_one_block_a_layer_and_its_loss_stands_alone():
    chain = blocks(mlp(16))
    assert [b.stop - b.start for b in chain] == [3] * 16 + [2]
    assert [b.module for b in chain[:16]] == [f"layers/{i}" for i in range(16)]
    assert runs(chain) == (Run(1, 1, 15, (chain[1].key,)),)
    assert chain[0].key != chain[1].key  # the first layer reads the input, which is no intermediate


def test_transformer_layers_are_two_blocks_fine_and_one_coarse():
    graph = transformer(6)
    fine = blocks(graph)
    (run,) = runs(fine)
    assert (run.first, run.period, run.count) == (1, 2, 6)
    assert len(fine) == 1 + 12 + 1
    coarse = blocks(graph, granularity=Granularity.COARSE)
    assert [b.module for b in coarse[1:-1]] == [f"blocks/{i}" for i in range(6)]
    assert runs(coarse) == (Run(1, 1, 6, (coarse[1].key,)),)
    assert sum(b.flops for b in coarse) == sum(op.flops for op in graph.operations)


def test_the_mask_is_an_input_of_attention_blocks_only_and_hides_no_cut():
    graph = transformer(6)
    mask = next(op.outputs[0] for op in graph.operations if op.primitive == "tril")
    assert side_values(graph) == (mask,)
    fine = blocks(graph)
    assert [mask in b.inputs for b in fine] == [False] + [True, False] * 6 + [False]
    assert all(mask in b.live_in for b in fine[1:12])
    assert len(blocks(transformer(6, mask=False))) == len(fine)


def test_residual_cuts_carry_one_value():
    points = cut_points(transformer(4, mask=False))
    assert [len(p.live) for p in points] == [1] * len(points)
    assert {p.live_bytes for p in points} == {4000}


def test_unet_is_cut_although_skips_are_live_across_the_cuts():
    graph = unet(3)
    chain = blocks(graph)
    assert len(chain) >= 8
    skips = [op.inputs[1] for op in graph.operations if op.primitive == "concatenate"]
    # the two outer skips and the value in flight; the innermost skip stays inside a block
    deepest = max(chain, key=lambda b: len(b.live_in))
    assert len(deepest.live_in) == 3
    assert set(skips[1:]) < set(deepest.live_in)


def test_names_and_parameters_do_not_count_but_structure_does():
    def chain(**change):
        b = Builder()
        x = b.op("start", (b.parameter(100), b.input(100)), 100)
        x = b.op("next", (x,), 100)
        for i in range(2):
            h = b.matmul(x, b.parameter(64), 100, module=f"layer_{i}")
            x = b.op("scale", (h,), 100, flops=100, **(change if i else {}))
        return b.graph(b.matmul(x, b.parameter(64), 1))

    key = lambda graph: [b.key for b in blocks(graph)]
    same, other_operation, other_need = key(chain()), key(chain(signature="tanh")), key(chain(needs_output=True))
    assert same[1] == same[2]
    assert other_operation[1] != other_operation[2]
    assert other_need[1] != other_need[2]


def test_wiring_counts():
    def graph(swap):
        b = Builder()
        x, w = b.op("f", (b.input(8),), 8), b.op("g", (b.input(8),), 8)
        return b.graph(b.op("sub", (w, x) if swap else (x, w), 8))

    keys = lambda graph: [b.key for b in blocks(graph)]
    assert keys(graph(True)) != keys(graph(False))


def test_nested_programs_are_compared_by_their_structure():
    def graph(inner, length):
        b = Builder()
        y = b.op("scan", (b.input(8),), 8, flops=1e6, subprogram=Subprogram(Nesting.LOOP, inner, length=length))
        return b.graph(y)

    key = lambda *a: blocks(graph(*a))[0].key
    assert key(mlp(2), 4) == key(mlp(2), 4)
    assert len({key(mlp(2), 4), key(mlp(3), 4), key(mlp(2), 5)}) == 3


def test_a_block_with_effects_says_so():
    graph = mlp(4)
    operations = [replace(op, barrier=op.index == 4) for op in graph.operations]
    chain = blocks(replace(graph, operations=tuple(operations)))
    assert [b.barrier for b in chain] == [False, True, False, False, False]


def test_light_operations_make_no_block_of_their_own():
    b = Builder()
    x = b.input(1000)
    for _ in range(4):
        x = b.matmul(x, b.parameter(64), 1000)
        for _ in range(5):
            x = b.op("tanh", (x,), 1000, flops=1000)
    graph = b.graph(x)
    assert len(heavy_operations(graph)) == 4
    assert [c.stop - c.start for c in blocks(graph)] == [6] * 4
    b.matmul(x, b.parameter(64), 1, flops=2.0**40)
    assert len(blocks(b.graph(b.operations[-1].outputs[0]))) == 1 + (len(cut_points(b.graph())) > 0)


def test_a_program_without_products_is_cut_too():
    b = Builder()
    x = b.input(100)
    for _ in range(6):
        x = b.op("tanh", (x,), 100, flops=100)
    assert len(blocks(b.graph(x))) == 6


def test_empty_and_single_operation_programs():
    b = Builder()
    x = b.input(4)
    assert blocks(b.graph(x)) == ()
    (only,) = blocks(b.graph(b.op("f", (x,), 4)))
    assert (only.start, only.stop, only.inputs, only.arguments) == (0, 1, (), (x,))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("AAAA", [(0, 1, 4)]),
        ("XABABABY", [(1, 2, 3)]),
        ("AABAAB", [(0, 3, 2)]),
        ("ABC", []),
        ("XAAAYBBZ", [(1, 1, 3), (5, 1, 2)]),
    ],
)
def test_runs_of_keys(keys, expected):
    template = blocks(mlp(1))[0]
    chain = [replace(template, index=i, key=k, flops=1.0) for i, k in enumerate(keys)]
    assert [(r.first, r.period, r.count) for r in runs(chain)] == expected


def test_a_run_may_begin_later_where_the_module_boundary_is_shallower():
    template = blocks(mlp(1))[0]
    chain = [replace(template, index=i, key=k, flops=1.0) for i, k in enumerate("BABABAB")]
    (run,) = runs(chain, depths=[2, 1, 2, 1, 2, 1, 2])
    assert (run.first, run.period, run.count, run.keys) == (1, 2, 3, ("A", "B"))


def test_depth_of_module_paths():
    assert common_depth("net/0/up", "net/0/down") == 2
    assert common_depth("", "net") == 0
    assert boundary_depth("net/0", "net/0") == 3
    assert boundary_depth("", "") == 1


def test_the_last_layer_is_like_the_others_although_its_output_shrinks_before_the_head():
    def classifier(layers):
        b = Builder()
        x = b.input(1000)
        for i in range(layers):
            x = b.matmul(x, b.parameter(64), 1000, module=f"layers/{i}")
            x = b.op("relu", (x,), 1000, flops=1000, needs_output=True)
        x = b.op("reduce_sum", (x,), 10, flops=1000)  # far fewer bytes to cut at
        return b.graph(b.matmul(x, b.parameter(10), 10, module="head", flops=1e5))

    chain = blocks(classifier(5))
    assert [b.stop - b.start for b in chain] == [2, 2, 2, 2, 2, 1, 1]
    assert [(r.first, r.count) for r in runs(chain)] == [(1, 4)]


def test_an_embedding_is_cut_before_the_first_layer_and_not_at_its_indices():
    b = Builder()
    tokens = b.op("clip", (b.input(2),), 2)
    x = b.op("gather", (b.parameter(100), tokens), 1000)
    for i in range(3):
        h = b.op("norm", (x,), 1000, flops=1000, needs_output=True, module=f"layers/{i}")
        x = b.matmul(h, b.parameter(64), 1000, module=f"layers/{i}")
    chain = blocks(b.graph(x))
    assert [b.start for b in chain] == [0, 2, 4, 6]
    assert [(r.first, r.count) for r in runs(chain)] == [(1, 3)]


def test_preparing_inputs_is_part_of_the_first_block_unless_that_is_repeated():
    def graph(parameter, repeated):
        b = Builder()
        x = b.input(1000)
        x = b.op("cast", (b.op("add", (x, b.parameter(10)) if parameter else (x,), 1000),), 1000)
        x = b.op("tanh" if repeated else "relu", (b.matmul(x, b.parameter(64), 1000),), 1000)
        for _ in range(2):
            x = b.op("tanh", (b.matmul(x, b.parameter(64), 1000),), 1000)
        return b.graph(x)

    lengths = lambda *a: [b.stop - b.start for b in blocks(graph(*a))]
    assert lengths(False, False) == [4, 2, 2]
    assert lengths(True, False) == [2, 2, 2, 2]
    assert lengths(False, True) == [2, 2, 2, 2]


def test_the_carry_of_a_loop_counts_while_it_is_read():
    b = Builder()
    carry = b.input(1000)
    scale = b.op("reduce_sum", (carry,), 1, flops=1000)  # before the first product: no reason for a block
    h = b.op("mul", (carry, scale), 1000, flops=1000)
    h = b.matmul(h, b.parameter(64), 3000)
    c = b.matmul(h, b.parameter(64), 1000)
    x = b.op("add", (carry, b.matmul(c, b.parameter(64), 1000)), 1000, flops=1000)
    u = b.matmul(x, b.parameter(64), 4000)
    graph = b.graph(b.op("add", (x, b.matmul(u, b.parameter(64), 1000)), 1000, flops=1000))
    assert crossing_bytes(graph)[4] == 4000
    assert crossing_bytes(graph, transient_inputs={carry})[4] == 8000
    # beside the carry, only the position between both halves has a single value
    assert [b.start for b in blocks(graph, transient_inputs={carry})] == [0, 6]
    assert [b.start for b in blocks(graph)] != [0, 6]
