"""A timeline of live bytes as a small block-character chart. Comes in: plain numbers; goes out: lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rematplan.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def columns(position: Sequence[int], live_bytes: Sequence[int], *, width: int) -> list[int]:
    """The highest live bytes in each of `width` equal stretches of the schedule.

    Between two points the bytes are those of the earlier one: a timeline is a step function of the instruction.
    """
    if not position or width < 1:
        return []
    start, span = position[0], max(1, position[-1] - position[0])
    highest = [0] * width

    for (here, there), height in zip(pairwise((*position, position[-1])), live_bytes, strict=True):
        first = min(width - 1, (here - start) * width // span)
        # every column that the step overlaps; one that ends where the next column begins does not reach into it
        last = max(first, ((there - start) * width - 1) // span)
        for index in range(first, last + 1):
            highest[index] = max(highest[index], height)
    return highest


def timeline(
    position: Sequence[int], live_bytes: Sequence[int], *, backward_starts: int | None, width: int, height: int = 6
) -> list[str]:
    """Lines of a chart `width` columns wide; the last one marks where the backward pass begins."""
    bars = columns(position, live_bytes, width=width)
    top = max(bars, default=0)
    if not top:
        return []
    label_width = max(len(format_bytes(top)), len("0 B"))
    lines: list[str] = []
    for row in reversed(range(height)):
        label = format_bytes(top) if row == height - 1 else "0 B" if row == 0 else ""
        eighths = (min(8, max(0, round(bar / top * height * 8) - 8 * row)) for bar in bars)
        lines.append(f"{label:>{label_width}} ┤" + "".join(_EIGHTHS[eighth] for eighth in eighths))
    span = max(1, position[-1] - position[0])
    if backward_starts is not None and position[0] <= backward_starts <= position[-1]:
        at = min(width - 1, (backward_starts - position[0]) * width // span)
        marker = "└ backward" if at + len("└ backward") <= width else "backward ┘"
        indent = at if marker.startswith("└") else at + 1 - len(marker)
        lines.append(" " * (label_width + 2) + " " * max(0, indent) + marker)
    return lines
