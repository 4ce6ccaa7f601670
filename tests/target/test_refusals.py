"""What the TPU compiler says of programs that do not fit; its words as of libtpu 0.0.52."""

from __future__ import annotations

import pytest

from rematplan.target.tpu import used_bytes

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.24G of 600.00M hbm. Exceeded hbm capacity by 668.2M.",
            1.245 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (732.51M) exceeds available HBM (717.00M). HLO module: jit_step.",
            732.515 * MIB,
        ),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom", None),
    ],
)
def test_what_would_have_been_used_is_read_and_rounded_up(message, expected):
    found = used_bytes(message)
    assert found == (None if expected is None else pytest.approx(expected, abs=1))
