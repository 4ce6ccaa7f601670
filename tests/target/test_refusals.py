"""What the TPU compiler says of programs that do not fit; its words as of libtpu 0.0.52."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from rematplan.errors import CompilerError
from rematplan.target import compiler, tpu
from rematplan.target.cache import Cache
from rematplan.target.chips import chips
from rematplan.target.compiler import lower
from rematplan.target.measurement import decode, encode
from rematplan.target.target import resolve
from rematplan.target.tpu import used_bytes
from tests.target.hlo_texts import CHAIN

MIB, GIB = 1 << 20, 1 << 30
ANOTHER = CHAIN.replace("dot(%c, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "add(%c, %a)")
ONE_DEVICE = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.24G of 600.00M hbm. Exceeded capacity by 1M."
)
SEVERAL = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (732.51M) exceeds available HBM (717.00M). HLO module: jit_step."
)
NO_MEMORY_NAMED = "RESOURCE_EXHAUSTED: Ran out of memory on the device."
# of kernels that take more than a core has
WINDOWS = (
    "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation3 [shape = "
    "'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped, tag = 'input window allocation for operator input 0.']"
)
SCRATCH = (
    "RESOURCE_EXHAUSTED: Allocation (size=16777216) would exceed memory (size=1048576) :: #allocation3 [shape = "
    "'s32[4194304]{0:T(128)}', space=smem, size = 0x1000000, scoped, tag = 'scratch operand'] :: smem.1"
)
SCOPED = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %k. Scoped allocation with size 32.00M and limit 16.00M exceeded scoped vmem limit by 16.00M."
)
OLDER = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem."


@pytest.mark.parametrize(("message", "expected"), [(ONE_DEVICE, 1.245 * GIB), (SEVERAL, 732.515 * MIB)])
def test_what_would_have_been_used_is_read_and_rounded_up(message, expected):
    assert used_bytes(message) == pytest.approx(expected, abs=1)


def test_a_message_without_it_says_nothing():
    assert used_bytes("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom") is None


STATS = [f"{kind}_size_in_bytes" for kind in ("argument", "output", "temp", "alias", "generated_code")]
ASSIGNMENT = "BufferAssignment:\nallocation 0: size {}, page 0, preallocated-temp:\n"


def dump(folder, need, program):
    """What the compiler leaves of a program before it says that it does not fit."""
    (folder / "m.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT.format(need))
    (folder / "m.after_optimizations.txt").write_text(program)


def measured(message, *, reported=True, full=True):
    """What becomes of a program whose compiles all end with that message."""

    def compile_(options):
        folder = Path(options["xla_dump_to"])
        if reported:
            dump(folder, 4 * MIB, CHAIN)
        # a probe is always told that nothing fits
        raise RuntimeError(message if "rematplan-compile-" in folder.name else SEVERAL)

    return tpu.measure(
        compile_, target="tpu-v5e", chip=chips()["tpu-v5e"], argument_bytes=MIB, output_bytes=MIB, full=full,
        limit_bytes=64 * MIB, own_rematerialization=False,
    )  # fmt: skip


@pytest.mark.parametrize("message", [ONE_DEVICE, SEVERAL, NO_MEMORY_NAMED])
def test_a_program_that_needs_more_hbm_does_not_fit(message):
    assert measured(message).fits_limit is False


@pytest.mark.parametrize("message", [WINDOWS, SCRATCH, SCOPED, OLDER, "INTERNAL: out of luck"])
def test_a_program_that_never_compiles_is_an_error(message):
    with pytest.raises(RuntimeError) as error:
        measured(message)
    assert str(error.value) == message


def test_a_probe_that_reports_nothing_says_what_the_compiler_said():
    with pytest.raises(RuntimeError) as error:
        measured("", reported=False, full=False)
    assert str(error.value) == SEVERAL


@pytest.mark.parametrize(
    ("first_need", "limits", "need"),
    [
        (64, [4, 48], 40),
        (5, [4], 5),  # never below arguments and outputs, nor twice at the same limit
    ],
)
def test_the_second_probe_is_nearer_to_the_need(first_need, limits, need):
    asked = []

    def compile_(options):
        folder = Path(options["xla_dump_to"])
        asked.append(options["xla_tpu_max_hbm_size_mib"])
        dump(folder, (first_need if len(asked) == 1 else 40) * MIB, CHAIN)
        raise RuntimeError(SEVERAL)

    found = tpu.measure(
        compile_, target="tpu-v6e", chip=chips()["tpu-v6e"], argument_bytes=3 * MIB, output_bytes=MIB, full=False,
        limit_bytes=None, own_rematerialization=False,
    )  # fmt: skip
    assert asked == limits
    assert found.required_bytes - found.code_bytes == pytest.approx(need * MIB, abs=MIB)


@pytest.mark.parametrize(("once", "limits"), [(False, [4, 48]), (True, [4])])
@pytest.mark.parametrize("second", [CHAIN, ANOTHER])
def test_a_probe_says_whether_its_limit_matters(once, limits, second):
    asked = []

    def compile_(options):
        asked.append(options["xla_tpu_max_hbm_size_mib"])
        dump(Path(options["xla_dump_to"]), 64 * MIB, CHAIN if len(asked) == 1 else second)
        raise RuntimeError(SEVERAL)

    found = tpu.measure(
        compile_, target="tpu-v5e", chip=chips()["tpu-v5e"], argument_bytes=3 * MIB, output_bytes=MIB, full=False,
        once=once, limit_bytes=None, own_rematerialization=False,
    )  # fmt: skip
    assert asked == limits
    assert found.limit_matters is (once or second != CHAIN)  # nobody knows after one
    assert decode(encode(found)) == found
    assert "limit_matters" not in found.to_json()


@pytest.mark.parametrize(
    ("limit", "refused", "limits"),
    [
        (64, True, [64]),  # its schedule is one near the need
        (20, True, [20, 48]),
        (None, True, [None]),  # all that the chip has
        (80, False, [80, 48]),
        (None, False, [None, 48]),
    ],
)
def test_a_compile_is_its_own_first_probe(limit, refused, limits):
    asked = []

    def compile_(options):
        asked.append(options.get("xla_tpu_max_hbm_size_mib"))
        dump(Path(options["xla_dump_to"]), 64 * MIB, CHAIN)
        if refused or len(asked) > 1:
            raise RuntimeError(SEVERAL)
        stats = SimpleNamespace(peak_memory_in_bytes=0, **dict.fromkeys(STATS, 0))
        text = SimpleNamespace(to_string=lambda: CHAIN)
        return SimpleNamespace(get_compiled_memory_stats=lambda: stats, hlo_modules=lambda: [text])

    found = tpu.measure(
        compile_, target="tpu-v5e", chip=chips()["tpu-v5e"], argument_bytes=3 * MIB, output_bytes=MIB, full=True,
        limit_bytes=None if limit is None else limit * MIB, own_rematerialization=False,
    )  # fmt: skip
    assert asked == limits
    assert found.fits_limit is (False if refused else None if limit is None else True)
    assert found.required_bytes > 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2048, 8192])  # beyond what a kernel may take of VMEM, and beyond VMEM
def test_a_kernel_that_takes_more_vmem_than_there_is(rows):
    def doubled(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    target = resolve("tpu-v5e")
    whole = jax.ShapeDtypeStruct((rows, 2048), jnp.float32)
    program = lower(lambda x: pl.pallas_call(doubled, out_shape=whole)(x), [whole], target=target)
    with pytest.raises(CompilerError, match="vmem"):
        compiler.measure(program, target=target, cache=Cache(None))
