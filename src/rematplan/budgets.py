"""A budget as the user wrote it, for one target -> bytes per device."""

from __future__ import annotations

from rematplan.errors import InputError
from rematplan.target.target import Target
from rematplan.units import format_bytes, parse_bytes


def budget_bytes(budget: str | int, *, target: Target) -> int:
    """The budget in bytes; a percentage is of the memory that the target's compiler sees.

    Raises:
      InputError: it cannot be read, is not positive, is a percentage where the target has no memory figure, or is more
        than the chip has.
    """
    count = parse_bytes(budget, of=target.memory_bytes)
    if target.memory_bytes is not None and count > target.memory_bytes:
        raise InputError(
            f"the budget of {format_bytes(count)} is more than {target.name} has: its compiler sees "
            f"{format_bytes(target.memory_bytes)}; lower the budget (100% is all there is) or choose a larger chip."
        )
    return count
