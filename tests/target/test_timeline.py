"""Live ranges of scheduled programs."""

from __future__ import annotations

import pytest

from rematplan.target.hlo import parse
from rematplan.target.timeline import LIMIT, live_ranges
from tests.target.hlo_texts import CHAIN, LOOP, MIB


def test_chain():
    peak, timeline = live_ranges(parse(CHAIN))
    # argument and output throughout; where c is made, b and c as well
    assert peak == 4 * MIB
    assert [b / MIB for b in timeline.live_bytes] == [2, 3, 4, 3]
    assert timeline.backward_starts == 3
    assert sorted(b.kind for b in timeline.at_peak) == ["argument", "output", "temporary", "temporary"]
    (saved,) = [b for b in timeline.at_peak if b.module]
    assert (saved.module, saved.operation, saved.location) == ("blocks/0/attn", "dot_general", "model.py:12 (loss)")
    assert saved.shape == "f32[512,512]"


def test_element_wise_instructions_write_over_a_dying_operand():
    text = CHAIN.replace("dot(%b, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "add(%b, %a)")
    peak, _ = live_ranges(parse(text))
    assert peak == 3 * MIB


def test_what_transposes_does_not_write_over_its_operand():
    text = CHAIN.replace("dot(%b, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "copy(%b)")
    assert live_ranges(parse(text))[0] == 3 * MIB
    assert live_ranges(parse(text.replace("%c = f32[512,512]{1,0}", "%c = f32[512,512]{0,1}")))[0] == 4 * MIB


@pytest.mark.parametrize(
    ("body", "peak"),
    [
        ("%s = f32[512,512]{1,0} add(%m, %p)", 3),  # added to the product, one by one
        ("%s = f32[512,512]{1,0} add(%m, %m)", 4),  # not read: nothing is known to die in it
        ("%s = f32[512,512]{1,0} transpose(%p), dimensions={1,0}", 4),
    ],
)
def test_a_product_that_adds_to_an_operand_writes_over_it(body, peak):
    fused = f"""%fused (q: f32[512,512], p: f32[512,512]) -> f32[512,512] {{
  %q = f32[512,512]{{1,0}} parameter(0)
  %p = f32[512,512]{{1,0}} parameter(1)
  %m = f32[512,512]{{1,0}} dot(%q, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {body}
  ROOT %r = f32[512,512]{{1,0}} convert(%s)
}}

"""
    product = "dot(%b, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = CHAIN.replace("ENTRY", fused + "ENTRY").replace(product, "fusion(%a, %b), kind=kOutput, calls=%fused")
    assert live_ranges(parse(text))[0] == peak * MIB
    factor = text.replace("fusion(%a, %b)", "fusion(%b, %a)")
    assert live_ranges(parse(factor))[0] == 4 * MIB


def test_an_operand_that_is_read_again_is_not_overwritten():
    text = CHAIN.replace("dot(%b, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "add(%b, %a)")
    text = text.replace("dot(%c, %a)", "dot(%c, %b)")
    peak, _ = live_ranges(parse(text))
    assert peak == 4 * MIB


def test_donated_arguments_hold_the_output():
    header = "HloModule jit_f, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }, y={}"
    peak, timeline = live_ranges(parse(CHAIN.replace(CHAIN.splitlines()[0], header)))
    assert peak == 3 * MIB
    assert "output" not in {b.kind for b in timeline.at_peak}


def test_a_loop_adds_the_peak_of_its_body():
    peak, timeline = live_ranges(parse(LOOP))
    # a is also the loop's state and the output; the body holds y and z at once
    assert peak == 3 * MIB + sum(b.bytes for b in timeline.at_peak if b.bytes < MIB)
    assert max(b.bytes for b in timeline.at_peak) == MIB


def test_memory_spaces_are_apart():
    text = CHAIN.replace("%b = f32[512,512]{1,0}", "%b = f32[512,512]{1,0:S(1)}")
    assert live_ranges(parse(text))[0] == 3 * MIB
    assert live_ranges(parse(text), space=1)[0] == MIB


def test_long_timelines_are_thinned_and_keep_their_peak():
    row = "  %e{n} = f32[512,{m}]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
    rows = "".join(row.format(n=n, m=1 + n % 700) for n in range(5000))
    peak, timeline = live_ranges(parse(CHAIN.replace("  %b = ", rows + "  %b = ")))
    assert len(timeline.position) <= LIMIT
    assert len(timeline.position) == len(timeline.live_bytes)
    assert max(timeline.live_bytes) == peak
    assert timeline.position[0] == 0
    assert timeline.position[-1] == 5003


def test_what_lies_in_memory_held_for_others_takes_none_of_its_own():
    assert live_ranges(parse(CHAIN), held={("b", ())})[0] == 3 * MIB
    assert live_ranges(parse(CHAIN), held={("b", (0,)), ("c", (1,))})[0] == 4 * MIB
    body = live_ranges(parse(LOOP), held={("y", ())})[0]
    assert live_ranges(parse(LOOP))[0] - body == MIB


# Two arrays go through a loop; one is not read behind it, while the other is taken out of its result at the very end.
TWO_THROUGH_A_LOOP = """HloModule jit_h, is_scheduled=true

%body (s: (f32[512,512], f32[512,512])) -> (f32[512,512], f32[512,512]) {
  ROOT %s = (f32[512,512]{1,0}, f32[512,512]{1,0}) parameter(0)
}

%condition (s.1: (f32[512,512], f32[512,512])) -> pred[] {
  %s.1 = (f32[512,512]{1,0}, f32[512,512]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (a: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %b = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %c = f32[512,512]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %init = (f32[512,512]{1,0}, f32[512,512]{1,0}) tuple(%b, %c)
  %loop = (f32[512,512]{1,0}, f32[512,512]{1,0}) while(%init), condition=%condition, body=%body
  %d = f32[512,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %e = f32[512,512]{1,0} dot(%d, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %last = f32[512,512]{1,0} get-tuple-element(%loop), index=1
  ROOT %out = f32[512,512]{1,0} dot(%e, %last), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_taking_one_array_out_of_a_tuple_does_not_hold_the_others():
    peak, _ = live_ranges(parse(TWO_THROUGH_A_LOOP))
    assert peak == 6 * MIB  # where e is made: a, the output, c, d of two, e; no longer b


# A body that writes into its stack, as the first of two results of one fusion.
STACKS = """HloModule jit_k, is_scheduled=true

%fused (p: f32[4,512,512], q: f32[512,512], i: s32[]) -> (f32[4,512,512], f32[512,512]) {
  %p = f32[4,512,512]{2,1,0} parameter(0)
  %q = f32[512,512]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %product = f32[512,512]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %row = f32[1,512,512]{2,1,0} bitcast(%product)
  %stacked = f32[4,512,512]{2,1,0} dynamic-update-slice(%p, %row, %i, %i, %i)
  ROOT %both = (f32[4,512,512]{2,1,0}, f32[512,512]{1,0}) tuple(%stacked, %product)
}

ENTRY %main (a: f32[512,512], i: s32[]) -> f32[4,512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %stack = f32[4,512,512]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %both.1 = (f32[4,512,512]{2,1,0}, f32[512,512]{1,0}) fusion(%stack, %a, %i.1), kind=kOutput, calls=%fused
  ROOT %out = f32[4,512,512]{2,1,0} get-tuple-element(%both.1), index=0
}
"""


def test_one_of_several_results_of_a_fusion_may_be_an_update_in_place():
    peak, timeline = live_ranges(parse(STACKS))
    # the argument, the stack once, and the product
    assert peak == 6 * MIB + sum(b.bytes for b in timeline.at_peak if b.bytes < MIB)
