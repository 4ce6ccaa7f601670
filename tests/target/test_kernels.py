"""Kernels that users write (Pallas): the TPU compiler estimates no cycles of them, and they are not free."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from rematplan.target import compiler
from rematplan.target.cache import Cache
from rematplan.target.chips import chips
from rematplan.target.compiler import Method, lower
from rematplan.target.cost import program_cost
from rematplan.target.cycles import CycleTable
from rematplan.target.hlo import parse
from rematplan.target.target import resolve
from tests.target.hlo_texts import MIB

V5E = chips()["tpu-v5e"]
PRODUCT = 2 * 512**3
FLOPS, BYTES = 8 * PRODUCT, 5 * MIB
SAID = f'"cost_estimate":{{"flops":"{FLOPS}","transcendentals":"7","bytes_accessed":"{BYTES}"}},'

# a product that the compiler priced, a kernel that reads it and writes as much, and the same kernel in a loop of 3 turns
PROGRAM = """HloModule jit_f, is_scheduled=true

%body (s: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %s = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%s), index=1
  %y = f32[512,512]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/again"}, backend_config={"custom_call_config":{"body":"AAA",SAID"needs_layout_passes":true}}
  ROOT %t = (s32[], f32[512,512]{1,0}) tuple(%i, %y)
}

%condition (s.1: (s32[], f32[512,512])) -> pred[] {
  %s.1 = (s32[], f32[512,512]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %trips = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %trips), direction=LT
}

ENTRY %main (a: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %b = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %c = f32[512,512]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/kernel"}, backend_config={"custom_call_config":{"body":"BBB",SAID"needs_layout_passes":true}}
  %zero = s32[] constant(0)
  %init = (s32[], f32[512,512]{1,0}) tuple(%zero, %c)
  %loop = (s32[], f32[512,512]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[512,512]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
WITH, WITHOUT = PROGRAM.replace("SAID", SAID), PROGRAM.replace("SAID", "")
TIMES = 1 + 3


def probed(text):
    return text.replace('"estimated_cycles":"100"', "")


def kernel_of(cost):
    (kernel,) = [c for c in cost.instructions if c.count == TIMES]
    return kernel


@pytest.mark.parametrize(
    ("text", "flops", "moved"), [(WITH, FLOPS, BYTES), (WITHOUT, 0, 2 * MIB)], ids=["estimate", "traffic"]
)
def test_kernels_are_priced_by_what_they_say_or_by_their_traffic(text, flops, moved):
    seconds = max(flops / V5E.peak("bf16"), moved / V5E.bandwidth)
    cycles = round(seconds * V5E.clock_hz)
    cost = program_cost(parse(text), V5E)
    assert cost.unpriced_kernels == 2  # that are scheduled
    assert cost.flops == PRODUCT + TIMES * flops
    assert cost.bytes_accessed == 2 * MIB + MIB + TIMES * moved
    assert cost.cycles == 100 + TIMES * cycles
    assert kernel_of(cost).cycles == cycles
    probe = program_cost(parse(probed(text)), V5E)
    assert probe.cycles is None
    assert kernel_of(probe).cycles is None
    assert probe.roofline_seconds == cost.roofline_seconds == pytest.approx(3 * MIB / V5E.bandwidth + TIMES * seconds)
    assert sum(m.seconds for m in cost.modules) == pytest.approx(cost.cycles / V5E.clock_hz)


@pytest.mark.parametrize("text", [WITH, WITHOUT], ids=["estimate", "traffic"])
def test_a_probe_predicts_the_kernels_of_a_compile(text):
    cost, probe = program_cost(parse(text), V5E), program_cost(parse(probed(text)), V5E)
    table = CycleTable(V5E.clock_hz)
    table.add(cost.instructions)
    prediction = table.predict(probe.instructions)
    assert (prediction.cycles, prediction.known_fraction) == (cost.cycles, 1.0)


def test_kernels_that_say_other_things_are_other_kernels():
    """Only the configuration tells them apart, and most of that says from where they were called."""
    elsewhere = parse(WITH.replace("BBB", "CCC"))
    slower = parse(WITH.replace(f'"{FLOPS}"', f'"{9 * FLOPS}"'))
    one, same, other, silent = (
        kernel_of(program_cost(m, V5E)).fingerprint for m in (parse(WITH), elsewhere, slower, parse(WITHOUT))
    )
    assert one == same
    assert len({one, other, silent}) == 3


def test_a_price_that_no_compiler_gave_prices_nothing_else():
    """What a kernel is taken to take says nothing of what the compiler takes for fusions that are like it."""
    table = CycleTable(V5E.clock_hz)
    kernel = kernel_of(program_cost(parse(WITH), V5E))
    table.add([dataclasses.replace(kernel, cycles=1000 * (kernel.cycles or 0))])
    alike = dataclasses.replace(kernel, fingerprint="fusion", cycles=None)
    assert table.predict([alike]).cycles == CycleTable(V5E.clock_hz).predict([alike]).cycles


FUSED = """HloModule jit_f, is_scheduled=true

%fused (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %n = f32[512,512]{1,0} negate(%p)
  ROOT %k = f32[512,512]{1,0} custom-call(%n), custom_call_target="tpu_custom_call", backend_config={SAID"a":"b"}
}

ENTRY %main (a: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %b = f32[512,512]{1,0} negate(%a), backend_config={"estimated_cycles":"100"}
  ROOT %c = f32[512,512]{1,0} fusion(%b), kind=kCustom, calls=%fused
}
"""


@pytest.mark.parametrize(("said", "seconds"), [(SAID, FLOPS / V5E.peak("bf16")), ("", 2 * MIB / V5E.bandwidth)])
def test_a_kernel_whose_operands_are_made_inside_of_its_fusion(said, seconds):
    cost = program_cost(parse(FUSED.replace("SAID", said)), V5E)
    assert cost.unpriced_kernels == 1
    assert cost.cycles == 100 + round(seconds * V5E.clock_hz)


def test_a_kernel_that_the_compiler_priced_keeps_its_price():
    priced = WITHOUT.replace('"needs_layout_passes":true', '"estimated_cycles":"5"')
    cost = program_cost(parse(priced), V5E)
    assert cost.cycles == 100 + TIMES * 5
    assert cost.unpriced_kernels == 0


def test_other_calls_are_priced_as_the_compiler_does():
    cost = program_cost(parse(WITH.replace("tpu_custom_call", "AllocateBuffer")), V5E)
    assert (cost.cycles, cost.unpriced_kernels) == (100, 0)


def double_exp(x, estimate):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) * 2

    block = pl.BlockSpec((256, 512), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (x.shape[0] // 256,)
    return pl.pallas_call(kernel, out_shape=out, grid=grid, in_specs=[block], out_specs=block, cost_estimate=estimate)(
        x
    )


@pytest.mark.slow
def test_a_kernel_of_a_compiled_program():
    flops, size = 10**11, 4 * MIB
    estimate = pl.CostEstimate(flops=flops, transcendentals=1 << 20, bytes_accessed=2 * size)

    def step(x, w):
        return double_exp(double_exp(x @ w, estimate) @ w, None)

    target = resolve("tpu-v5e")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 512), (512, 512))]
    program = lower(step, shapes, target=target)
    full = compiler.measure(program, target=target, cache=Cache(None))
    (said,) = full.warnings
    assert said.startswith("2 kernels have no estimate")
    assert full.flops == pytest.approx(2 * 2 * 2048 * 512 * 512 + flops, rel=1e-3)
    products = full.flops - flops
    at_least = flops / V5E.peak("bf16")
    assert at_least + products / V5E.peak("f32") < full.seconds < 2 * at_least
    probe = compiler.measure(program, target=target, method=Method.PROBE, cache=Cache(None))
    assert probe.warnings == full.warnings
    assert probe.seconds > at_least
    table = CycleTable(V5E.clock_hz)
    table.add(full.costs)
    assert table.predict(probe.costs).cycles == full.cycles
