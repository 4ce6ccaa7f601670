"""Figures of programs that several devices share are those of one device, wherever they are said."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rematplan as rp
from rematplan._inspect import computed_bytes, residuals_of
from rematplan.planner.baselines import baselines
from rematplan.program.loss import traced_loss
from rematplan.program.saved import Origin
from rematplan.units import format_bytes
from tests.inspect.models import CLASSIC

DEVICES, LAYERS = 8, 16
W, X = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(LAYERS):
        x = layer(x, w)
    return (x**2).mean()


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, LAYERS)[0] ** 2).mean()


def split(loss) -> rp.Workload:
    return rp.Workload(loss, W, X, mesh={"data": DEVICES}, specs=[None, P("data")])


@pytest.mark.parametrize("loss", [unrolled, looped])
def test_every_sum_of_residuals_is_the_same(loss):
    work = split(loss)
    traced = traced_loss(work)
    for baseline in baselines(traced.graph):
        found = residuals_of(traced, baseline.configuration)
        shown = rp.inspect(work, policy=baseline.name)
        assert computed_bytes(found) == shown.total_bytes, baseline.name
        assert sum(s.bytes for s in found if s.origin is Origin.ARGUMENT) == shown.argument_bytes
    whole = rp.inspect(rp.Workload(loss, W, X))
    # what is computed of the batch is split, and nearly all is
    assert rp.inspect(work).total_bytes == pytest.approx(whole.total_bytes / DEVICES, rel=0.01)


@CLASSIC
@pytest.mark.parametrize("loss", [unrolled, looped])
def test_findings_say_what_one_device_holds(loss):
    shown = rp.inspect(split(loss), policy="everything_saveable")
    (finding,) = (f for f in shown.findings if f.code == "no-fewer-residuals")
    assert finding.bytes == shown.total_bytes
    assert f"holds {format_bytes(shown.total_bytes)} of residuals" in finding.message


def test_sums_are_held_against_the_memory_of_one_device():
    """On one device the residuals of this program are no more than what is alive: on eight they are not either."""
    codes = [
        {f.code for f in rp.compare(work, target=target).findings}
        for work, target in ((rp.Workload(unrolled, W, X), "cpu"), (split(unrolled), f"cpu:{DEVICES}"))
    ]
    assert all("residuals-are-not-memory" not in found for found in codes)
