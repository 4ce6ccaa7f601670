"""What is read from shortened programs: the straight line, one length and what is known, and where neither holds."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rematplan as rp
from rematplan import workloads
from rematplan.planner.blocks import Granularity, blocks, runs
from rematplan.planner.price import Rates
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss
from rematplan.search import problem as problems
from rematplan.search.extrapolate import Shortened, from_one, from_two, kept_in_a_repetition, lengths
from rematplan.search.problem import Problem
from rematplan.target.target import resolve
from tests.report.measurements import measurement

RATES = Rates({"float32": 1e12}, 1e12)
FIXED, ARGUMENTS, OUTPUTS, KEPT, SECONDS = 1000, 70, 60, 500, 3.0


def probed(count: int, *, kept: int = KEPT, seconds: float = SECONDS):
    """A program of which everything grows in proportion, beside what is outside of its repetitions."""
    made = measurement(seconds=10.0 + count * seconds)
    return replace(
        made,
        required_bytes=FIXED + count * (ARGUMENTS + OUTPUTS + kept),
        peak_bytes=FIXED + count * (ARGUMENTS + max(OUTPUTS, kept)),
        argument_bytes=100 + count * ARGUMENTS,
        output_bytes=50 + count * OUTPUTS,
        alias_bytes=0,
        flops=1e6 + count * 1e3,
        bytes_accessed=1e5 + count * 10.0,
    )


def seconds_of(m):
    return m.seconds


@pytest.mark.parametrize("count", [7, 24, 96])
def test_both_ways_reproduce_what_grows_in_proportion(count):
    plain = (Shortened(4, probed(4, kept=900, seconds=2.0)), Shortened(6, probed(6, kept=900, seconds=2.0)))
    whole = probed(count)
    two = from_two(Shortened(4, probed(4)), Shortened(6, probed(6)), count, seconds_of)
    one = from_one(Shortened(4, probed(4)), plain, KEPT, count, seconds_of)
    for found in (one, two):
        shown = found.as_measurement()
        assert shown.required_bytes == whole.required_bytes
        assert shown.peak_bytes == whole.peak_bytes
        assert shown.argument_bytes == whole.argument_bytes
        assert shown.output_bytes == whole.output_bytes
        assert shown.flops == pytest.approx(whole.flops)
        assert found.seconds == pytest.approx(whole.seconds)
        assert sum(weight for weight, _ in found.measurements) == pytest.approx(1.0)


@pytest.mark.parametrize("period", range(1, 13))
def test_lengths_are_whole_periods_and_a_rest_and_not_too_short(period):
    for rest in range(period):
        short, long = lengths(period, rest)
        assert short % period == long % period == rest
        assert max(4, period) <= short < long
        assert long >= 6
    assert lengths(period) == lengths(period, 0)


@pytest.mark.parametrize("count", [15, 16, 23])
@pytest.mark.parametrize("period", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("offset", [0, 1])
def test_what_a_repetition_keeps_is_one_boundary_for_each_region(count, period, offset):
    traced = traced_loss(workloads.mlp(blocks=count, features=8, batch=16))
    chain = blocks(traced.graph, granularity=Granularity.COARSE)
    run = max(runs(chain), key=lambda r: r.count)
    starts = list(range(run.first + offset, run.stop, period))
    stops = [*starts[1:], len(chain)]
    regions = tuple(Region(chain[a].start, chain[z - 1].stop) for a, z in zip(starts, stops, strict=True))
    found = kept_in_a_repetition(traced.graph, chain, run, Configuration(regions), period, rates=RATES)
    boundary = 16 * 8 * 4
    if offset and found is None:
        return  # a block before the first region is in none
    assert found == pytest.approx(boundary / period)


class Counting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(jnp.sin(self.linear(x)))


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Counting(rngs) for _ in range(16)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_that_hand_on_state_of_their_own_are_not_folded(monkeypatch):
    monkeypatch.setattr(problems, "FEWEST_FOLDED_OPERATIONS", 50)
    stateful = rp.Workload(lambda m, x: m(x).sum(), nnx.eval_shape(lambda: Deep(nnx.Rngs(0))), jnp.ones((2, 4)))
    silent = lambda _: None
    with_state = Problem(stateful, resolve("cpu"), progress=silent)
    without = Problem(workloads.mlp(blocks=16, features=8, batch=4), resolve("cpu"), progress=silent)
    if with_state.repeated is not None:
        assert not with_state.folds
    assert without.folds
    assert without.probed_operations < len(without.graph.operations)
