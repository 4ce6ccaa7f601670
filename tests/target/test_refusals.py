"""What the TPU compiler says of programs that do not fit; its words as of libtpu 0.0.52."""

from __future__ import annotations

import pytest

from rematplan.target.tpu import used_bytes

MIB, GIB = 1 << 20, 1 << 30
ONE_DEVICE = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.24G of 600.00M hbm. Exceeded capacity by 1M."
)
SEVERAL = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (732.51M) exceeds available HBM (717.00M). HLO module: jit_step."
)


@pytest.mark.parametrize(("message", "expected"), [(ONE_DEVICE, 1.245 * GIB), (SEVERAL, 732.515 * MIB)])
def test_what_would_have_been_used_is_read_and_rounded_up(message, expected):
    assert used_bytes(message) == pytest.approx(expected, abs=1)


def test_a_message_without_it_says_nothing():
    assert used_bytes("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom") is None
