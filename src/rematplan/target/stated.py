"""What every compiler states of a compiled program, under the names of a `Measurement`."""

from __future__ import annotations

from typing import Any

from rematplan.target.cost import ProgramCost


def stated(memory: Any, cost: ProgramCost) -> dict[str, Any]:
    """Sizes from the compiler's memory statistics, and what was counted in its program."""
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": cost.flops,
        "bytes_accessed": cost.bytes_accessed,
        "host_bytes": cost.host_bytes,
        "collectives": cost.collectives,
        "waiting_seconds": cost.waiting_seconds,
    }
