"""What becomes of values: the decisions that regions mean, held against what JAX really keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import _inspect
from rematplan._model import describe_model
from rematplan.planner.baselines import baselines
from rematplan.program import saving
from rematplan.program.configuration import PLAIN, Configuration, LoopPart, LoopPlan, Region
from rematplan.program.decisions import Decision, decisions, operation_at
from rematplan.program.loss import traced_loss
from rematplan.program.saved import Origin
from rematplan.workloads import gpt, mlp, scan_gpt

SMALL_GPT = {"blocks": 2, "features": 32, "heads": 2, "length": 16, "batch": 2, "vocabulary": 64}


def by_decision(fates, decision):
    """Values with this decision, and how many instances of each have it."""
    counts = {key: sum(f.count for f in each if f.decision is decision) for key, each in fates.items()}
    return {key: count for key, count in counts.items() if count}


def kept_by_jax(traced, configuration):
    """Names of the values of the function itself that the backward pass holds, and all that it holds in bytes."""
    found = [s for s in _inspect.residuals_of(traced, configuration) if s.origin is Origin.COMPUTED]
    named = {r.name for r in (_inspect._residual(traced, s) for s in found) if r.name}
    return named, sum(s.bytes for s in found)


def kept_by_decisions(traced, configuration):
    fates = decisions(traced.graph, saving.by_name(traced, configuration))
    values = [
        operation_at(traced.graph, place, value)[0].values[value] for place, value in by_decision(fates, Decision.SAVED)
    ]
    return {v.name for v in values}, sum(v.bytes for v in values)


@pytest.mark.parametrize("work", [mlp(blocks=4, features=16, batch=8), gpt(**SMALL_GPT)], ids=["mlp", "gpt"])
@pytest.mark.parametrize("name", ["plain", "whole", "per-block", "all-but-last", "dots", "dots_with_no_batch_dims"])
def test_what_jax_keeps_is_said_to_be_saved(work, name):
    traced = traced_loss(work)
    configuration = {b.name: b.configuration for b in baselines(traced.graph)}[name]
    (said, bytes_said), (done, bytes_done) = (kept(traced, configuration) for kept in (kept_by_decisions, kept_by_jax))
    assert done <= said
    if work.name == "gpt":
        assert done or name == "whole"
    # The rest has no name in JAX's program: a rule keeps twice the value, or where it is positive, in the value's place,
    # and at times beside it.
    assert 0.8 * bytes_done < bytes_said < 1.01 * bytes_done


def test_a_value_that_another_region_reads_is_kept_whatever_its_own_region_says():
    traced = traced_loss(mlp(blocks=2, features=16, batch=8))
    operations = traced.graph.operations
    middle = next(op.index for op in operations if op.module == "layers/1")
    split = Configuration((Region(0, middle), Region(middle, len(operations) - 1)))
    kept = by_decision(decisions(traced.graph, split), Decision.SAVED)
    crossing = {v for op in operations[middle:] for v in op.inputs if 0 <= traced.graph.producer[v] < middle}
    assert {value for _, value in kept} >= crossing
    whole = Configuration((Region(0, len(operations) - 1),))
    assert not crossing & {value for _, value in by_decision(decisions(traced.graph, whole), Decision.SAVED)}


def test_what_an_inner_region_saves_is_not_kept():
    traced = traced_loss(gpt(**SMALL_GPT))
    count = len(traced.graph.operations) - 1
    saved = next(op.outputs[0] for op in traced.graph.operations if op.primitive == "exp")
    alone = Configuration((Region(0, count, saved=frozenset({saved})),))
    inner = Region(0, traced.graph.producer[saved] + 1, saved=frozenset({saved}))
    nested = Configuration((Region(0, count, inner=(inner,)),))
    assert decisions(traced.graph, alone)[(), saved][0].decision is Decision.SAVED
    assert decisions(traced.graph, nested)[(), saved][0].decision is Decision.RECOMPUTED


def scan_body():
    traced = traced_loss(scan_gpt(**SMALL_GPT | {"blocks": 8}))
    loop = max((op for op in traced.graph.operations if op.subprogram), key=lambda op: op.flops)
    return traced, loop.index, traced.bodies[loop.index].graph


def test_iterations_of_a_loop_are_counted():
    traced, loop, body = scan_body()
    plain = decisions(traced.graph, PLAIN)
    inside = {key: fates for key, fates in plain.items() if key[0]}
    assert inside
    assert {sum(f.count for f in fates) for fates in inside.values()} == {8}
    product = next(v for _, v in sorted(inside) if body.operations[body.producer[v]].primitive == "exp")
    whole = Region(0, len(body.operations), saved=frozenset({product}), offloaded=frozenset({product}))
    parts = LoopPlan((LoopPart(Configuration((whole,)), iterations=3), LoopPart(PLAIN, chunk=2)))
    mixed = decisions(traced.graph, Configuration(loops=((loop, parts),)))
    fates = mixed[(loop,), product]
    assert [(f.decision, f.iterations) for f in fates] == [
        (Decision.OFFLOADED, (range(3),)),
        (Decision.RECOMPUTED, (range(3, 7),)),  # two chunks of two
        (Decision.SAVED, (range(7, 8),)),
    ]


def test_a_loop_in_a_region_keeps_nothing_inside():
    traced, loop, _ = scan_body()
    around = Configuration((Region(loop, loop + 1),))
    inside = [f for (place, _), fates in decisions(traced.graph, around).items() if place for f in fates]
    assert inside
    assert {f.decision for f in inside} == {Decision.RECOMPUTED}


def test_the_model_folds_repeated_blocks_and_says_which_are_treated_otherwise():
    traced = traced_loss(gpt(**SMALL_GPT | {"blocks": 4}))
    by_name = {b.name: b.configuration for b in baselines(traced.graph)}
    model = describe_model(traced, {name: by_name[name] for name in ("plain", "per-block", "all-but-last")})
    modules = {m.module: m for m in model.modules}
    assert modules["blocks/*"].count == modules["blocks/*/attn"].count == 4
    assert sum(m.parameters for m in model.modules) == sum(
        v.bytes // 4 for v in (traced.graph.values[i] for i in traced.graph.inputs) if v.kind.value == "parameter"
    )
    position = next(n for n, v in enumerate(model.values) if v.module == "blocks/*/attn" and v.operation == "exp")
    assert model.values[position].count == 4
    plain, block, partly = (model.decisions[n][position] for n in ("plain", "per-block", "all-but-last"))
    assert (plain.saved, plain.recomputed, plain.where) == (4, 0, "")
    assert (block.saved, block.recomputed, block.where) == (0, 4, "")
    assert (partly.saved, partly.recomputed, partly.where) == (1, 3, "saved: 3; recomputed: 0-2")


def test_the_model_of_a_scan_counts_iterations():
    traced, loop, body = scan_body()
    product = next(op for op in body.operations if op.primitive == "dot_general")
    region = Region(0, len(body.operations), saved=frozenset(product.outputs))
    parts = LoopPlan((LoopPart(Configuration((region,)), iterations=6), LoopPart(PLAIN)))
    model = describe_model(traced, {"plan": Configuration(loops=((loop, parts),))})
    counts = {v.count for v, d in zip(model.values, model.decisions["plan"], strict=True) if d.recomputed}
    assert counts == {8}
    split = [d for d in model.decisions["plan"] if d.where]
    assert any(d.where == "saved: 6-7; recomputed: 0-5" for d in split)


def test_which_layers_in_which_iterations_are_treated_otherwise():
    def loss(w, x):
        def body(h, row):
            for scope in ("~blocks/0~", "~blocks/1~"):
                with jax.named_scope(scope):
                    h = jnp.exp(h @ row)
            return h, None

        return jax.lax.scan(body, x, w)[0].sum()

    traced = traced_loss(rp.Workload(loss, jnp.ones((8, 4, 4)), jnp.ones((2, 4))))
    loop = next(op for op in traced.graph.operations if op.subprogram)
    body = loop.subprogram.graph
    first = next(op.outputs[0] for op in body.operations if op.primitive == "exp")
    region = Configuration((Region(0, len(body.operations), saved=frozenset({first})),))
    parts = LoopPlan((LoopPart(region, iterations=6), LoopPart(PLAIN)))
    model = describe_model(traced, {"plan": Configuration(loops=((loop.index, parts),))})
    value = next(n for n, v in enumerate(model.values) if v.operation == "exp")
    assert model.values[value].count == 16
    decided = model.decisions["plan"][value]
    assert (decided.saved, decided.recomputed) == (6 + 2 + 2, 6)
    assert decided.where == "saved: 0-5 of 0, 6-7 of 0-1; recomputed: 0-5 of 1"


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"])
def test_what_a_policy_saves_in_the_loop_inside_of_its_region_is_said_to_be_saved(policy):
    traced, _, body = scan_body()
    configuration = Configuration((Region(0, len(traced.graph.operations) - 1, policy=policy),))
    fates = decisions(traced.graph, saving.by_name(traced, configuration), saving.inside_loops(traced, configuration))
    kept = {key: count for key, count in by_decision(fates, Decision.SAVED).items() if key[0]}
    said = {body.values[value].name: count * body.values[value].bytes for (_, value), count in kept.items()}
    residuals = (_inspect._residual(traced, s) for s in _inspect.residuals_of(traced, configuration))
    done = {r.name: r.bytes for r in residuals if r.operation == "dot_general" and r.shape[:1] == (8,)}
    # JAX stacks a product that nothing reads, too: what a gradient has no use for is in no fate
    unread = {name for name in done if name.startswith("blocks/mlp/down/")}
    assert len(unread) == bool(done)
    assert said == {name: size for name, size in done.items() if name not in unread}
    assert bool(said) == (policy != "nothing_saveable")
