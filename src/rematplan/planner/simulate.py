"""The referee: replays a selection, or a nest of regions, and counts what is live at every position.

Comes in: a `Chain` and a selection, or a line of stages and a `Nest`. Goes out: bytes at every position of the forward
and the backward pass, and the peak. It allocates and frees one thing after the other and shares no formula with the
solvers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from rematplan.planner.chain import Chain, Selection
from rematplan.planner.nesting import Line, Nest

SwitchSeconds = Callable[[str, str], float]


class Phase(Enum):
    """Where in the training step a position lies."""

    FORWARD = "forward"
    TURN = "turn"
    BACKWARD = "backward"
    END = "end"


@dataclass(frozen=True)
class Position:
    """What is live while one span runs.

    Attributes:
      pick: index in the selection; None between the passes and at the end.
      kept_bytes, gradient_bytes, workspace_bytes: the parts of `bytes` besides the chain's base.
    """

    phase: Phase
    pick: int | None
    bytes: int
    kept_bytes: int
    gradient_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class Replay:
    """A selection, replayed.

    Attributes:
      positions: in order of execution.
      peak: the position with the most bytes, the first of several.
      seconds: of all choices, with what neighbours cost each other.
    """

    positions: tuple[Position, ...]
    peak: Position
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.bytes


def replay(chain: Chain, selection: Selection, *, switch_seconds: SwitchSeconds | None = None) -> Replay:
    """Runs a selection on paper.

    Raises:
      ValueError: the selection does not cover every block once, in order.
    """
    positions: list[Position] = []
    kept = gradients = 0

    def here(phase: Phase, pick: int | None, workspace: int) -> None:
        total = chain.base_bytes + kept + gradients + workspace
        positions.append(Position(phase, pick, total, kept, gradients, workspace))

    block = 0
    for index, pick in enumerate(selection):
        if pick.span.start != block:
            raise ValueError(f"block {block} is covered twice or not at all: the next span starts at {pick.span.start}")
        here(Phase.FORWARD, index, pick.choice.forward_workspace_bytes)
        kept += pick.choice.kept_bytes
        block = pick.span.stop
    if block != chain.block_count:
        raise ValueError(f"the selection ends at block {block} of {chain.block_count}")
    here(Phase.TURN, None, chain.turn_bytes)
    for index, pick in reversed(list(enumerate(selection))):
        here(Phase.BACKWARD, index, pick.choice.backward_workspace_bytes)
        kept -= pick.choice.kept_bytes
        gradients += sum(chain.gradient_bytes[pick.span.start : pick.span.stop])
    here(Phase.END, None, 0)

    seconds = math.fsum(p.choice.seconds for p in selection)  # the same in any order
    if switch_seconds is not None:
        labels = [p.choice.label for p in selection]
        seconds += sum(switch_seconds(a, b) for a, b in pairwise(labels))
    return Replay(tuple(positions), max(positions, key=lambda p: p.bytes), seconds)


@dataclass(frozen=True)
class NestReplay:
    """A nest of regions, replayed.

    Attributes:
      peak_bytes: the most that is live at any moment, the input of the line not counted.
      seconds: of every forward and backward pass that was run.
      forward_runs: by stage, how often it ran forward before or during its backward pass.
    """

    peak_bytes: int
    seconds: float
    forward_runs: tuple[int, ...]


def replay_nest(line: Line, nest: Nest) -> NestReplay:
    """Runs a nest on paper, forward and backward, with everything that is held listed by name."""
    held: dict[object, int] = {}
    runs = [0] * len(line)
    peak = 0
    seconds = 0.0

    def here(extra: int) -> None:
        nonlocal peak
        peak = max(peak, sum(held.values()) + extra)

    def forward(stage: int) -> None:
        nonlocal seconds
        here(line[stage].forward_workspace_bytes)
        runs[stage] += 1
        seconds += line[stage].forward_seconds

    def run(part: Nest, owner: object) -> None:
        """Forward and backward pass of a nest whose input somebody holds."""
        nonlocal seconds
        for i, item in enumerate(part.parts):
            first, stop = (item.start, item.stop) if isinstance(item, Nest) else (item.stage, item.stage + 1)
            for stage in range(first, stop):
                forward(stage)
            if not isinstance(item, Nest):
                held[owner, i, "kept"] = item.choice.kept_bytes
            if stop < part.stop:
                held[owner, i, "input of the next"] = line[stop].input_bytes
        for i, item in reversed(list(enumerate(part.parts))):
            if i + 1 < len(part.parts):
                del held[owner, i, "input of the next"]
            if isinstance(item, Nest):
                run(item, (owner, i))
                continue
            here(item.choice.workspace_bytes)
            seconds += item.choice.backward_seconds
            del held[owner, i, "kept"]
            held["gradient", item.stage] = line[item.stage].gradient_bytes
            here(0)  # its input is held still

    run(nest, "line")
    return NestReplay(peak, seconds, tuple(runs))
