"""Folding: cutting repetitions out of a program gives the program with fewer layers."""

from __future__ import annotations

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rematplan import workloads
from rematplan.apply import configured
from rematplan.planner.blocks import Granularity, blocks, runs
from rematplan.program import evaluate
from rematplan.program.configuration import Configuration, Region
from rematplan.program.fold import CannotFold, fold
from rematplan.program.loss import traced_loss
from rematplan.program.trace import trace
from rematplan.search.problem import fold_run


@functools.cache
def deep(blocks_count: int = 8):
    return traced_loss(workloads.mlp(blocks=blocks_count, features=4, batch=3))


def test_a_folded_program_is_the_shallower_one() -> None:
    traced = deep(8)
    chain = blocks(traced.graph, granularity=Granularity.COARSE)
    run = max(runs(chain), key=lambda r: r.count)
    folded = fold_run(traced, chain, run, 3)
    assert len(folded.traced.equations) < len(traced.equations)
    leaves = [jnp.full(traced.avals[i].shape, 0.1 * (i + 1)) for i in folded.inputs]
    found = evaluate.plain(folded.traced)(*leaves)
    # the layers that are left, applied in order
    names = [traced.graph.values[i].name for i in folded.inputs]
    by_name = dict(zip(names, leaves, strict=True))
    layers = sorted({int(n.split("/")[1]) for n in names if n.startswith("layers/")})
    assert layers == list(range(8 - (run.count - 3)))
    x = leaves[-1]
    for i in layers:
        x = jax.nn.relu(x @ by_name[f"layers/{i}/kernel"] + by_name[f"layers/{i}/bias"])
    assert found[0].shape == ()
    reference = evaluate.plain(traced)
    assert len(reference(*[jnp.ones(a.shape) for a in traced.avals[: len(traced.graph.inputs)]])) == 1
    shallow = deep(len(layers))
    again = [by_name[n] for n in names]
    np.testing.assert_allclose(found[0], evaluate.plain(shallow)(*again)[0], rtol=1e-6)


def test_a_configuration_folds_with_its_program() -> None:
    traced = deep(8)
    chain = blocks(traced.graph, granularity=Granularity.COARSE)
    run = max(runs(chain), key=lambda r: r.count)
    regions = tuple(Region(chain[i].start, chain[i].stop) for i in range(run.first, run.stop))
    folded = fold_run(traced, chain, run, 4)
    short = folded.configuration(Configuration(regions))
    assert len(short.regions) == 4
    leaves = [jnp.full(traced.avals[i].shape, 0.1) for i in folded.inputs]
    np.testing.assert_allclose(
        configured(folded.traced, short)(*leaves)[0], evaluate.plain(folded.traced)(*leaves)[0], rtol=1e-6
    )


@functools.cache
def chain_of(depth: int):
    traced = deep(depth)
    chain = blocks(traced.graph, granularity=Granularity.COARSE)
    return chain, max(runs(chain), key=lambda r: r.count)


def grouped(starts: list[int], first: int, size: int, inside: int) -> Configuration:
    """Regions of `size` blocks from the block `first` to the last one, each begun some operations late."""
    edges = [*starts[first:-1:size], starts[-1]]
    return Configuration(tuple(Region(a + inside, z + inside) for a, z in pairwise(edges)))


@pytest.mark.parametrize("inside", [0, 1], ids=["at blocks", "in blocks"])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", [15, 16, 17])
def test_regions_are_those_of_the_shallower_program_wherever_they_begin(depth, size, first, inside) -> None:
    traced = deep(depth)
    chain, run = chain_of(depth)
    starts = [block.start for block in chain]
    original = grouped(starts, first, size, inside)
    for repetitions in range(2 * size + 2, run.count):
        whole_periods = (run.count - repetitions) % size == 0
        folded = fold_run(traced, chain, run, repetitions)
        gone = starts[run.stop] - starts[run.first + repetitions]
        left = [*starts[: run.first + repetitions], *(start - gone for start in starts[run.stop :])]
        try:
            short = folded.configuration(original)
        except CannotFold:
            assert not whole_periods
            continue
        if whole_periods:
            assert short == grouped(left, first, size, inside)
        for region in short.regions:  # none is cut short, or longer than any
            assert region.stop - region.start in {r.stop - r.start for r in original.regions}


def operations(count: int):
    """A program of so many operations that are all alike."""

    def function(x):
        for _ in range(count):
            x = jnp.sin(x)
        return [x]

    return trace(function, [jax.ShapeDtypeStruct((), jnp.float32)], differentiated=(0,))


def cut(traced, dropped: tuple[int, int], begin: int):
    stands_for = {
        traced.graph.operations[dropped[1] - 1].outputs[0]: traced.graph.operations[dropped[0] - 1].outputs[0]
    }
    return fold(traced, dropped=dropped, begin=begin, stands_for=stands_for)


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ([(1, 7)], [(1, 3)]),  # around all repetitions
        ([(0, 10)], [(0, 6)]),
        ([(0, 1), (1, 2), (7, 9)], [(0, 1), (1, 2), (3, 5)]),  # beside what is cut out
        ([(0, 2), (2, 4), (4, 6), (6, 7)], [(0, 2), (2, 3)]),  # in it
        ([(1, 3), (3, 5), (5, 8)], [(1, 4)]),  # cut in the same place
        ([(1, 4), (5, 6)], [(1, 2)]),
        ([(1, 4)], None),
        ([(2, 6), (6, 7)], [(2, 3)]),
        ([(3, 7)], None),
        ([(1, 3), (4, 8)], None),
        ([(1, 5), (5, 7)], [(1, 3)]),
    ],
)
def test_a_region_that_is_cut_goes_on_as_its_copy_does_or_is_refused(regions, expected) -> None:
    folded = cut(operations(10), (2, 6), 1)
    original = Configuration(tuple(Region(a, z) for a, z in regions))
    if expected is None:
        with pytest.raises(CannotFold, match=r"a region (begins|ends) in what is cut out"):
            folded.configuration(original)
    else:
        assert [(r.start, r.stop) for r in folded.configuration(original).regions] == expected


def test_a_region_around_some_repetitions_is_not_one_around_fewer() -> None:
    around_six = Configuration((Region(1, 7),))
    with pytest.raises(CannotFold, match="begins in what is cut out"):
        cut(operations(10), (2, 6), 0).configuration(around_six)
    within = Configuration((Region(0, 8, inner=around_six.regions),))
    with pytest.raises(CannotFold, match="begins in what is cut out"):
        cut(operations(10), (2, 6), 0).configuration(within)


def test_regions_that_keep_different_things_are_no_copies() -> None:
    traced = operations(10)
    folded = cut(traced, (2, 6), 1)
    kept = lambda *indices: frozenset(traced.graph.operations[i].outputs[0] for i in indices)
    alike = Configuration((Region(1, 3, kept(1, 2)), Region(5, 8, kept(5, 7))))
    (region,) = folded.configuration(alike).regions
    short = folded.traced.graph
    assert {short.producer[v] for v in region.saved} == {1, 3}
    for other in (
        Region(5, 8, kept(7)),
        Region(5, 8, policy="dots_saveable"),
        Region(5, 8, kept(5), prevent_cse=False),
    ):
        with pytest.raises(CannotFold):
            folded.configuration(Configuration((alike.regions[0], other)))


def test_what_is_left_does_not_depend_on_the_depth() -> None:
    def text(depth: int) -> str:
        traced = deep(depth)
        chain = blocks(traced.graph, granularity=Granularity.COARSE)
        folded = fold_run(traced, chain, max(runs(chain), key=lambda r: r.count), 3).traced
        leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in folded.avals[: len(folded.graph.inputs)]]
        return jax.jit(evaluate.plain(folded)).lower(*leaves).as_text(debug_info=True)

    shorter, longer = (text(depth) for depth in (8, 13))  # from one source line
    assert shorter == longer


def test_a_value_read_later_is_refused_by_name() -> None:
    def function(x):
        y = jnp.sin(x)
        z = jnp.cos(y)
        return [(z + y).sum()]

    traced = trace(function, [jax.ShapeDtypeStruct((3,), jnp.float32)], differentiated=(0,))
    with pytest.raises(CannotFold, match="sin is read after"):
        fold(traced, dropped=(0, 1), stands_for={})


def test_a_replacement_of_another_shape_is_refused() -> None:
    traced = trace(lambda x: [jnp.sin(x).sum()], [jax.ShapeDtypeStruct((3,), jnp.float32)], differentiated=(0,))
    sine, total = traced.graph.operations[0].outputs[0], traced.graph.operations[1].outputs[0]
    with pytest.raises(CannotFold, match="changes shape"):
        fold(traced, dropped=(0, 1), stands_for={sine: total})
