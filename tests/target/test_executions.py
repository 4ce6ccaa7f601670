"""How often scheduled instructions run."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from rematplan.target.executions import executions, trip_count
from rematplan.target.hlo import parse
from tests.target.hlo_texts import LOOP

KNOWN = re.compile(r'"known_trip_count":\{"n":"\d+"\},?')


def test_loop_trip_count_from_the_condition():
    module = parse(LOOP)
    (loop,) = [i for i in module.entry.instructions if i.opcode == "while"]
    assert trip_count(module, module.entry, loop) == 5
    counts = {i.name: times for i, times in executions(module)}
    assert counts["y"] == 5
    assert counts["out"] == 1


def test_known_trip_count_wins():
    text = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    module = parse(text)
    assert {times for i, times in executions(module) if i.name == "y"} == {3}


def test_asynchronous_copies_are_one_instruction():
    text = """HloModule m, is_scheduled=true

%moved (p: f32[512,512]) -> f32[128,512] {
  %p = f32[512,512]{1,0} parameter(0)
  ROOT %s = f32[128,512]{1,0:S(1)} slice(%p), slice={[0:128], [0:512]}
}

ENTRY %e (a: f32[512,512]) -> f32[128,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %start = ((f32[512,512]{1,0}), f32[128,512]{1,0:S(1)}, s32[]) async-start(%a), calls=%moved
  ROOT %done = f32[128,512]{1,0:S(1)} async-done(%start)
}
"""
    assert [i.opcode for i, _ in executions(parse(text))] == ["parameter", "async-start", "async-done"]


# begins at, adds, while it is ... than
COUNTERS = [
    (9, -1, "GE", 0, 10),
    (9, -1, "GT", -1, 10),
    (9, -3, "GT", 0, 3),
    (3, 2, "LT", 21, 9),
    (0, 2, "LE", 8, 5),
    (0, 3, "LT", 10, 4),
    (-4, 1, "LT", 0, 4),
    (12, -4, "NE", 0, 3),
    (5, 1, "LT", 5, 0),
]


def turns(text):
    module = parse(text)
    return [
        trip_count(module, computation, i)
        for computation in module.computations.values()
        for i in computation.instructions
        if i.opcode == "while"
    ]


def counting(begin, step, direction, end, text=LOOP):
    text = text.replace("%zero = s32[] constant(0)", f"%zero = s32[] constant({begin})")
    text = text.replace("%one = s32[] constant(1)", f"%one = s32[] constant({step})")
    return text.replace("constant(5)", f"constant({end})").replace("direction=LT", f"direction={direction}")


@pytest.mark.parametrize(("begin", "step", "direction", "end", "expected"), COUNTERS)
def test_counters(begin, step, direction, end, expected):
    assert turns(counting(begin, step, direction, end)) == [expected]
    # the other way around
    swapped = LOOP.replace("compare(%i.1, %trips)", "compare(%trips, %i.1)")
    other = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
    assert turns(counting(begin, step, other, end, swapped)) == [expected]


def test_counters_inside_of_fusions_and_behind_copies():
    text = LOOP.replace(
        "  ROOT %less = pred[] compare(%i.1, %trips), direction=LT",
        "  ROOT %less = pred[] fusion(%i.1, %trips), kind=kLoop, calls=%wrapped",
    ).replace("%next = s32[] add(%i, %one)", "%moved = s32[] copy(%i)\n  %next = s32[] add(%one, %moved)")
    wrapped = """%wrapped (a.1: s32[], b.1: s32[]) -> pred[] {
  %b.1 = s32[] parameter(1)
  %a.1 = s32[] parameter(0)
  ROOT %c.1 = pred[] compare(%a.1, %b.1), direction=LT
}

%body"""
    assert turns(text.replace("%body", wrapped, 1)) == [5]


def test_a_limit_that_is_carried_along():
    text = LOOP.replace("(s32[], f32[512,512]{1,0})", "(s32[], f32[512,512]{1,0}, s32[])")
    text = text.replace("%trips = s32[] constant(5)", "%trips = s32[] get-tuple-element(%s.1), index=2")
    text = text.replace("tuple(%next, %z)", "tuple(%next, %z, %n)").replace(
        "%one = s32[] constant(1)", "%one = s32[] constant(1)\n  %n = s32[] get-tuple-element(%s), index=2"
    )
    text = text.replace("tuple(%zero, %a)", "tuple(%zero, %a, %five)").replace(
        "%zero = s32[] constant(0)", "%zero = s32[] constant(0)\n  %five = s32[] constant(5)"
    )
    assert turns(text) == [5]


@pytest.mark.parametrize(
    ("change", "by", "expected"),
    [
        ("%zero = s32[] constant(0)", "%zero = s32[] parameter(1)", 5),  # where it begins is not known
        ("add(%i, %one)", "multiply(%i, %one)", 5),
    ],
)
def test_counters_that_cannot_be_followed(change, by, expected):
    assert turns(LOOP.replace(change, by)) == [expected]


def test_a_loop_that_cannot_be_followed_turns_at_least_once():
    text = LOOP.replace("add(%i, %one)", "multiply(%i, %one)").replace("constant(5)", "constant(0)")
    assert turns(text) == [1]


def down(x):
    return jax.lax.while_loop(lambda s: s[0] >= 0, lambda s: (s[0] - 1, jnp.tanh(s[1] @ x)), (jnp.int32(9), x))[1]


def every_other(x):
    return jax.lax.while_loop(lambda s: s[0] < 21, lambda s: (s[0] + 2, jnp.tanh(s[1] @ x)), (jnp.int32(3), x))[1]


def scanned(x):
    return jax.grad(lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=7)[0].sum())(x)


@pytest.mark.parametrize("function", [down, every_other, scanned])
def test_counted_as_the_compiler_counts_where_it_says_so(function):
    text = jax.jit(function).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile().as_text()
    known = turns(text)
    assert "known_trip_count" in text
    assert turns(KNOWN.sub("", text)) == known
    assert all(n > 1 for n in known)
