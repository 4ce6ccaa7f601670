"""Each rule fires where it is right and stays silent where it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import rematplan as rp
from rematplan import findings
from rematplan.program.configuration import PLAIN
from rematplan.target.target import Kind
from rematplan.units import format_count
from tests.inspect.models import CLASSIC, TANH_KEEPS_ITSELF, small, tanh_model


def codes(work: rp.Workload, policy: str) -> list[str]:
    return [finding.code for finding in rp.inspect(work, policy=policy).findings]


@pytest.fixture
def tanh():
    return tanh_model()


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ("whole", "whole-model-region"),
        ("nothing_saveable", "whole-model-region"),
        pytest.param("everything_saveable", "no-fewer-residuals", marks=CLASSIC),
    ],
)
def test_a_trap_is_found(tanh, policy, code):
    assert codes(tanh, policy) == [code]


@pytest.mark.parametrize("policy", ["plain", "per-block", pytest.param("dots", marks=TANH_KEEPS_ITSELF), "whole-dots"])
def test_no_trap_no_finding(tanh, policy):
    assert codes(tanh, policy) == []


def test_a_policy_without_anything_to_save():
    batched = jax.ShapeDtypeStruct((3, 8, 4), jnp.float32)
    # every product has a batch dimension, so this policy may save none of them
    work = rp.Workload(
        lambda w, x: jnp.tanh(jnp.einsum("bnd,bdf->bnf", jnp.sin(jnp.einsum("bnd,bdf->bnf", x, w)), w)).sum(),
        jax.ShapeDtypeStruct((3, 4, 4), jnp.float32),
        batched,
    )
    found = rp.inspect(work, policy="dots_with_no_batch_dims_saveable")
    assert "policy-saves-nothing" in [f.code for f in found.findings]
    assert "dots_with_no_batch_dims_saveable" in found.findings[0].message
    assert "policy-saves-nothing" not in codes(work, "dots_saveable")


def test_a_policy_in_a_loop_is_looked_at():
    work = small("scan_gpt")
    about_policies = {"policy-saves-nothing", "no-fewer-residuals", "whole-model-region", "last-block-region"}
    assert about_policies.isdisjoint(codes(work, "dots"))
    assert about_policies.isdisjoint(codes(work, "per-block"))


def test_regions_of_the_users_own_are_told():
    def loss(w, x):
        return jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y @ w)))(x).sum()

    work = rp.Workload(loss, jnp.ones((4, 4)), jnp.ones((8, 4)))
    found = {f.code: f for f in rp.inspect(work).findings}
    assert set(found) == {"own-region", "no-policy", "whole-model-region"}
    assert all(f.location.split(":")[0] == "test_findings.py" for f in found.values())
    assert "3 operations" in found["own-region"].message
    assert found["no-policy"].flops == 2 * 8 * 4 * 4 + 2 * 8 * 4  # a product, and two functions of its result


def test_figures_of_the_cpu_compiler():
    assert [f.code for f in findings.of_target(Kind.CPU)] == ["cpu-figures"]
    assert findings.of_target(Kind.TPU) == findings.of_target(Kind.GPU) == ()


@CLASSIC
def test_what_regions_free_is_a_number(tanh):
    (finding,) = rp.inspect(tanh, policy="everything_saveable").findings
    total = rp.inspect(tanh).total_bytes
    assert f"{total} B" in finding.message
    assert findings.of_saving(PLAIN, 10, plain_bytes=20, least_bytes=None) == ()


def test_branches_and_open_ended_loops_are_one_operation() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, w)
        steps = jax.lax.while_loop(lambda s: s < x[1], lambda s: s + 1.0, x[0])
        return (jax.lax.scan(lambda c, _: (jnp.tanh(c), None), y, None, length=3)[0] * steps).sum()

    found = [f for f in rp.inspect(rp.Workload(loss, jnp.ones(3), jnp.ones(2))).findings if f.code == "one-operation"]
    assert sorted(f.message.split()[1] for f in found) == ["cond", "while"]  # and not the scan
    assert all(f.location.startswith("test_findings.py:") for f in found)


W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
NAMES = jax.checkpoint_policies.save_only_these_names


def told(inner: Callable[..., jax.Array], outer: Callable[..., jax.Array] = lambda w, y: (y @ w).sum()) -> set[str]:
    """Codes about a loss of a layer and of what follows it."""
    return {f.code for f in rp.inspect(rp.Workload(lambda w, x: outer(w, inner(w, x)), W, X)).findings}


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@jax.custom_vjp
def exponential(x: jax.Array) -> jax.Array:
    return jnp.exp(x)


def _exponential_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = checkpoint_name(jnp.exp(x), "res")
    return y, y


exponential.defvjp(_exponential_forward, lambda y, g: (g * y,))


def _reduced(layer: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    return lambda w, x: jax.shard_map(layer, mesh=mesh, in_specs=spec("data"), out_specs=spec())(x @ w)


FALSE_ALARMS = {
    # the rule keeps nothing, so that the product before it is not needed as it was before it got its name
    "saved-yet-recomputed": jax.checkpoint(
        lambda w, x: jnp.sin(checkpoint_name(clipped(x @ w), "h")), policy=NAMES("h")
    ),
    # the name stands in a forward rule
    "policy-saves-nothing": jax.checkpoint(lambda w, x: exponential(x @ w), policy=NAMES("res")),
    # what this policy names is what it does not save
    "name-not-found": jax.checkpoint(
        lambda w, x: jnp.sin(checkpoint_name(x @ w, "h")),
        policy=jax.checkpoint_policies.save_any_names_but_these("other"),
    ),
    # regions inside free what is in them
    "whole-model-region": jax.checkpoint(
        lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x))
    ),
    # what comes last in a region is not computed again
    "replayed-collective": _reduced(jax.checkpoint(lambda x: jax.lax.psum(jnp.sin(x), "data"))),
    # its result is kept, so that it is not called again
    "replayed-callback": jax.checkpoint(
        lambda w, x: jnp.sin(x @ w) * jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4, 8), x.dtype), X),
        policy=jax.checkpoint_policies.everything_saveable,
    ),
    # each is in a layer of its own, with a product between them
    "cheap-residuals": lambda w, x: functools.reduce(lambda y, _: jnp.sin(y @ w), range(4), x),
}


@CLASSIC
@pytest.mark.parametrize("code", FALSE_ALARMS)
def test_no_false_alarm(code: str) -> None:
    assert code not in told(FALSE_ALARMS[code])


def test_a_value_that_only_the_gradient_of_what_is_not_differentiated_reads() -> None:
    layer = jax.checkpoint(lambda w, x, c: jnp.sin(checkpoint_name(x @ w, "h")) + (x @ w) * c, policy=NAMES("h"))
    work = rp.Workload(lambda w, x, c: layer(w, x, c).sum(), W, X, jnp.ones((4, 8)))
    assert "saved-yet-recomputed" not in {f.code for f in rp.inspect(work).findings}


def test_a_body_with_many_paths_is_walked_once() -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(60):  # each reads the one before three times
            x = jnp.sin(x) * x * x
        return x @ w, None

    work = rp.Workload(lambda w, x: jax.lax.scan(body, x, w)[0].sum(), jnp.ones((2, 8, 8)), X)
    assert rp.inspect(work).total_bytes > 0


def test_several_regions_on_one_line_are_one_finding_with_their_sum() -> None:
    layer = jax.checkpoint(lambda w, x: jnp.sin(x @ w))
    work = rp.Workload(lambda w, x: functools.reduce(lambda y, _: layer(w, y), range(3), x).sum(), W, X)
    (finding,) = (f for f in rp.inspect(work).findings if f.code == "no-policy")
    assert finding.flops == 3 * (2 * 4 * 8 * 8 + 4 * 8)
    assert "3 times here; what is at stake is the sum of all, other figures are of one." in finding.message
    one = rp.Workload(lambda w, x: layer(w, x).sum(), W, X)
    (alone,) = (f for f in rp.inspect(one).findings if f.code == "no-policy")
    assert finding.message.startswith(alone.message)
    assert finding.flops == 3 * alone.flops
    # as a reader sees it: the sentence's figure, how often it holds, and the sum
    shown = " ".join(str(rp.inspect(work)).split())
    assert f"({format_count(3 * alone.flops)}FLOP at stake)" in shown
    assert format_count(alone.flops) in finding.message


@CLASSIC
def test_findings_without_figures_do_not_speak_of_a_sum() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("here", "absent")
    layer = jax.checkpoint(lambda w, x: jnp.sin(checkpoint_name(x @ w, "here")), policy=policy)
    work = rp.Workload(lambda w, x: functools.reduce(lambda y, _: layer(w, y), range(3), x).sum(), W, X)
    (finding,) = (f for f in rp.inspect(work).findings if f.code == "name-not-found")
    assert finding.message.endswith(" This holds 3 times here.")


def test_what_stands_in_the_body_of_a_loop_is_seen() -> None:
    layer = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None))
    work = rp.Workload(lambda w, x: jax.lax.scan(layer, x, w)[0].sum(), jnp.ones((3, 8, 8)), X)
    own = [f for f in rp.inspect(work).findings if f.code == "own-region"]
    assert [f.flops for f in own] == [3 * (2 * 4 * 8 * 8 + 4 * 8)]

    def branching(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ w), None

    work = rp.Workload(lambda w, x: jax.lax.scan(branching, x, w)[0].sum(), jnp.ones((3, 8, 8)), X)
    assert "one-operation" in {f.code for f in rp.inspect(work).findings}


@CLASSIC
def test_strings_in_a_users_own_policy_are_no_names() -> None:
    def keep(primitives: set[str]) -> Callable[..., bool]:
        return lambda primitive, *_, **__: primitive.name in primitives

    policy = keep({"dot_general", "conv_general_dilated"})
    assert "name-not-found" not in told(jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=policy))


def test_captured_complex_arrays_and_regions_without_work() -> None:
    outside = jnp.ones((128, 128), jnp.complex64)
    work = rp.Workload(lambda w, x: (x @ w).sum() * jnp.abs(outside).mean(), W, X)
    assert "closure-capture" in {f.code for f in rp.inspect(work).findings}
    assert "no-policy" not in told(lambda w, x: jax.checkpoint(lambda x: x)(x @ w))
