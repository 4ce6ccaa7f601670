"""The choice that a plan makes, as numbers: spans of consecutive blocks, each with its choices.

Comes in: from whoever measured, what every choice keeps, needs and costs. Goes out: a `Chain` to solve (`solve.py`) and
selections to replay (`simulate.py`). Knows neither programs nor compilers.

A span is a stretch of blocks that may become one region, or stay plain. A selection cuts the chain into spans and takes
one choice for each. The forward pass runs the spans in order and each leaves its kept bytes behind; the backward pass
runs them in reverse, each frees its kept bytes and leaves the gradients of its blocks. What is live (all in bytes):

    forward at span r:   base + kept of earlier spans + forward workspace of r
    turn:                base + kept of all spans + turn
    backward at span r:  base + kept of earlier spans and of r + gradients of later blocks + backward workspace of r
    end:                 base + gradients of all blocks
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Choice:
    """One way to run a span.

    Attributes:
      label: what is done, such as "full" or "statistics"; the same label means the same thing on equal spans.
      kept_bytes: what stays from the span's forward to its backward pass, region inputs included.
      forward_workspace_bytes, backward_workspace_bytes: the largest sum of what else is live while it runs. Backward
        holds replayed values and the gradients that it is making.
      seconds: forward and backward pass together.
    """

    label: str
    kept_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    seconds: float


@dataclass(frozen=True)
class Span:
    """The blocks `[start, stop)` and what can be done with them together."""

    start: int
    stop: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Pick:
    """One span of a selection and the choice taken for it."""

    span: Span
    choice: Choice


Selection = tuple[Pick, ...]


@dataclass(frozen=True)
class Chain:
    """A problem to solve.

    Attributes:
      block_count: number of blocks.
      spans: the spans that a selection can consist of.
      base_bytes: live all the time: arguments, outputs that are not gradients.
      gradient_bytes: by block, what its backward pass leaves behind; empty for none.
      turn_bytes: what is live besides all kept bytes between the forward and the backward pass.
    """

    block_count: int
    spans: tuple[Span, ...]
    base_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    turn_bytes: int = 0

    def __post_init__(self) -> None:
        if self.gradient_bytes and len(self.gradient_bytes) != self.block_count:
            raise ValueError(f"gradient_bytes has {len(self.gradient_bytes)} entries for {self.block_count} blocks")
        reached = {0}
        for span in sorted(self.spans, key=lambda s: s.start):
            if not 0 <= span.start < span.stop <= self.block_count:
                raise ValueError(f"span [{span.start}, {span.stop}) does not lie in {self.block_count} blocks")
            if span.choices and span.start in reached:
                reached.add(span.stop)
        if self.block_count not in reached:
            raise ValueError(f"no sequence of spans covers all {self.block_count} blocks; last reached: {max(reached)}")
        choices = [c for s in self.spans for c in s.choices]
        sizes = [(c.kept_bytes, c.forward_workspace_bytes, c.backward_workspace_bytes) for c in choices]
        if any(b < 0 for row in (*sizes, self.gradient_bytes, (self.base_bytes, self.turn_bytes)) for b in row):
            raise ValueError("bytes cannot be negative")

    def later_gradient_bytes(self, block: int) -> int:
        """Gradients that are live before the backward pass of the blocks up to `block` (exclusive) has run."""
        return sum(self.gradient_bytes[block:])


def describe(selection: Selection) -> str:
    """A short readable label: `5 x statistics, 1 x plain`; spans of several blocks as `2 x full[3]`."""
    kinds = [(p.choice.label, p.span.stop - p.span.start) for p in selection]
    runs = [(kind, sum(1 for _ in group)) for kind, group in groupby(kinds)]
    if len(runs) > 6:  # too mixed to list in order
        runs = list(Counter(kinds).items())
    return ", ".join(f"{n} x {label}{f'[{length}]' if length > 1 else ''}" for (label, length), n in runs)
