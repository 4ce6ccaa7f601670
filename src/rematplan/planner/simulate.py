"""The referee: replays a selection and counts what is live at every position.

Comes in: a `Chain` and a selection. Goes out: bytes at every position of the forward and the backward pass, and the
peak. It allocates and frees one span after the other and shares no formula with the solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from rematplan.planner.chain import Chain, Selection

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
