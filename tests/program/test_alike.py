"""Equal regions run one code; regions that differ in anything do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan import _jax_private, apply, policies, workloads
from rematplan.naming import describe
from rematplan.program.alike import common_module, shared
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss
from rematplan.program.residuals import with_residuals
from rematplan.program.trace import region_body, trace
from rematplan.scopes import module_path, module_scope
from tests.verify import programs


def regions_of(closed) -> list:
    return [eqn for eqn in closed.jaxpr.eqns if region_body(eqn) is not None]


def made(traced, configuration):
    shapes = [jax.ShapeDtypeStruct(traced.avals[i].shape, traced.avals[i].dtype) for i in traced.graph.inputs]
    return jax.make_jaxpr(apply.configured(traced, configuration))(*shapes)


def test_equal_blocks_are_one_program_and_keep_their_own_paths() -> None:
    traced = traced_loss(workloads.gpt(blocks=4, features=16, heads=2, length=8, batch=2, vocabulary=32))
    configuration = policies.by_name(traced.graph, "per-block").configuration
    eqns = regions_of(made(traced, configuration))
    assert len(eqns) == 4
    assert len({id(region_body(eqn)) for eqn in eqns}) == 1
    assert [module_path(str(eqn.source_info.name_stack)) for eqn in eqns] == [f"blocks/{i}" for i in range(4)]
    body = region_body(eqns[0])
    inside = {
        module_path(f"{eqns[2].source_info.name_stack}/{eqn.source_info.name_stack}")
        for eqn in getattr(body, "jaxpr", body).eqns
    }
    expected = {op.module for r in configuration.regions[2:3] for op in traced.graph.operations[r.start : r.stop]}
    assert inside == expected


def test_a_region_that_reads_from_outside_what_another_one_makes_is_another_program() -> None:
    def apart(a, c):
        return [jnp.sin(a), jnp.cos(c)]

    def chained(b, _):
        made = jnp.sin(b)
        return [made, jnp.cos(made)]

    given = [jnp.full(3, 0.1 * i) for i in range(1, 4)]
    for first, second in ((apart, chained), (chained, apart)):
        f = lambda a, b, c, first=first, second=second: [*first(a, c), *second(b, c)]
        traced = with_residuals(trace(f, given, differentiated=[0, 1, 2]))
        configuration = Configuration((Region(0, 2), Region(2, 4)))
        assert all(each.alone for each in shared(traced, configuration).values())
        for got, wanted in zip(apply.configured(traced, configuration)(*given), f(*given), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_saved_names_of_shared_code_are_relative_and_really_kept() -> None:
    work = workloads.gpt(blocks=3, features=16, heads=2, length=8, batch=2, vocabulary=32)
    traced = traced_loss(work)
    per_block = policies.by_name(traced.graph, "per-block").configuration
    regions = tuple(
        Region(
            r.start,
            r.stop,
            frozenset(
                o for op in traced.graph.operations[r.start : r.stop] if op.primitive == "exp" for o in op.outputs
            ),
        )
        for r in per_block.regions
    )
    eqns = regions_of(made(traced, Configuration(regions)))
    assert len({id(region_body(eqn)) for eqn in eqns}) == 1
    body = region_body(eqns[0])
    names = {_jax_private.given_name(eqn) for eqn in getattr(body, "jaxpr", body).eqns} - {""}
    assert names == {"attn/exp"}
    assert all(r.saved for r in regions)
    plan_regions, loops = describe(Configuration(regions), traced.graph, {})
    checked = rp.verify(work, plan=rp.Plan(regions=plan_regions, loops=loops, fingerprint=traced.graph.fingerprint))
    assert checked.passed and checked.saved_as_planned, checked.differences


@programs.NESTED
def test_a_region_around_others_keeps_only_its_own_values_whatever_theirs_are_called_inside() -> None:
    def loss(x, *weights):
        first, *rest = weights
        h = jnp.sin(x @ first)  # called as the products inside of the blocks are called there
        for i, w in enumerate(rest):
            with jax.named_scope(module_scope(f"blocks/{i}")):
                h = jnp.sin(jnp.cos(h @ w))
        return [h.sum()]

    given = [jnp.full((2, 4), 0.3), *[jnp.full((4, 4), 0.1)] * 5]
    traced = with_residuals(trace(loss, given, differentiated=range(6)))
    graph = traced.graph
    dots = [op for op in graph.operations if op.primitive == "dot_general"]
    ends = [op.index for op in dots[2:]] + [len(graph.operations) - 1]
    assert dots[0].name == "dot_general"

    def residuals(outer: bool, inner: bool) -> int:
        kept = lambda op, wanted: frozenset(op.outputs) if wanted else frozenset()
        blocks = tuple(Region(op.index, end, kept(op, inner)) for op, end in zip(dots[1:], ends, strict=True))
        around = Region(0, len(graph.operations) - 1, kept(dots[0], outer), inner=blocks)
        function = apply.configured(traced, Configuration((around,)))
        return len(jax.tree.leaves(jax.vjp(lambda *a: function(*a)[0], *given)[1]))

    assert residuals(outer=True, inner=False) == residuals(outer=False, inner=False) + 1
    assert residuals(outer=True, inner=True) == residuals(outer=True, inner=False)


def two_layers(first, second, *, keep: int = 0):
    """A program of two layers, each a region, and whether the second runs the code of the first."""

    def function(w, v, x):
        h = first(x, w)
        y = second(h, v)
        return [(y + keep * h).sum()]

    arrays = (jnp.full((4, 4), 0.3), jnp.full((4, 4), 0.2), jnp.arange(12.0).reshape(3, 4))
    traced = with_residuals(trace(function, arrays, differentiated=[0, 1]))
    dots = [op.index for op in traced.graph.operations if op.primitive == "dot_general"]
    size = dots[1] - dots[0]
    configuration = Configuration((Region(dots[0], dots[1]), Region(dots[1], dots[1] + size)))
    found = shared(traced, configuration)
    return traced, configuration, arrays, found[configuration.regions[1]].original is configuration.regions[0]


def layer(x, w, *, scale: float = 1.5):
    return jnp.tanh(x @ w * scale)


def test_the_same_layer_is_shared_and_computes_the_same() -> None:
    traced, configuration, arrays, same = two_layers(layer, layer)
    assert same
    function = apply.configured(traced, configuration)

    def gradients(f):
        return jax.grad(lambda w, v: f(w, v, arrays[2])[0], argnums=(0, 1))(*arrays[:2])

    from rematplan.program import evaluate

    for a, b in zip(gradients(evaluate.plain(traced)), gradients(function), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "keep"),
    [
        (layer, lambda x, w: layer(x, w, scale=1.25), 0),  # another constant, such as a drop-path rate
        (layer, lambda x, w: jnp.tanh(x @ w * 1.5 - 0.0 * x), 0),  # other wiring
        (layer, lambda x, w: jnp.sin(x @ w * 1.5), 0),
        (layer, lambda x, w: jnp.tanh(x @ w.T * 1.5), 0),
        (layer, layer, 1),  # the first is read again later, the second is not: both hand on one value, which is shared
    ],
    ids=["literal", "wiring", "primitive", "parameter", "outputs"],
)
def test_layers_that_differ_are_not_shared(first, second, keep: int) -> None:
    traced, configuration, arrays, same = two_layers(first, second, keep=keep)
    assert same == (keep == 1)
    from rematplan.program import evaluate

    wanted = jax.grad(lambda w: evaluate.plain(traced)(w, *arrays[1:])[0])(arrays[0])
    got = jax.grad(lambda w: apply.configured(traced, configuration)(w, *arrays[1:])[0])(arrays[0])
    np.testing.assert_allclose(wanted, got, rtol=1e-6)


def test_what_is_saved_must_correspond() -> None:
    traced, configuration, _, _ = two_layers(layer, layer)
    first, second = configuration.regions
    tanh = [op.outputs[0] for op in traced.graph.operations if op.primitive == "tanh"]
    for saved, expected in (((), ()), True), ((tanh[:1], tanh[1:]), True), ((tanh[:1], ()), False):
        regions = tuple(Region(r.start, r.stop, frozenset(s)) for r, s in zip((first, second), saved, strict=True))
        found = shared(traced, Configuration(regions))
        assert (found[regions[1]].original is regions[0]) == expected


def test_what_is_offloaded_must_correspond() -> None:
    traced, configuration, _, _ = two_layers(layer, layer)
    tanh = [op.outputs[0] for op in traced.graph.operations if op.primitive == "tanh"]
    saving = [Region(r.start, r.stop, frozenset([v])) for r, v in zip(configuration.regions, tanh, strict=True)]
    away = [Region(r.start, r.stop, r.saved, offloaded=r.saved) for r in saving]
    for regions, expected in ((saving, True), (away, True), ([saving[0], away[1]], False)):
        found = shared(traced, Configuration(tuple(regions)))
        assert (found[regions[1]].original is regions[0]) == expected


def test_common_module() -> None:
    class Pair(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.a, self.b = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.b(self.a(x))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.pair = Pair(rngs)

        def __call__(self, x):
            return self.pair(x)

    traced = traced_loss(rp.Workload(lambda m, x: m(x).sum(), Net(nnx.Rngs(0)), jnp.ones((2, 3))))
    inside = [op.index for op in traced.graph.operations if op.module]
    assert common_module(traced, Region(inside[0], inside[-1] + 1)) == "pair"
    first = [op.index for op in traced.graph.operations if op.module == "pair/a"]
    assert common_module(traced, Region(first[0], first[-1] + 1)) == "pair/a"
    assert common_module(traced, Region(0, len(traced.equations))) == ""
