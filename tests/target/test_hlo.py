"""The parser of scheduled HLO text."""

from __future__ import annotations

import time

import pytest

from rematplan.scopes import module_path
from rematplan.target.hlo import dtype_bits, parse, shape_leaves
from tests.target.hlo_texts import CHAIN


@pytest.mark.parametrize(
    ("shape", "bytes_", "space"),
    [
        ("f32[8192,1024]{1,0:T(8,128)}", 8192 * 1024 * 4, 0),
        ("f32[16,8,512,1]{2,1,0,3:T(8,128)}", 16 * 8 * 512 * 4, 0),  # the size-1 dimension is major: nothing is padded
        ("f32[100,100]{1,0:T(8,128)}", 104 * 128 * 4, 0),  # padded to the tile
        ("bf16[512,512]{1,0:T(8,128)(2,1)S(1)}", 512 * 512 * 2, 1),
        ("pred[16]{0:T(512)(128)(4,1)}", 512, 0),
        ("s4[10]{0}", 5, 0),
        ("f8e4m3fn[3]{0}", 3, 0),
        ("f32[]", 4, 0),
        ("token[]", 0, 0),
    ],
)
def test_shape_bytes_and_space(shape, bytes_, space):
    (leaf,) = shape_leaves(shape)
    assert (leaf.bytes, leaf.space) == (bytes_, space)


def test_tuple_shapes_are_flattened_with_their_paths():
    leaves = shape_leaves("((f32[2,3]{1,0}), /*index=1*/bf16[4]{0:T(256)S(1)}, (s32[], u8[7]{0}))")
    assert [leaf.path for leaf in leaves] == [(0, 0), (1,), (2, 0), (2, 1)]
    assert [leaf.dimensions for leaf in leaves] == [(2, 3), (4,), (), (7,)]
    assert [leaf.space for leaf in leaves] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("shape", "other", "may"),
    [
        ("f32[512,512]{1,0}", "f32[512,512]{1,0}", True),
        ("f32[512,512]{1,0}", "f32[512,512]", True),  # the default
        ("f32[512,512]{1,0}", "f32[512,512]{0,1}", False),  # transposed
        ("f32[1,64,32]{1,2,0}", "f32[1,64,32]{2,1,0}", False),
        ("f32[1,64,32]{2,0,1}", "f32[64,1,32]{2,1,0}", True),  # dimensions of 1 lie nowhere
        ("f32[1,64,32]{2,1,0}", "f32[64,32]{1,0}", True),
        ("f32[32,64]{0,1}", "f32[64,32]{1,0}", True),  # the same bytes under other names
        ("f32[32,64]{1,0}", "f32[64,32]{1,0}", False),
        ("f32[2048]{0}", "f32[64,32]{0,1}", True),  # not known
    ],
)
def test_what_may_lie_where_another_lies(shape, other, may):
    (one,), (two,) = shape_leaves(shape), shape_leaves(other)
    assert one.may_lie_in(two) is may
    assert two.may_lie_in(one) is may


def test_unknown_types_of_8_and_4_bits():
    assert (dtype_bits("f8e8m0fnu"), dtype_bits("f4e2m1fn"), dtype_bits("c128")) == (8, 4, 128)


def test_instructions():
    module = parse(CHAIN)
    assert module.name == "jit_f"
    assert [i.opcode for i in module.entry.instructions] == ["parameter", "dot", "dot", "dot"]
    b = module.entry.instructions[1]
    assert b.operands == ("a", "a")
    assert b.cycles == 100
    assert b.attribute("lhs_contracting_dims") == "{1}"
    assert module.entry.root.name == "d"
    assert module_path(b.op_name) == "blocks/0/attn"


def test_locations_skip_flax():
    module = parse(CHAIN)
    assert module.location(2) == "model.py:12 (loss)"
    assert module.location(1) == "model.py:12 (loss)"
    assert module.location(None) == ""
    assert [function for _, _, function in module.frames(2)] == ["Linear.__call__", "loss"]


def test_operands_printed_with_shapes():
    text = CHAIN.replace("dot(%a, %a)", "dot(f32[512,512]{1,0:T(8,128)S(1)} %a, f32[512,512]{1,0} %a)")
    assert parse(text).entry.instructions[1].operands == ("a", "a")


def test_elements_of_tuples_written_as_operands_are_instructions():
    """jaxlib 0.12 writes no `get-tuple-element` in what libtpu dumps."""
    text = """HloModule m, is_scheduled=true

ENTRY %e (a: f32[4]) -> f32[2] {
  %a = f32[4]{0} parameter(0)
  %w = (f32[4]{0}, /*index=1*/(s32[], f32[2]{0:T(256)S(1)})) custom-call(%a)
  %b = f32[2]{0} negate(%w#1#1)
  ROOT %c = f32[2]{0} select(%w#1#0, %b, %w#1#1)
}
"""
    instructions = parse(text).entry.instructions
    assert [i.name for i in instructions] == ["a", "w", "w#1", "w#1#1", "w#1#0", "b", "c"]
    inner, element = instructions[2:4]
    assert (inner.opcode, inner.operands, inner.attribute("index")) == ("get-tuple-element", ("w",), "1")
    assert (element.opcode, element.operands, element.attribute("index")) == ("get-tuple-element", ("w#1",), "1")
    assert [leaf.path for leaf in inner.leaves] == [(0,), (1,)]
    assert [(leaf.bytes, leaf.space) for leaf in element.leaves] == [(1024, 1)]
    assert instructions[-1].operands == ("w#1#0", "b", "w#1#1")


def test_calls_that_run_beside_others_are_known_by_their_short_names():
    text = """HloModule m, is_scheduled=true

%sparse (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={}
}

ENTRY %e (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %s = ((), (), s32[4]{0}) custom-call-start(), async_execution_thread="sparsecore", called_computations={%sparse}
  %u = ((f32[4]{0}), f32[4]{0}, s32[4]{0}) custom-call-update(%s, %a)
  %d = f32[4]{0} custom-call-done(%u)
  %k = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%d)
  %l = f32[4]{0} copy-done(%k)
  ROOT %c = f32[4]{0} custom-call(%l)
}
"""
    instructions = parse(text).entry.instructions
    opcodes = ["async-start", "async-update", "async-done", "copy-start", "copy-done", "custom-call"]
    assert [i.opcode for i in instructions[1:]] == opcodes
    assert instructions[1].called == ("sparse",)


def test_the_largest_integer_is_no_estimate_of_cycles():
    text = CHAIN.replace('"estimated_cycles":"100"', f'"estimated_cycles":"{2**63 - 1}"')
    assert text != CHAIN
    b = parse(text).entry.instructions[1]
    assert b.cycles is None


def test_aliased_outputs():
    aliases = "{ {0}: (2, {}, may-alias), {1, 3}: (0, {}, must-alias) }"
    header = f"HloModule m, is_scheduled=true, input_output_alias={aliases}, x={{}}"
    module = parse(CHAIN.replace(CHAIN.splitlines()[0], header))
    assert module.aliased_outputs == {(0,), (1, 3)}
    assert parse(CHAIN).aliased_outputs == frozenset()


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="entry computation"):
        parse("HloModule broken\n")


def test_megabytes_are_parsed_in_a_second():
    line = CHAIN.splitlines()[-3]  # d
    padding = ' , backend_config={"window_config":{"x":"' + "0" * 400 + '"}}'
    many = "\n".join(line.replace("ROOT %d", f"%d{n}").split(", backend_config")[0] + padding for n in range(10_000))
    text = CHAIN.replace("  ROOT %d", many + "\n  ROOT %d")
    start = time.process_time()
    module = parse(text)
    assert len(module.entry.instructions) == 10_004
    assert len(text) > 5_000_000
    assert time.process_time() - start < 2.0
