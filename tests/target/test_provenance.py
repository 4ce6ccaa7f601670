"""Where scheduled instructions come from, what buffers are for, and in which module and pass time is spent."""

from __future__ import annotations

import pytest

from rematplan.target import compiler
from rematplan.target.chips import chips
from rematplan.target.compiler import Method
from rematplan.target.cost import program_cost
from rematplan.target.hlo import parse
from rematplan.target.measurement import Argument, Role, attributed, decode, encode
from rematplan.target.provenance import Pass, Provenance, pass_of
from rematplan.target.target import resolve
from rematplan.target.timeline import live_ranges
from rematplan.workloads import mlp
from tests.target.hlo_texts import CHAIN, MIB

# What the chain's second product keeps is read in the backward pass; its argument is called as a lowered step calls it.
STEP = (
    CHAIN.replace('op_name="a"', 'op_name="leaves[0]"')
    .replace("%b = f32", "%copy.1 = f32[512,512]{1,0} copy(%a)\n  %b = f32")
    .replace("dot(%c, %a), lhs", "dot(%c, %copy.1), lhs")
)


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/jvp(~blocks/0~)/dot_general", Pass.FORWARD),
        ("jit(step)/transpose(jvp(~blocks/0~))/dot_general", Pass.BACKWARD),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/tanh", Pass.RECOMPUTE),
        ("jit(step)/mul", Pass.OTHER),
        ("", Pass.OTHER),
    ],
)
def test_passes(op_name, expected):
    assert pass_of(op_name) is expected


def test_a_copy_has_the_name_of_what_it_copies():
    module = parse(STEP)
    copied = next(i for i in module.entry.instructions if i.name == "copy.1")
    assert copied.op_name == ""
    assert Provenance(module).maker(copied).op_name == "leaves[0]"


def test_an_unnamed_fusion_has_the_name_of_what_it_computes_last():
    fused = """%fused (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %x = f32[512,512]{1,0} tanh(%p), metadata={op_name="jit(f)/jvp(~norm~)/tanh"}
  ROOT %y = f32[512,512]{1,0} exponential(%x)
}

ENTRY"""
    text = CHAIN.replace("ENTRY", fused, 1)
    text = text.replace(
        "%c = f32[512,512]{1,0} dot(%b, %a)",
        "%f = f32[512,512]{1,0} fusion(%b), kind=kLoop, calls=%fused\n  %c = f32[512,512]{1,0} dot(%f, %a)",
    )
    module = parse(text)
    unnamed = next(i for i in module.entry.instructions if i.name == "f")
    assert Provenance(module).maker(unnamed).op_name == "jit(f)/jvp(~norm~)/tanh"


def test_what_is_alive_at_the_peak_adds_up_and_says_what_it_is_for():
    text = STEP.replace("dot(%c, %copy.1), lhs", "dot(%c, %b), lhs")  # b is read in the backward pass: it is saved
    peak, timeline = live_ranges(parse(text))
    assert timeline.argument_bytes == (MIB,)
    roles = {(a.module, a.role): (a.count, a.bytes) for a in timeline.alive}
    assert sum(timeline.argument_bytes) + sum(size for _, size in roles.values()) == peak == max(timeline.live_bytes)
    assert roles["blocks/*/attn", "saved"] == (1, MIB)
    assert roles["", "gradient"] == (1, MIB)  # the output, which a transposed product makes


def test_the_backward_pass_begins_where_most_of_it_is():
    lone = '  %w = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/transpose(jvp())/checkpoint/rematted_computation/mul"}\n'  # noqa: E501
    moved = CHAIN.replace("  %b = ", lone + "  %b = ")
    _, timeline = live_ranges(parse(moved))
    assert timeline.backward_starts == 4  # the last product, not the one that was scheduled early
    _, forward_only = live_ranges(parse(CHAIN.replace("transpose(jvp())", "jvp()")))
    assert forward_only.backward_starts is None


def test_a_fusion_that_ends_in_a_scatter_writes_into_its_operand():
    fused = """%fused (p: f32[512,512], i: s32[8,1]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %i = s32[8,1]{1,0} parameter(1)
  %u = f32[8,512]{1,0} constant({...})
  ROOT %s = f32[512,512]{1,0} scatter(%p, %i, %u), to_apply=%add
}

ENTRY"""
    text = CHAIN.replace("ENTRY", fused, 1)
    into = "%c = f32[512,512]{1,0} fusion(%b, %i0), kind=kInput, calls=%fused, metadata"
    start = text.index("  %c = ")
    stop = text.index("\n", start)
    index = "  %i0 = s32[8,1]{1,0} constant({...})\n"
    scattered = text[:start] + index + "  " + into + '={op_name="jit(f)/jvp()/scatter-add"}' + text[stop:]
    assert live_ranges(parse(scattered))[0] == pytest.approx(3 * MIB, rel=1e-3)  # four if the result had its own
    kept = scattered.replace("scatter(%p", "custom(%p")
    assert live_ranges(parse(kept))[0] == pytest.approx(4 * MIB, rel=1e-3)


def test_time_by_module_and_pass_adds_up_to_the_cycles():
    chip = chips()["tpu-v5e"]
    cost = program_cost(parse(CHAIN), chip)
    found = {(t.module, t.step_pass): t.seconds * chip.clock_hz for t in cost.modules}
    assert found == pytest.approx({("blocks/*/attn", "forward"): 100, ("", "forward"): 20, ("", "backward"): 3})


def test_arguments_are_called_by_what_they_are():
    from tests.report.measurements import measurement

    _, timeline = live_ranges(parse(STEP))
    measured = measurement(timeline=timeline)
    named = attributed(measured, (Argument(Role.PARAMETER, "blocks/3/attn/kernel"),))
    groups = {(a.module, a.role): a.bytes for a in named.timeline.alive}
    assert groups["blocks/*/attn", "parameter"] == MIB
    buffer = next(b for b in named.timeline.at_peak if b.kind == "argument")
    assert (buffer.role, buffer.module, buffer.operation) == ("parameter", "blocks/3/attn", "kernel")
    assert decode(encode(measured)) == measured  # what the cache passes on is what was measured
    assert "argument_bytes" not in measured.to_json()["timeline"]


@pytest.mark.parametrize("optimizer", [False, True])
def test_roles_of_a_compiled_step(optimizer):
    import optax

    import rematplan as rp

    work = mlp(blocks=4, features=64, batch=512)
    if optimizer:
        work = rp.Workload(work.loss_fn, *work.args, optimizer=optax.adam(1e-3))
    found = rp.measure(work, target="cpu", policy="whole")
    roles: dict[str, int] = {}
    for group in found.timeline.alive:
        roles[group.role] = roles.get(group.role, 0) + group.bytes
    parameters = 4 * (64 * 64 + 64) * 4
    assert roles["parameter"] == parameters
    assert roles.get("optimizer", 0) >= (2 * parameters if optimizer else 0)
    assert ("optimizer" in roles) == optimizer
    assert roles["input"] >= 512 * 64 * 4
    assert roles["gradient"] >= parameters
    assert sum(roles.values()) == max(found.timeline.live_bytes)
    assert sum(t.seconds for t in found.modules) == pytest.approx(found.seconds)
    assert {t.step_pass for t in found.modules} >= {"forward", "recompute", "backward"}


def test_programs_that_are_equal_share_a_measurement_whatever_their_arguments_are_called():
    work = mlp(blocks=2, features=32, batch=64)
    step = work.step()
    program = compiler.lower(step.function, step.leaves, target=resolve("cpu"))
    found = compiler.measure(program, target=resolve("cpu"), method=Method.COMPILE)
    assert {b.role for b in found.timeline.at_peak if b.kind == "argument"} == {"argument"}
    assert sum(found.timeline.argument_bytes) == found.argument_bytes
    sides = (Argument(Role.PARAMETER, "a/kernel"), Argument(Role.OPTIMIZER, "b/kernel"))
    one, other = (attributed(found, [side] * len(step.leaves)) for side in sides)
    assert {b.role for b in one.timeline.at_peak if b.kind == "argument"} == {"parameter"}
    assert {b.role for b in other.timeline.at_peak if b.kind == "argument"} == {"optimizer"}
    assert attributed(one, sides) == one  # what is said is said once


def test_a_copy_of_an_argument_has_one_role():
    peak, timeline = live_ranges(parse(STEP.replace("dot(%c, %copy.1), lhs", "dot(%copy.1, %copy.1), lhs")))
    copies = [b for b in timeline.at_peak if b.kind == "temporary" and b.operation.startswith("leaves")]
    assert [b.role for b in copies] == ["other"]
    assert sum(a.bytes for a in timeline.alive) + sum(timeline.argument_bytes) == peak
