"""Collectives in scheduled programs, and how long computation does not hide them."""

from __future__ import annotations

import dataclasses

import pytest

from rematplan.target.chips import chips
from rematplan.target.collectives import Collective
from rematplan.target.cost import program_cost
from rematplan.target.hlo import parse
from rematplan.target.timeline import live_ranges

V5E = chips()["tpu-v5e"]
CLOCK, LINK = V5E.clock_hz, V5E.link_bandwidth
HEADER = "HloModule step, is_scheduled=true, num_partitions=8"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
MIB = 1 << 20
A, PART = "f32[512,512]{1,0}", "f32[64,512]{1,0}"  # 1 MiB, and an eighth of it
GATHERED = 7 / 8 * MIB / LINK


def program(*lines, computations=""):
    body = "\n".join(f"  {line}" for line in lines)
    return parse(f"{HEADER}\n\n{computations}\nENTRY %main (p: f32[64,512]) -> f32[512,512] {{\n{body}\n}}\n")


def product(name, operand, cycles):
    return f"%{name} = {A} fusion(%{operand}), kind=kOutput, calls=%work, " + CYCLES % cycles


WORK = f"%work (q: f32[512,512]) -> f32[512,512] {{\n  ROOT %q = {A} parameter(0)\n}}\n"
PARAMETER = f"%p = {PART} parameter(0)"


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all-reduce", 2 * 7 / 8), ("all-gather", 7 / 8), ("reduce-scatter", 7 / 8), ("collective-permute", 1.0)],
)
def test_a_ring(kind, share):
    assert Collective(kind, MIB, 8).seconds(V5E) == pytest.approx(share * MIB / LINK)
    assert Collective(kind, MIB, 1).seconds(V5E) == 0.0
    assert Collective(kind, MIB, 8).seconds(dataclasses.replace(V5E, link_bandwidth=0.0)) == 0.0


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['x'=2,'y'=4] {'x'}", 2),
        ("mesh['x'=2,'y'=4] {'x','y'}", 8),
        ("{}", 8),
    ],
)
def test_who_takes_part(groups, size):
    gather = f"ROOT %g = {A} all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    (use,) = program_cost(program(PARAMETER, gather), V5E).collectives
    assert (use.kind, use.count, use.bytes) == ("all-gather", 1, MIB)
    assert use.seconds == pytest.approx((size - 1) / size * MIB / LINK)


def test_what_is_not_asynchronous_is_waited_for():
    gather = f"%g = {A} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}"
    cost = program_cost(program(PARAMETER, gather, "ROOT " + product("w", "g", 3000), computations=WORK), V5E)
    assert cost.waiting_seconds == pytest.approx(GATHERED)
    assert cost.cycles == 3000
    assert sum(m.seconds for m in cost.modules) == pytest.approx(GATHERED + 3000 / CLOCK)


@pytest.mark.parametrize("cycles", [1_000, 1_000_000])
def test_computation_between_start_and_done_hides(cycles):
    lines = [
        PARAMETER,
        f"%b = {A} broadcast(%p), dimensions={{0,1}}",
        f"%s = ({PART}, {A}) all-gather-start(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}",
        product("w", "b", cycles),
        f"ROOT %d = {A} all-gather-done(%s)",
    ]
    cost = program_cost(program(*lines, computations=WORK), V5E)
    assert cost.waiting_seconds == pytest.approx(max(0.0, GATHERED - cycles / CLOCK))


def test_a_copy_beside_hides_nothing():
    """Asynchronous copies take no time of the computation, so that nothing can be hidden behind them."""
    lines = [
        PARAMETER,
        f"%b = {A} broadcast(%p), dimensions={{0,1}}",
        f"%s = ({PART}, {A}) all-gather-start(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}",
        f"%c = ({A}, {A}, u32[]) copy-start(%b)",
        f"%e = {A} copy-done(%c)",
        f"ROOT %d = {A} all-gather-done(%s)",
    ]
    assert program_cost(program(*lines), V5E).waiting_seconds == pytest.approx(GATHERED)


def test_one_link_for_all():
    gathers = [
        f"%s{n} = ({PART}, {A}) all-gather-start(%p), channel_id={n}, replica_groups=[1,8]<=[8], dimensions={{0}}"
        for n in (1, 2)
    ]
    lines = [PARAMETER, *gathers, f"%d1 = {A} all-gather-done(%s1)", f"ROOT %d2 = {A} all-gather-done(%s2)"]
    cost = program_cost(program(*lines), V5E)
    assert cost.waiting_seconds == pytest.approx(2 * GATHERED)
    assert [(use.kind, use.count) for use in cost.collectives] == [("all-gather", 2)]


def test_fusions_that_carry_a_collective_along():
    """As TPUs have it: one fusion starts, one computes beside it, one ends, and all hold the same gather."""
    gather = f"%%g%d = {A} all-gather(%%a%d), channel_id=7, replica_groups=[1,8]<=[8], dimensions={{0}}"

    def held(n, name, root):
        lines = (
            f"%{name} (a: f32[64,512]) -> f32[512,512] {{",
            f"  %a{n} = {PART} parameter(0)",
            f"  {gather % (n, n)}",
        )
        return "\n".join((*lines, f"  {root}", "}", ""))

    computations = WORK + "".join(
        (
            held(1, "one", f'ROOT %r1 = {A} custom-call(%g1), custom_call_target="AsyncCollectiveStart"'),
            held(2, "two", f"ROOT %r2 = {A} copy(%g2)"),
            held(3, "three", f'ROOT %r3 = {A} custom-call(%g3), custom_call_target="AsyncCollectiveDone"'),
        )
    )
    lines = [
        PARAMETER,
        f"%s = {A} fusion(%p), kind=kCustom, calls=%one",
        f"%m = {A} fusion(%p), kind=kOutput, calls=%two, " + CYCLES % 3000,
        f"ROOT %e = {A} fusion(%p), kind=kCustom, calls=%three",
    ]
    cost = program_cost(program(*lines, computations=computations), V5E)
    assert [(use.kind, use.count, use.bytes) for use in cost.collectives] == [("all-gather", 1, MIB)]
    assert cost.cycles == 3000
    assert cost.waiting_seconds == pytest.approx(GATHERED - 3000 / CLOCK)


SMALL, LARGE = "f32[16,128]{1,0}", "f32[135,512]{1,0}"  # 8 KiB, and 270
SENT = 8 * 1024 + 270 * 1024
SCRATCH = "s32[1024]{0:S(8)}"

IN_PLACE = "output_to_operand_aliasing={{2,0}: (0, {2,0})}"


def computation(name, *lines):
    """Of two parameters, with these lines."""
    parameters = (f"%a = {SMALL} parameter(0)", f"%b = {LARGE} parameter(1)")
    head = f"%{name} (a: f32[16,128], b: f32[135,512]) -> (f32[16,128], f32[135,512]) {{"
    return "\n  ".join((head, *parameters, *lines)) + "\n}\n"


# the same all-reduce as compilers write them
REDUCE = "all-reduce(%a, %b), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add"
WRITTEN = {
    "whole": ([f"ROOT %r = ({SMALL}, {LARGE}) {REDUCE}"], ""),
    "pair": (
        [
            f"%s = ({SMALL}, {LARGE}) {REDUCE.replace('(', '-start(', 1)}",
            f"ROOT %r = ({SMALL}, {LARGE}) all-reduce-done(%s)",
        ],
        "",
    ),
    "wrapped": (
        [
            f"%s = (({SMALL}, {LARGE}), ({SMALL}, {LARGE}), u32[]{{:S(2)}}) async-start(%a, %b), calls=%sends",
            f"ROOT %r = ({SMALL}, {LARGE}) async-done(%s)",
        ],
        computation("sends", f"ROOT %r = ({SMALL}, {LARGE}) {REDUCE}"),
    ),
    "on SparseCores": (
        [
            f"%s = ((), (), ({SCRATCH})) async-start(), calls=%sends",
            f"%u = (({SMALL}, {LARGE}), ({SMALL}, {LARGE}), ({SCRATCH})) async-update(%s, %a, %b), {IN_PLACE}",
            f"ROOT %r = ({SMALL}, {LARGE}) async-done(%u)",
        ],
        computation(
            "held",
            f"%t = ({SMALL}, {LARGE}) tuple(%a, %b)",
            f"%x = {SMALL} get-tuple-element(%t), index=0",
            f"%y = {LARGE} get-tuple-element(%t), index=1",
            f"ROOT %r = ({SMALL}, {LARGE}) {REDUCE.replace('%a, %b', '%x, %y')}",
        )
        + computation("sends", f"ROOT %r = ({SMALL}, {LARGE}) custom-call(%a, %b), called_computations={{%held}}"),
    ),
}


def written(how, *between):
    lines, computations = WRITTEN[how]
    lines = [f"%a = {SMALL} parameter(0)", f"%b = {LARGE} parameter(1)", *lines[:-1], *between, lines[-1]]
    return program(*lines, computations=computations + WORK)


@pytest.mark.parametrize("how", WRITTEN)
def test_however_it_is_written_a_collective_moves_and_takes_the_same(how):
    cost = program_cost(written(how), V5E)
    (use,) = cost.collectives
    assert (use.kind, use.count, use.bytes) == ("all-reduce", 1, SENT)
    assert cost.bytes_accessed == 2 * SENT  # read and written
    assert cost.waiting_seconds == pytest.approx(2 * 7 / 8 * SENT / LINK)
    assert cost.roofline_seconds == 0.0  # it waits, and does not compute
    peak, _ = live_ranges(written(how))
    assert peak == 2 * SENT


@pytest.mark.parametrize("how", [how for how in WRITTEN if how != "whole"])
def test_and_what_is_computed_meanwhile_hides_it(how):
    cost = program_cost(written(how, f"%m = {A} broadcast(%a), dimensions={{0,1}}", product("w", "m", 1000)), V5E)
    computed = (
        1000 / CLOCK + MIB / V5E.bandwidth + 8 * 1024 / V5E.bandwidth
    )  # the product, and the broadcast's roofline
    assert cost.waiting_seconds == pytest.approx(2 * 7 / 8 * SENT / LINK - computed)


def test_updates_of_what_was_started_with_its_operands_change_nothing():
    lines, computations = WRITTEN["wrapped"]
    update = f"%u = (({SMALL}, {LARGE}), ({SMALL}, {LARGE}), u32[]{{:S(2)}}) async-update(%s)"
    lines = [f"%a = {SMALL} parameter(0)", f"%b = {LARGE} parameter(1)", lines[0], update, lines[1].replace("%s", "%u")]
    module = program(*lines, computations=computations)
    plain = program_cost(written("wrapped"), V5E)
    cost = program_cost(module, V5E)
    assert (cost.collectives, cost.bytes_accessed) == (plain.collectives, plain.bytes_accessed)
    assert cost.waiting_seconds == plain.waiting_seconds
    assert live_ranges(module)[0] == 2 * SENT


def test_a_program_of_one_device_communicates_nothing():
    entry = f"ENTRY %main (p: f32[64,512]) -> f32[64,512] {{\n  ROOT {PARAMETER}\n}}\n"
    cost = program_cost(parse(f"HloModule step, is_scheduled=true\n\n{entry}"), V5E)
    assert (cost.collectives, cost.waiting_seconds) == ((), 0.0)
