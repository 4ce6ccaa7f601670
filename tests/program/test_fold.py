"""Folding: cutting repetitions out of a program gives the program with fewer layers."""

from __future__ import annotations

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
        fold(traced, dropped=[(0, 1)], stands_for={})


def test_a_replacement_of_another_shape_is_refused() -> None:
    traced = trace(lambda x: [jnp.sin(x).sum()], [jax.ShapeDtypeStruct((3,), jnp.float32)], differentiated=(0,))
    sine, total = traced.graph.operations[0].outputs[0], traced.graph.operations[1].outputs[0]
    with pytest.raises(CannotFold, match="changes shape"):
        fold(traced, dropped=[(0, 1)], stands_for={sine: total})
