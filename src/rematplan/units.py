"""Bytes, seconds and counts as people write and read them. Knows nothing of programs, chips or plans."""

from __future__ import annotations

import math
import re

from rematplan.errors import InputError

# Binary prefixes are what compilers and allocators count in; decimal ones are what "12GB" means literally.
_FACTORS = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_BINARY_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_NUMBER = re.compile(r"(?P<number>\d+(?:_\d+)*(?:\.\d+(?:_\d+)*)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z%]*)", re.IGNORECASE)
_SIGNIFICANT_DIGITS = 3


def parse_bytes(text: str | int, *, of: int | None = None) -> int:
    """Reads an amount of memory.

    Args:
      text: bytes as a number, or text: "12GiB" (binary), "12GB" (decimal), "600MiB", "1_000", "80%".
      of: what a percentage is taken of, in bytes; None where there is no such figure.

    Returns:
      A positive number of bytes; fractions of a byte are rounded down.

    Raises:
      InputError: if it cannot be read, is not positive, or is a percentage with nothing to take it of.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise InputError(
            f"{text!r} is not an amount of memory; write bytes as 12GiB, 600MiB, 12GB, 80% or a whole number."
        )
    shown = repr(text)
    match = _NUMBER.fullmatch(str(text).strip().lstrip("+"))
    if match is None:
        if re.match(r"\s*-", str(text)):
            raise InputError(f"{shown} is negative; an amount of memory must be positive, such as 12GiB.")
        raise InputError(
            f"{shown} is not an amount of memory; write it as 12GiB, 600MiB, 12GB, 80% or a number of bytes."
        )
    number = float(match["number"].replace("_", ""))
    unit = match["unit"].lower()
    if unit == "%":
        return _percentage(number, of=of, shown=shown)
    if unit and unit not in _FACTORS:
        raise InputError(
            f"{shown} has an unknown unit {match['unit']!r}; "
            "use B, KiB, MiB, GiB, TiB (binary) or KB, MB, GB, TB (decimal)."
        )
    # Whole bytes stay exact: a float holds only 53 bits.
    digits = match["number"].replace("_", "")
    count = int(digits) * _FACTORS[unit or "b"] if digits.isdigit() else number * _FACTORS[unit or "b"]
    return _positive(count, shown=shown)


def _percentage(number: float, *, of: int | None, shown: str) -> int:
    if of is None:
        raise InputError(f"{shown} is a share of the target's memory, and this target has no such figure; give bytes.")
    if number > 100:
        raise InputError(f"{shown} is more than all of the target's memory ({format_bytes(of)}); give at most 100%.")
    return _positive(of * number / 100, shown=shown)


def _positive(count: float, *, shown: str) -> int:
    if not math.isfinite(count) or int(count) < 1:
        raise InputError(f"{shown} is {'not finite' if not math.isfinite(count) else 'zero'}; give at least one byte.")
    return int(count)


def format_bytes(count: float) -> str:
    """Three significant digits in binary units: `1.53 GiB`, `562 MiB`, `17 B`."""
    for unit, factor in _BINARY_UNITS:
        if abs(count) >= factor:
            return f"{_significant(count / factor)} {unit}"
    return f"{count:.0f} B"


def format_bytes_up(count: int) -> str:
    """Whole MiB (KiB below one MiB), rounded up: a minimum that still suffices when it is typed back in."""
    factor, unit = (1 << 20, "MiB") if count >= 1 << 20 else (1 << 10, "KiB")
    return f"{math.ceil(count / factor)} {unit}"


def format_seconds(seconds: float) -> str:
    """`1.53 s`, `23.6 ms`, `4.10 us`, `2 min 05 s`."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_significant(seconds / factor)} {unit}"
    return "0 s" if seconds == 0 else f"{_significant(seconds / 1e-9)} ns"


def format_count(count: float) -> str:
    """Large counts with decimal prefixes: `815 G`, `35.4 M`, `17`."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{_significant(count / factor)} {unit}"
    return f"{count:.0f}"


def _significant(number: float) -> str:
    digits_before_point = len(f"{abs(number):.0f}")
    return f"{number:.{max(0, _SIGNIFICANT_DIGITS - digits_before_point)}f}"
