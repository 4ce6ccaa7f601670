"""A budget as the user wrote it, for one target -> bytes per device."""

from __future__ import annotations

import re
from numbers import Integral

from rematplan.errors import InputError
from rematplan.target.target import Target
from rematplan.units import format_bytes, parse_bytes

_NOTHING = re.compile(r"\s*\+?0[0_]*(?:\.0[0_]*)?\s*(?P<unit>[a-z%]*)\s*", re.IGNORECASE)


def budget_bytes(budget: str | int, *, target: Target, reserve: str | int = 0) -> int:
    """The budget in bytes; a percentage is of the memory that the target's compiler sees.

    Args:
      reserve: taken off: room for what else lives in the device's memory.

    Raises:
      InputError: it cannot be read, is not positive, is a percentage where the target has no memory figure, is more than
        the chip has, or nothing of it is left beside the reserve.
    """
    count = parse_bytes(_whole(budget), of=target.memory_bytes)
    if target.memory_bytes is not None and count > target.memory_bytes:
        raise InputError(
            f"the budget of {format_bytes(count)} is more than {target.name} has: its compiler sees "
            f"{format_bytes(target.memory_bytes)}; lower the budget (100% is all there is) or choose a larger chip."
        )
    kept = _reserve_bytes(_whole(reserve), target=target)
    if kept >= count:
        raise InputError(
            f"the reserve of {format_bytes(kept)} leaves nothing of the budget of {format_bytes(count)}; lower the reserve."
        )
    return count - kept


def _whole(amount: str | int) -> str | int:
    """NumPy's whole numbers as Python's; anything else as it is."""
    return int(amount) if isinstance(amount, Integral) and not isinstance(amount, bool) else amount


def _reserve_bytes(reserve: str | int, *, target: Target) -> int:
    """As `parse_bytes`, but nothing may be kept free, too."""
    nothing = _NOTHING.fullmatch(str(reserve))
    if nothing is None or isinstance(reserve, bool):
        return parse_bytes(reserve, of=target.memory_bytes)
    if nothing["unit"] != "%":
        parse_bytes(f"1{nothing['unit']}")  # the unit has to be one all the same
    return 0


def budget_or_memory(budget: str | int | None, *, target: Target, reserve: str | int = 0) -> int:
    """As `budget_bytes`; without a budget, all that the target's compiler sees.

    Raises:
      InputError: also where there is neither a budget nor a memory figure.
    """
    chosen = target.memory_bytes if budget is None else budget
    if chosen is None:
        raise InputError(f"{target.name} has no memory figure to fit into; give a budget, such as 12GiB.")
    return budget_bytes(chosen, target=target, reserve=reserve)
