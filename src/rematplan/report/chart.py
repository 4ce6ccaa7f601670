"""Small charts in block characters: a timeline of live bytes, and points of time against memory.

Comes in: plain numbers; goes out: lines of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rematplan.units import format_bytes, format_seconds

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


@dataclass(frozen=True)
class Mark:
    """A point of a chart of time against memory; later ones are drawn over earlier ones."""

    required_bytes: int
    seconds: float
    symbol: str


def scatter(marks: Sequence[Mark], *, budget_bytes: int | None, width: int, height: int = 10) -> list[str]:
    """Lines of a chart `width` columns wide: memory to the right, time upwards, the budget as a line."""
    xs = [mark.required_bytes for mark in marks] + ([budget_bytes] if budget_bytes is not None else [])
    ys = [mark.seconds for mark in marks]
    if not ys or width < 2:
        return []
    low_x, low_y = min(xs), min(ys)
    span_x, span_y = max(max(xs) - low_x, 1), max(ys) - low_y or 1.0
    column = lambda x: round((x - low_x) / span_x * (width - 1))
    grid = [[" "] * width for _ in range(height)]
    if budget_bytes is not None:
        for line in grid:
            line[column(budget_bytes)] = "┊"
    for mark in marks:
        grid[height - 1 - round((mark.seconds - low_y) / span_y * (height - 1))][column(mark.required_bytes)] = (
            mark.symbol
        )
    labels = [""] * height
    labels[0], labels[-1] = format_seconds(max(ys)), format_seconds(low_y)
    label_width = max(map(len, labels))
    lines = [f"{label:>{label_width}} ┤{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    left, right = format_bytes(low_x), format_bytes(max(xs))
    lines.append(" " * (label_width + 2) + left + right.rjust(max(width - len(left), len(right) + 1)))
    return lines
