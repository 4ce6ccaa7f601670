"""Each rule fires where it is right and stays silent where it is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import findings
from rematplan.program.configuration import PLAIN
from rematplan.target.target import Kind
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
