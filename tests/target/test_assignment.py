"""What the compiler's buffer assignment says a program takes."""

from __future__ import annotations

import pytest

from rematplan.target.assignment import parse_assignment

# In the dump's form (libtpu 0.0.52): an argument, an output that two values lie in, the heap, what a called computation names
# of its caller's, and two other memories.
TEXT = """BufferAssignment:
allocation 0: size 4, color 8, page 0, thread-local:
 value: <1 call-start.1{2} @8> (size=4,offset=0): u32[]{:S(8)}
allocation 1: size 900, color 1, page 0, preallocated-temp:
 value: <2 slice.13 @1> (size=900,offset=0): s8[900]{0:S(1)}
allocation 2: size 512, page 0, thread-local:
 value: <3 param_1.5 @0> (size=512,offset=0): s32[128]{0}
allocation 3: size 64, page 0, maybe-live-out:
 value: <4 fusion.7{0,2} @0> (size=64,offset=0): f32[16]{0}
 value: <5 convert.115 @0> (size=32,offset=0): bf16[16]{0}
 value: <6 while.9{7} (phi) @0> (size=64,offset=0): f32[16]{0}
allocation 4: size 128, page 0, parameter 12, shape |f32[32]| at ShapeIndex {}:
 value: <7 leaves_12_.1 @0> (size=128,offset=0): f32[32]{0}
allocation 5: size 8, page 0, output shape is |(f32[16])|, maybe-live-out:
 value: <8 tuple.3 @0> (size=8,offset=0): (f32[16]{0})
allocation 181: size 2048, page 0, preallocated-temp:
 value: <9 fusion.9 @0> (size=1024,offset=0): f32[256]{0}

Total bytes used: 3699849684 (3.45GiB)

Used values:
<9 fusion.9 @0>
 positions:
  fusion.9
"""


def test_what_is_the_callers_is_not_counted_twice():
    assert parse_assignment(TEXT).bytes == 64 + 128 + 8 + 2048


def test_values_in_memory_that_is_held_for_others():
    held = parse_assignment(TEXT).held
    assert held == {
        ("fusion.7", (0, 2)),
        ("convert.115", ()),
        ("while.9", (7,)),
        ("leaves_12_.1", ()),
        ("tuple.3", ()),
    }


def test_a_text_without_allocations_is_no_assignment():
    with pytest.raises(ValueError, match="without allocations"):
        parse_assignment("BufferAssignment:\n")
