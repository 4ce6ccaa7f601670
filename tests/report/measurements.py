"""Measurements with known figures, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from rematplan.target.measurement import Buffer, Measurement, Source, Timeline

MIB = 1 << 20


def measurement(
    *, peak_mib: int = 562, required_mib: int = 593, seconds: float | None = 0.0227, **changes: Any
) -> Measurement:
    """A measurement on tpu-v5e, compiled."""
    figures: dict[str, Any] = {
        "target": "tpu-v5e",
        "source": Source.COMPILED,
        "peak_bytes": peak_mib * MIB,
        "required_bytes": required_mib * MIB,
        "argument_bytes": 100 * MIB,
        "output_bytes": 80 * MIB,
        "temporary_bytes": 400 * MIB,
        "flops": 1.3e12,
        "cycles": None if seconds is None else seconds * 1.5e9,
        "seconds": seconds,
        "sources": {"peak_bytes": "compiled", "seconds": "cycles"},
        "timeline": Timeline(
            position=(0, 50, 60, 100),
            live_bytes=(100 * MIB, peak_mib * MIB, 300 * MIB, 180 * MIB),
            backward_starts=50,
            at_peak=(
                Buffer(72 * MIB, "temporary", "bf16[16,512,2048]", "blocks/0/mlp", "dot_general", "gpt.py:44 (f)"),
            ),
        ),
    }
    return Measurement(**{**figures, **changes})
