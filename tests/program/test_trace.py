"""Tracing: a flattened program computes the same, and says where everything comes from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rematplan import workloads
from rematplan.program import evaluate
from rematplan.program.graph import Nesting, ValueKind
from rematplan.program.loss import traced_loss
from rematplan.program.residuals import with_residuals
from rematplan.program.trace import Traced, trace

SMALL = {
    "mlp": {"blocks": 3, "features": 8, "batch": 4},
    "gpt": {"blocks": 2, "features": 16, "heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "scan_gpt": {"blocks": 2, "features": 16, "heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
}


def named_graph(function, *shapes) -> Traced:
    leaves = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return with_residuals(trace(function, leaves, differentiated=range(len(leaves))))


@pytest.mark.parametrize("name", SMALL)
def test_the_flattened_program_computes_the_same(name: str) -> None:
    work = getattr(workloads, name)(**SMALL[name])
    leaves = work.inputs()
    expected = work.lift(scopes=True).pure(*leaves)
    found = evaluate.plain(traced_loss(work))(*leaves)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_nested_jit_is_inlined_and_loops_are_kept() -> None:
    work = workloads.scan_gpt(**SMALL["scan_gpt"])
    graph = traced_loss(work).graph
    primitives = {op.primitive for op in graph.operations}
    assert not primitives & {"jit", "pjit"}
    loops = [op for op in graph.operations if op.subprogram and op.subprogram.kind is Nesting.LOOP]
    assert [op.subprogram.length for op in loops if op.subprogram] == [2]
    body = loops[0].subprogram
    assert body is not None
    assert loops[0].flops == pytest.approx(2 * sum(op.flops for op in body.graph.operations))


def test_every_heavy_operation_knows_its_module_and_line() -> None:
    graph = traced_loss(workloads.gpt(**SMALL["gpt"])).graph
    heavy = [op for op in graph.operations if op.primitive == "dot_general"]
    assert len(heavy) == 2 * 6 + 1
    assert all("_gpt.py:" in op.location for op in heavy)
    assert {op.module for op in heavy} >= {"blocks/0/attn/qkv", "blocks/1/mlp/down", "embed"}


def test_the_fingerprint_is_of_structure_not_of_shapes() -> None:
    small, wide = SMALL["gpt"], {**SMALL["gpt"], "batch": 4, "features": 32}
    deep = {**SMALL["gpt"], "blocks": 3}
    prints = [traced_loss(workloads.gpt(**sizes)).graph.fingerprint for sizes in (small, wide, deep)]
    assert prints[0] == prints[1] != prints[2]


def test_dead_operations_are_gone_and_effects_stay() -> None:
    def function(x):
        jnp.exp(x)
        jax.debug.print("{x}", x=x.sum())
        return [(x * 2).sum()]

    graph = named_graph(function, (3,)).graph
    primitives = [op.primitive for op in graph.operations]
    assert "exp" not in primitives
    assert [op.barrier for op in graph.operations if "debug" in op.primitive] == [True]


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (jnp.exp, {"exp"}),
        (jnp.tanh, {"tanh"}),
        (jnp.sin, {"input"}),
        (lambda x: x + 1.0, set()),
        (lambda x: x * x, {"input"}),
    ],
)
def test_the_backward_pass_of_an_operation_reads_what_its_rule_reads(function, reads) -> None:
    traced = named_graph(lambda x: [function(x * 1.0).sum()], (3,))
    graph = traced.graph
    product = next(op for op in graph.operations if op.primitive == "mul")
    following = [op for op in graph.operations if product.outputs[0] in op.inputs]
    needed = {v for op in following for v in op.needed}
    names = {"input" if v == product.outputs[0] else graph.values[v].name for v in needed}
    assert names == reads


def test_a_value_behind_stop_gradient_is_not_needed() -> None:
    def function(x):
        return [(x * jax.lax.stop_gradient(jnp.exp(x))).sum()]

    graph = named_graph(function, (3,)).graph
    exp = next(op for op in graph.operations if op.primitive == "exp")
    assert exp.needed == ()


def test_repeated_operands_make_another_operation() -> None:
    square = named_graph(lambda x, y: [(x * x + y).sum()], (3,), (3,)).graph
    product = named_graph(lambda x, y: [(x * y + y).sum()], (3,), (3,)).graph
    assert square.operations[0].signature != product.operations[0].signature


def test_inputs_are_parameters_where_they_are_differentiated() -> None:
    graph = traced_loss(workloads.mlp(**SMALL["mlp"])).graph
    kinds = {graph.values[i].name: graph.values[i].kind for i in graph.inputs}
    assert kinds["layers/0/kernel"] is ValueKind.PARAMETER
    assert ValueKind.INPUT in kinds.values()


def test_the_fingerprint_is_the_same_each_time_with_many_different_regions() -> None:
    """Regions of an open jaxpr are wrapped anew for each equation: what tells them apart must outlive the wrapping."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(12):
            body = (lambda y: y + jnp.tanh(y @ w)) if i % 2 else (lambda y: y * jax.nn.sigmoid(y) @ w)
            x = jax.checkpoint(body)(x)
        return (x**2).sum()

    leaves = jnp.ones((8, 8)), jnp.ones((4, 8))
    kept, fingerprints = [], set()
    for round_ in range(20):
        kept.append([object() for _ in range(37 * round_)])  # memory is laid out differently each time
        fingerprints.add(trace(loss, leaves, differentiated=(0,)).graph.fingerprint)
    assert len(fingerprints) == 1
    regions = [op.subprogram for op in trace(loss, leaves, differentiated=(0,)).graph.operations if op.subprogram]
    bodies = [[op.primitive for op in region.graph.operations] for region in regions if region.kind is Nesting.REGION]
    assert len(bodies) == 12
    assert bodies[0::2] == [bodies[0]] * 6
    assert bodies[1::2] == [bodies[1]] * 6
    assert "tanh" in bodies[1]
    assert "tanh" not in bodies[0]
