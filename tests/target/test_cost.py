"""Operations, bytes, roofline and fingerprints of scheduled programs, against XLA's own count where it has one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from rematplan.target.chips import chips
from rematplan.target.cost import program_cost, step_seconds
from rematplan.target.hlo import parse
from rematplan.target.work import Work
from tests.target.hlo_texts import CHAIN, LIBRARY, LOOP, MIB

CPU = chips()["cpu"]
V5E = chips()["tpu-v5e"]
PRODUCT = 2 * 512**3


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


def test_dots_and_bytes_by_hand():
    cost = program_cost(parse(CHAIN), V5E)
    assert cost.flops == 3 * PRODUCT
    assert cost.bytes_accessed == (2 + 3 + 3 + 1) * MIB  # each reads its operands, also one twice, and writes 1 MiB
    assert cost.cycles == 123
    assert cost.roofline_seconds == pytest.approx(9 * MIB / V5E.bandwidth)  # bandwidth decides


OFFLOADING = """HloModule jit_f, is_scheduled=true

%write (stack: f32[8,64,1024], slice: f32[1,64,1024], i: s32[]) -> f32[8,64,1024] {
  %stack = f32[8,64,1024]{2,1,0:S(5)} parameter(0)
  %slice = f32[1,64,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = f32[8,64,1024]{2,1,0:S(5)} dynamic-update-slice(%stack, %slice, %i, %i, %i)
}

%read (stack.1: f32[8,64,1024], i.1: s32[]) -> f32[1,64,1024] {
  %stack.1 = f32[8,64,1024]{2,1,0:S(5)} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,64,1024]{2,1,0} dynamic-slice(%stack.1, %i.1, %i.1, %i.1), dynamic_slice_sizes={1,64,1024}
}

ENTRY %main (x: f32[1,64,1024], s: f32[8,64,1024], n: s32[]) -> f32[1,64,1024] {
  %x = f32[1,64,1024]{2,1,0} parameter(0)
  %s = f32[8,64,1024]{2,1,0:S(5)} parameter(1)
  %n = s32[] parameter(2)
  %dynamic-update-slice-start = ((f32[8,64,1024]{2,1,0:S(5)}, f32[1,64,1024]{2,1,0}, s32[]), f32[8,64,1024]{2,1,0:S(5)}, u32[]) async-start(%s, %x, %n), calls=%write
  %dynamic-update-slice-done = f32[8,64,1024]{2,1,0:S(5)} async-done(%dynamic-update-slice-start)
  %dynamic-slice-start = ((f32[8,64,1024]{2,1,0:S(5)}, s32[]), f32[1,64,1024]{2,1,0}, u32[]) async-start(%dynamic-update-slice-done, %n), calls=%read
  ROOT %dynamic-slice-done = f32[1,64,1024]{2,1,0} async-done(%dynamic-slice-start)
}
"""  # noqa: E501


# as GPU compilers write it: the copy is wrapped in a fusion
WRAPPED = OFFLOADING.replace("%write (", "%inner (", 1).replace(
    "%read (",
    """%write (a: f32[8,64,1024], b: f32[1,64,1024], c: s32[]) -> f32[8,64,1024] {
  %a = f32[8,64,1024]{2,1,0:S(5)} parameter(0)
  %b = f32[1,64,1024]{2,1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %wrapped = f32[8,64,1024]{2,1,0:S(5)} fusion(%a, %b, %c), kind=kCustom, calls=%inner
}

%read (""",
    1,
)


@pytest.mark.parametrize("text", [OFFLOADING, WRAPPED], ids=["plain", "wrapped"])
def test_copies_to_the_host_are_counted_by_what_they_move(text):
    cost = program_cost(parse(text), V5E)
    assert cost.host_bytes == MIB / 4  # a slice there and the same one back, side by side
    copying = MIB / 4 / V5E.host_bandwidth
    assert step_seconds(0.0, host_bytes=cost.host_bytes, waiting=0.0, chip=V5E) == pytest.approx(copying)
    assert step_seconds(1.0, host_bytes=cost.host_bytes, waiting=0.5, chip=V5E) == 1.5
    assert step_seconds(0.5, host_bytes=cost.host_bytes, waiting=0.0, chip=CPU) == 0.5  # no link to another memory
    assert program_cost(parse(LOOP), V5E).host_bytes == 0


def test_loops_count_as_often_as_they_run():
    cost = program_cost(parse(LOOP), V5E)
    assert cost.flops == pytest.approx(5 * 2 * PRODUCT, rel=1e-6)
    assert cost.cycles == 35


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: jnp.tanh(x @ w).sum(), [(64, 96), (96, 32)]),
        (lambda x, w: jnp.einsum("bnd,bdf->bnf", x, w), [(8, 16, 32), (8, 32, 24)]),
        (lambda x, w: jax.grad(lambda w: (jax.nn.relu(x @ w) ** 2).sum())(w), [(64, 96), (96, 32)]),
    ],
)
def test_operations_as_xla_counts_them(function, shapes):
    program = compiled(function, *shapes)
    assert program_cost(parse(program.as_text()), CPU).flops == pytest.approx(
        program.cost_analysis()["flops"], rel=0.02
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 2), "padding": "VALID"},
        {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)},
        {"window_strides": (1, 1), "padding": ((2, 1), (0, 3)), "lhs_dilation": (2, 3)},
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4},
    ],
)
def test_convolutions_as_xla_counts_them(arguments):
    inputs = 16 // arguments.get("feature_group_count", 1)
    program = compiled(
        lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **arguments),
        (2, 14, 15, 16),
        (3, 5, inputs, 32),
    )
    assert program_cost(parse(program.as_text()), CPU).flops == pytest.approx(
        program.cost_analysis()["flops"], rel=1e-3
    )


def test_scanned_and_unrolled_programs_cost_the_same_products():
    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    def unrolled(x, ws):
        for index in range(6):
            x = x @ ws[index]
        return x

    shapes = ((32, 32), (6, 32, 32))
    costs = [program_cost(parse(compiled(f, *shapes).as_text()), CPU) for f in (scanned, unrolled)]
    products = 6 * 2 * 32**3
    assert [round(c.flops) // products for c in costs] == [1, 1]
    assert costs[0].flops == pytest.approx(products, rel=0.02)


def test_library_convolutions_on_gpu():
    forward = 2 * 8 * 16 * 16 * 128 * 64 * 3 * 3  # no padding inside the call: every position is valid
    assert program_cost(parse(LIBRARY), chips()["gpu-h100"]).flops == 3 * forward


def test_calls_without_results_are_no_products():
    def function(x):
        jax.debug.callback(lambda *_: None, x.sum(), x.max())
        return x @ x

    assert program_cost(parse(compiled(function, (64, 64)).as_text()), CPU).flops == pytest.approx(2 * 64**3, rel=0.05)


SLICES = """HloModule m, is_scheduled=true

%sliced (p: f32[64,512,512], i: s32[]) -> f32[512,512] {
  %p = f32[64,512,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,512,512]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,512,512}
  ROOT %b = f32[512,512]{1,0} bitcast(%s)
}

%updated (q: f32[64,512,512], u: f32[1,512,512], j: s32[]) -> f32[64,512,512] {
  %q = f32[64,512,512]{2,1,0} parameter(0)
  %u = f32[1,512,512]{2,1,0} parameter(1)
  %j = s32[] parameter(2)
  %nil = s32[] constant(0)
  ROOT %d = f32[64,512,512]{2,1,0} dynamic-update-slice(%q, %u, %j, %nil, %nil)
}

ENTRY %e (a: f32[64,512,512], b: f32[1,512,512], i: s32[]) -> f32[512,512] {
  %a = f32[64,512,512]{2,1,0} parameter(0)
  %b.1 = f32[1,512,512]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %read = f32[512,512]{1,0} fusion(%a, %i.1), kind=kLoop, calls=%sliced
  ROOT %write = f32[64,512,512]{2,1,0} fusion(%a, %b.1, %i.1), kind=kLoop, calls=%updated
}
"""


def test_only_the_touched_part_of_sliced_and_updated_operands_counts():
    index = 4
    assert program_cost(parse(SLICES), V5E).bytes_accessed == (2 * MIB + index) + (2 * MIB + index)


def renamed(text):
    text = re.sub(r"%([a-z])\b", r"%other_\1", text)
    return re.sub(r'op_name="[^"]*"( stack_frame_id=\d+)?', 'op_name="elsewhere"', text)


def test_fingerprints_do_not_depend_on_names_and_metadata():
    one = {c.fingerprint for c in program_cost(parse(CHAIN), V5E).instructions}
    assert {c.fingerprint for c in program_cost(parse(renamed(CHAIN)), V5E).instructions} == one
    assert {
        c.fingerprint for c in program_cost(parse(CHAIN.replace("512,512", "512,256")), V5E).instructions
    }.isdisjoint(one)


def test_memory_spaces_change_the_fingerprint():
    here = program_cost(parse(CHAIN), V5E).instructions
    moved = program_cost(
        parse(CHAIN.replace("%b = f32[512,512]{1,0}", "%b = f32[512,512]{1,0:S(1)}")), V5E
    ).instructions
    assert {c.fingerprint for c in here} != {c.fingerprint for c in moved}


def test_work_by_hand():
    (dot, *_) = program_cost(parse(CHAIN), V5E).instructions
    work = Work(*dot.work)
    assert work.matrix_seconds == PRODUCT / V5E.peak("f32")
    assert work.hbm_seconds == 3 * MIB / V5E.bandwidth  # a twice, b
    assert work.product_bytes == MIB
    assert work.transcendentals == work.reduced == 0


def test_work_inside_fusions():
    program = compiled(lambda x: jnp.exp(x).sum(1), (256, 128))
    costs = program_cost(parse(program.as_text()), CPU).instructions
    assert sum(Work(*c.work).transcendentals for c in costs) == 256 * 128
    assert sum(Work(*c.work).reduced for c in costs) == 256 * 128
