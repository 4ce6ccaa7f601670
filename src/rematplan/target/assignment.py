"""Where the TPU compiler put the values of a program in HBM: its buffer assignment, as it dumps it.

Comes in: the text of the dump. Goes out: an `Assignment`: how much HBM the program takes, and which values lie in memory
that is held for others anyway.

What the compiler's memory report calls "Total bytes" is no such figure: it adds the parameters of what SparseCores run
("thread-local"), which are the caller's values once more. Of a transformer on v6e that is a third of all (libtpu 0.0.52).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# `color` is the memory space, and stands only where that is not HBM
_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (color \d+, )?(?:page \d+, )?(.*)")
_VALUE = re.compile(r" value: <\d+ ([\w.\-#]+)(?:\{([\d,]*)\})?(?: \(phi\))? @0>")
_OF_CALLED = "thread-local"  # what a called computation names of its caller's
_HEAP = "preallocated-temp"  # where temporaries lie side by side, and over those that ended


@dataclass(frozen=True)
class Assignment:
    """Of one program.

    Attributes:
      bytes: arguments + outputs + constants + temporaries, with what is lost between them; no code.
      held: values by instruction and tuple path that lie in an argument's, an output's or a constant's memory, themselves or
        before these are written.
    """

    bytes: int
    held: frozenset[tuple[str, tuple[int, ...]]]


def parse_assignment(text: str) -> Assignment:
    """Read one dump.

    Raises:
      ValueError: it names no allocation in HBM.
    """
    total, allocations = 0, 0
    held: set[tuple[str, tuple[int, ...]]] = set()
    is_held = False
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            size, other_memory, kind = allocation.groups()
            counts = other_memory is None and not kind.startswith(_OF_CALLED)
            is_held = counts and not kind.startswith(_HEAP)
            total += counts * int(size)
            allocations += counts
        elif is_held and (value := _VALUE.match(line)):
            held.add((value[1], tuple(int(n) for n in (value[2] or "").split(",") if n)))
    if not allocations:
        raise ValueError("a buffer assignment without allocations in HBM")
    return Assignment(total, frozenset(held))
