"""What `inspect` lists: residuals known by hand, JAX's own totals, and where every residual comes from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.ad_checkpoint import _saved_residuals  # noqa: TID251  the reference to compare with (0.10.2)

import rematplan as rp
from rematplan import policies
from rematplan._plan import Plan
from rematplan.errors import InputError, PlanMismatch
from rematplan.naming import describe
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss
from rematplan.program.trace import nbytes
from rematplan.records import Inspection
from tests.inspect.models import (
    ACTIVATION,
    BATCH,
    CLASSIC,
    FEATURES,
    LAYERS,
    SMALL,
    TANH_KEEPS_ITSELF,
    small,
    tanh_model,
)


@functools.cache
def inspected(name: str, policy: str) -> Inspection:
    return rp.inspect(small(name), policy=policy)


def plan_for(work: rp.Workload, configuration: Configuration) -> Plan:
    traced = traced_loss(work)
    regions, loops = describe(configuration, traced.graph, {i: b.graph for i, b in traced.bodies.items()})
    return Plan(regions, loops, fingerprint=traced.graph.fingerprint)


def jax_bytes(work: rp.Workload) -> tuple[int, int]:
    """Computed residuals and argument residuals as JAX's own private function counts them."""
    lifted = work.lift()

    def forward(*leaves):
        def loss(*parameters):
            given = dict(zip(work.differentiated, parameters, strict=True))
            return lifted.pure(*[given.get(i, leaf) for i, leaf in enumerate(leaves)])[0]

        return jax.vjp(loss, *[leaves[i] for i in work.differentiated])[1]

    jaxpr = jax.make_jaxpr(forward)(*lifted.leaves).jaxpr
    computed = arguments = 0
    for aval, source in _saved_residuals(jaxpr, ["x"] * len(jaxpr.invars)):
        if "argument" in source or "constant" in source:
            arguments += nbytes(aval)
        elif "literal" not in source:
            computed += nbytes(aval)
    return computed, arguments


@TANH_KEEPS_ITSELF
def test_residuals_of_a_tanh_chain():
    found = rp.inspect(tanh_model())
    # each layer keeps the tanh (for the next layer's kernel gradient and its own) and 1 - tanh; the loss keeps 2 * x
    assert [(r.operation, r.module, r.bytes) for r in found.residuals] == [
        *[(operation, f"layers/{layer}", ACTIVATION) for layer in range(LAYERS) for operation in ("tanh", "sub")],
        ("mul", "", ACTIVATION),
    ]
    assert found.total_bytes == 7 * ACTIVATION
    # kernels of all layers but the first (its input has no gradient), and the input
    assert sorted((a.name, a.bytes) for a in found.arguments) == [
        ("layers/1/linear/kernel", FEATURES * FEATURES * 4),
        ("layers/2/linear/kernel", FEATURES * FEATURES * 4),
        ("x", BATCH * FEATURES * 4),
    ]
    assert found.argument_bytes == 2 * 64 + 128
    assert {r.name for r in found.residuals if r.operation == "tanh"} == {f"layers/{i}/tanh" for i in range(LAYERS)}
    assert {r.name for r in found.residuals if r.operation == "sub"} == {""}  # no plan can name it
    assert all(r.location.startswith("models.py:") for r in found.residuals)


@TANH_KEEPS_ITSELF
def test_repeated_layers_fold_into_one_line():
    groups = rp.inspect(tanh_model()).groups()
    assert [(g.module, g.operation, g.count, g.bytes) for g in groups if g.count > 1] == [
        ("layers/*", "tanh", LAYERS, LAYERS * ACTIVATION),
        ("layers/*", "sub", LAYERS, LAYERS * ACTIVATION),
    ]
    assert sum(g.bytes for g in groups) == rp.inspect(tanh_model()).total_bytes


def test_a_policy_keeps_what_it_says():
    per_block = rp.inspect(tanh_model(), policy="per-block")
    # the input of each region but the first, and the loss's own
    assert [(r.operation, r.module) for r in per_block.residuals] == [
        ("tanh", "layers/0"),
        ("tanh", "layers/1"),
        ("mul", ""),
    ]
    assert per_block.configuration == "per-block"
    dots = rp.inspect(tanh_model(), policy="dots")
    assert [r.operation for r in dots.residuals].count("dot_general") == LAYERS


@CLASSIC
def test_everything_saveable_keeps_everything():
    assert rp.inspect(tanh_model(), policy="everything_saveable").total_bytes == rp.inspect(tanh_model()).total_bytes


def test_a_plan_keeps_what_it_names():
    work = tanh_model()
    graph = traced_loss(work).graph
    named = next(v.id for v in graph.values if v.name == "layers/1/linear/dot_general")
    plan = plan_for(work, Configuration((Region(0, len(graph.operations), frozenset({named})),)))
    found = rp.inspect(work, plan=plan)
    assert [(r.name, r.bytes) for r in found.residuals] == [("layers/1/linear/dot_general", ACTIVATION)]
    assert found.configuration == "plan"


@pytest.mark.parametrize("name", sorted(SMALL))
def test_totals_are_those_of_jax(name):
    found = inspected(name, "plain")
    assert (found.total_bytes, found.argument_bytes) == jax_bytes(small(name))
    assert found.total_bytes == sum(group.bytes for group in found.groups())


# code of a model's own `__call__`, and of the loss, stands in no submodule
OUTSIDE = ("__call__", "cross_entropy", "loss")


@pytest.mark.parametrize("policy", ["plain", "dots"])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_residual_has_a_module_and_a_line(name, policy):
    found = inspected(name, policy)
    assert found.residuals
    for residual in found.residuals:
        assert residual.location.startswith(("_build.py:", f"_{name}.py:", "_gpt.py:")), residual
        assert residual.module or residual.location.endswith(tuple(f"({f})" for f in OUTSIDE)), residual


def test_residuals_inside_a_loop_are_stacked_and_found_in_its_body():
    found = inspected("scan_gpt", "plain").residuals
    blocks = SMALL["scan_gpt"]["blocks"]
    exps = [r for r in found if r.operation == "exp" and r.module == "blocks/attn"]
    assert [(r.shape[0], r.name, r.location.split(":")[0]) for r in exps] == [(blocks, "blocks/attn/exp", "_gpt.py")]
    # what does not change from step to step is computed once, outside of the loop, and still has its module and name
    mask = [r for r in found if r.dtype == "bool" and r.module == "blocks/attn"]
    assert [(r.shape, r.name) for r in mask] == [((2, 2, 8, 8), "blocks/attn/broadcast_in_dim.2")]


def nested(function):
    """One tanh inside, wrapped; the tanh is what the backward pass needs."""
    return rp.inspect(
        rp.Workload(lambda w, x: function(jnp.tanh, x @ w).sum() ** 2, jnp.ones((4, 4)), jnp.ones((8, 4)))
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.jit(jax.jit(f))(x),
        lambda f, x: jax.lax.cond(x.sum() > 0, f, lambda y: y * 2, x),
        lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        lambda f, x: jax.vmap(f)(x),
    ],
    ids=["jit", "jit of jit", "cond", "scan", "vmap"],
)
def test_residuals_are_found_inside(wrap):
    found = nested(wrap)
    # jax 0.10 keeps the tanh itself, jax 0.12 one minus its square
    tanh = [r for r in found.residuals if r.operation in ("tanh", "one_minus_square")]
    assert tanh
    assert all(r.location.startswith("test_inspect.py:") for r in found.residuals)
    assert max(r.bytes for r in tanh) >= 8 * 4 * 4


def test_the_same_value_needed_twice_counts_once():
    def loss(w, x):
        y = jnp.exp(x @ w)
        return (y * jnp.sin(y) * y).sum() + jax.jit(lambda a: a * a)(y).sum()

    work = rp.Workload(loss, jnp.ones((4, 4)), jnp.ones((8, 4)))
    found = rp.inspect(work)
    assert [r.name for r in found.residuals].count("exp") == 1
    assert found.total_bytes == jax_bytes(work)[0]


def test_constants_are_no_activations():
    table = jnp.arange(32.0).reshape(8, 4)
    found = rp.inspect(rp.Workload(lambda w, x: (x @ w * table).sum(), jnp.ones((4, 4)), jnp.ones((8, 4))))
    assert found.residuals == ()
    assert sorted((a.operation, a.bytes) for a in found.arguments) == [("argument", 128), ("constant", 128)]


def test_methods_other_than_call_have_module_paths():
    class Head(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.out = nnx.Linear(4, 4, rngs=rngs)

        def scores(self, x):
            return jnp.exp(self.out(x))

    class Both(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.head = Head(rngs)

        def __call__(self, x):
            return jax.jit(lambda h, y: h.scores(y))(self.head, x) if False else self.head.scores(x)

    work = rp.Workload(lambda m, x: m(x).sum(), nnx.eval_shape(lambda: Both(nnx.Rngs(0))), jnp.ones((8, 4)))
    assert [(r.operation, r.module) for r in rp.inspect(work).residuals] == [("exp", "head")]


def test_input_that_will_not_do():
    work = tanh_model()
    with pytest.raises(InputError, match="unknown policy 'per-blok'"):
        rp.inspect(work, policy="per-blok")
    plan = plan_for(work, policies.by_name(traced_loss(work).graph, "per-block").configuration)
    with pytest.raises(InputError, match="both a policy and a plan"):
        rp.inspect(work, policy="plain", plan=plan)
    with pytest.raises(PlanMismatch, match="another function"):
        rp.inspect(tanh_model(layers=2), plan=plan)
