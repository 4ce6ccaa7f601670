"""Models that bring checkpoint regions along: kept as they are and named, or replaced on request."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rematplan as rp
from rematplan.errors import InputError
from rematplan.program.configuration import OwnRegions
from rematplan.program.graph import Nesting
from rematplan.program.loss import traced_loss

FEATURES, LAYERS, BATCH = 64, 6, 1024


class Tower(nnx.Module):
    """Layers with remat inside each, one after the other or in a loop."""

    def __init__(self, *, loop: bool, rngs: nnx.Rngs):
        self.loop = loop
        if loop:
            self.layers = nnx.vmap(lambda r: nnx.Linear(FEATURES, FEATURES, rngs=r), in_axes=(0,))(rngs.split(LAYERS))
        else:
            self.layers = nnx.List([nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.remat
        def layer(linear: nnx.Linear, x: jax.Array) -> jax.Array:
            return jnp.tanh(linear(x))

        if self.loop:
            return nnx.scan(lambda x, linear: layer(linear, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )
        for linear in self.layers:
            x = layer(linear, x)
        return x


def loss(model: Tower, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def workload(*, loop: bool) -> rp.Workload:
    model = nnx.eval_shape(lambda: Tower(loop=loop, rngs=nnx.Rngs(0)))
    return rp.Workload(loss, model, jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32))


def regions_in(graph) -> int:
    """Checkpoint regions in a program, those in the bodies of loops included."""
    nested = [op.subprogram for op in graph.operations if op.subprogram is not None]
    return sum((s.kind is Nesting.REGION) + regions_in(s.graph) for s in nested)


@pytest.mark.parametrize("loop", [False, True], ids=["layers", "loop"])
def test_own_regions_are_kept_by_default_and_opened_on_request(loop: bool) -> None:
    work = workload(loop=loop)
    assert regions_in(traced_loss(work).graph) == (1 if loop else LAYERS)
    assert regions_in(traced_loss(work, own_regions=OwnRegions.REPLACE).graph) == 0


@pytest.mark.parametrize("loop", [False, True], ids=["layers", "loop"])
def test_without_own_regions_nothing_runs_again(loop: bool) -> None:
    work = workload(loop=loop)
    opened = rp.Plan(own_regions=OwnRegions.REPLACE)
    as_written, without = rp.measure(work, target="cpu"), rp.measure(work, target="cpu", plan=opened)
    # a layer's product runs three times in place of four
    assert as_written.flops is not None and without.flops is not None
    assert without.flops == pytest.approx(0.75 * as_written.flops, rel=0.02)
    assert rp.inspect(work, plan=opened).total_bytes > rp.inspect(work).total_bytes
    checked = rp.verify(work, plan=opened)
    assert checked.passed, checked.differences


@pytest.mark.parametrize("loop", [False, True], ids=["layers", "loop"])
def test_a_plan_in_place_of_own_regions_is_verified_and_survives_its_file(loop: bool, tmp_path) -> None:
    work = workload(loop=loop)
    plan = rp.plan(work, budget="1GiB", target="cpu", own_regions="replace")
    assert not any("own checkpoint region" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    loaded = rp.Plan.load(tmp_path / "plan.json")
    assert loaded.own_regions is OwnRegions.REPLACE
    assert rp.measure(work, target="cpu", plan=loaded).required_bytes == plan.measured["required_bytes"]
    checked = rp.verify(work, plan=loaded)
    assert checked.passed, checked.differences


def test_kept_regions_are_listed_with_what_can_be_done() -> None:
    plan = rp.plan(workload(loop=False), budget="1GiB", target="cpu")
    assert plan.own_regions is OwnRegions.KEEP
    assert sum("own_regions='replace'" in note for note in plan.notes) == LAYERS


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(InputError, match="'keep' or 'replace'"):
        rp.plan(workload(loop=False), budget="1GiB", target="cpu", own_regions="drop")
