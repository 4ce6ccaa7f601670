"""Regions inside regions: the fastest persistent schedule of a chain, exactly on a grid of bytes.

Comes in: a `Line` of stages, each with what its input and its results take and what it costs, and a budget. Goes out: a
`Nest`: which stages keep what, and which stand together in a region that is planned inside in the same way. This is the
dynamic program of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, arXiv:1911.13214) with a menu for each
stage and with gradients that accumulate. On a uniform line whose stages keep nothing for each other it is Revolve
(Griewank, Walther 2000): what a region does again is what `jax.checkpoint` does again.

The recursion is over stretches `[s, t)` whose input is held, with `m` bytes free beside it. Either stage `s` keeps what a
choice of its menu keeps, then `[s + 1, t)` follows beside that; or `[s, k)` becomes a region, runs forward and keeps
nothing, `[k, t)` follows beside its input alone, and in the backward pass `[s, k)` is run again as a stretch of its own:

    keep:    free bytes of [s + 1, t) = m - input of s + 1 - kept;   then the backward pass of s needs kept + workspace,
             and leaves its gradients
    region:  free bytes of [k, t) = m - input of k;                  then [s, k) has m less the gradients of [k, t)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rematplan.errors import InfeasibleBudget

# Cells of the grid of bytes: sizes are rounded up to whole cells, so that what fits on the grid fits in bytes; down for a
# lower bound on the time.
GRID = 1024


@dataclass(frozen=True)
class StageChoice:
    """What a stage keeps for its own backward pass.

    Attributes:
      kept_bytes: besides its input, until its backward pass.
      workspace_bytes: what else is live while its backward pass runs.
      backward_seconds: backward pass, what it recomputes included.
    """

    label: str
    kept_bytes: int
    workspace_bytes: int
    backward_seconds: float


@dataclass(frozen=True)
class Stage:
    """One block of a line.

    Attributes:
      key: equal for stages that are alike in everything below.
      input_bytes: the value that it reads from the stage before.
      forward_seconds: one forward pass.
      forward_workspace_bytes: what is live while it runs forward besides its input and what is kept, its output included.
      gradient_bytes: what its backward pass leaves behind.
    """

    key: str
    input_bytes: int
    forward_seconds: float
    forward_workspace_bytes: int
    choices: tuple[StageChoice, ...]
    gradient_bytes: int = 0


@dataclass(frozen=True)
class Kept:
    """A stage outside of any further region, with what it keeps."""

    stage: int
    choice: StageChoice


@dataclass(frozen=True)
class Nest:
    """The stages `[start, stop)` in order: each kept, or in a region that is a `Nest` itself.

    Attributes:
      seconds: forward pass and backward pass of everything inside.
    """

    start: int
    stop: int
    parts: tuple[Kept | Nest, ...]
    seconds: float

    @property
    def depth(self) -> int:
        """How many regions stand inside each other: 0 if every stage is kept."""
        return max((1 + p.depth for p in self.parts if isinstance(p, Nest)), default=0)


Line = Sequence[Stage]


def solve(line: Line, *, budget_bytes: int, grid: int = GRID) -> Nest:
    """The fastest nest whose bytes beside the input of the line fit the budget at every moment.

    Args:
      grid: cells of the grid of bytes. Exact where all sizes are whole multiples of a cell; otherwise sizes are rounded
        up, and a schedule that fits by less than a cell for each value held may be missed.

    Raises:
      InfeasibleBudget: nothing fits; carries the least that does, to within a cell.
    """
    table = _Table(line, budget_bytes, grid)
    if not np.isfinite(table.seconds(0, len(line))[-1]):
        least = minimum_budget(line, grid=max(grid, GRID))
        raise InfeasibleBudget(
            f"no nest of regions fits {budget_bytes} bytes; the least found is {least} bytes",
            minimum_bytes=least,
            parts={"held at once": least},
        )
    return table.nest(0, len(line), table.cells)


def bound_seconds(line: Line, *, budget_bytes: int, grid: int = GRID) -> float:
    """Seconds that no nest under the budget is faster than; infinite where none fits.

    Sizes are rounded down to whole cells of the grid: what fits in bytes fits on that grid too.
    """
    table = _Table(line, budget_bytes, grid, rounded_up=False)
    return float(table.seconds(0, len(line))[-1])


def minimum_budget(line: Line, *, grid: int = GRID) -> int:
    """The least budget for which `solve` finds a nest, in bytes, to within a cell of the grid."""
    enough = sum(s.input_bytes + s.gradient_bytes for s in line) + max(
        max(s.forward_workspace_bytes, *(c.kept_bytes + c.workspace_bytes for c in s.choices)) for s in line
    )
    # the grid grows finer with the answer, until it no longer helps
    while True:
        table = _Table(line, enough, grid)
        finite = np.flatnonzero(np.isfinite(table.seconds(0, len(line))))
        least = int(finite[0]) * table.cell if len(finite) else enough
        if least >= enough or table.cell == 1:
            return max(least, 1)
        enough = least


class _Table:
    """Seconds by stretch and free cells; stretches of like stages share a row."""

    def __init__(self, line: Line, budget_bytes: int, grid: int, *, rounded_up: bool = True):
        self._line = line
        self._rounded_up = rounded_up
        self.cell = max(1, -(-budget_bytes // grid))
        self.cells = budget_bytes // self.cell
        count = len(line)
        self._input = np.array([self._in_cells(s.input_bytes) for s in line], dtype=np.int64)
        self._forward = np.concatenate([[0.0], np.cumsum([s.forward_seconds for s in line])])
        self._gradient = np.concatenate([[0], np.cumsum([self._in_cells(s.gradient_bytes) for s in line])])
        self._workspace = np.array([self._in_cells(s.forward_workspace_bytes) for s in line], dtype=np.int64)
        self._row = _rows_by_structure(line)
        self._rows = np.full((int(self._row.max()) + 1, self.cells + 1), np.inf)
        filled = np.zeros(len(self._rows), dtype=bool)
        for length in range(1, count + 1):
            for start in range(count - length + 1):
                row = self._row[start, length]
                if not filled[row]:
                    filled[row] = True
                    self._rows[row] = self._solve(start, start + length)

    def _in_cells(self, size: int) -> int:
        return -(-size // self.cell) if self._rounded_up else size // self.cell

    def seconds(self, start: int, stop: int) -> np.ndarray:
        """By free cells: the least seconds for forward and backward pass of a stretch."""
        return self._rows[self._row[start, stop - start]]

    def nest(self, start: int, stop: int, free: int) -> Nest:
        """The schedule behind a cell of the table."""
        seconds = float(self.seconds(start, stop)[free])
        parts: list[Kept | Nest] = []
        at = start
        while at < stop:
            best, part, left = np.inf, None, free
            for choice in self._line[at].choices:
                row = self._kept(at, stop, choice)
                if row[free] < best:
                    after = self._input[at + 1] if at + 1 < stop else 0
                    best, part = row[free], Kept(at, choice)
                    left = free - self._in_cells(choice.kept_bytes) - int(after)
            splits = self._regions(at, stop)
            if len(splits) and splits[:, free].min() < best:
                split = at + 1 + int(splits[:, free].argmin())
                inside = free - int(self._gradient[stop] - self._gradient[split])
                part = self.nest(at, split, inside)
                left = free - int(self._input[split])
            assert part is not None, "a finite cell has a schedule"
            parts.append(part)
            at = part.stop if isinstance(part, Nest) else part.stage + 1
            free = left
        return Nest(start, stop, tuple(parts), seconds)

    def _solve(self, start: int, stop: int) -> np.ndarray:
        rows = [self._kept(start, stop, choice) for choice in self._line[start].choices]
        splits = self._regions(start, stop)
        if len(splits):
            rows.append(splits.min(axis=0))
        return np.min(rows, axis=0)

    def _kept(self, start: int, stop: int, choice: StageChoice) -> np.ndarray:
        """Seconds if the first stage keeps this."""
        stage = self._line[start]
        kept = self._in_cells(choice.kept_bytes)
        own = stage.forward_seconds + choice.backward_seconds
        later = int(self._gradient[stop] - self._gradient[start + 1])
        after = int(self._gradient[stop] - self._gradient[start])
        need = max(int(self._workspace[start]), kept + self._in_cells(choice.workspace_bytes) + later, after)
        row = np.full(self.cells + 1, np.inf)
        if start + 1 == stop:
            row[need:] = own
            return row
        taken = kept + int(self._input[start + 1])
        rest = self.seconds(start + 1, stop)
        if taken <= self.cells:
            row[taken:] = rest[: self.cells + 1 - taken] + own
        row[:need] = np.inf
        return row

    def _regions(self, start: int, stop: int) -> np.ndarray:
        """Seconds by where a first region ends and by free cells."""
        ends = np.arange(start + 1, stop)
        if not len(ends):
            return np.empty((0, self.cells + 1))
        cells = np.arange(self.cells + 1)
        beside = cells[None, :] - self._input[ends][:, None]
        inside = cells[None, :] - (self._gradient[stop] - self._gradient[ends])[:, None]
        right = self._rows[self._row[ends, stop - ends]]
        left = self._rows[self._row[start, ends - start]]
        forward = (self._forward[ends] - self._forward[start])[:, None]
        seconds = forward + _at(right, beside) + _at(left, inside)
        # the region's forward pass holds one workspace at a time
        need = np.maximum.accumulate(self._workspace[start : stop - 1])[:, None]
        return np.where(cells[None, :] >= need, seconds, np.inf)


def _at(rows: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Each row read at its own cells; infinite below zero."""
    found = np.take_along_axis(rows, np.maximum(cells, 0), axis=1)
    return np.where(cells >= 0, found, np.inf)


def _rows_by_structure(line: Line) -> np.ndarray:
    """By start and length: the same number for stretches of the same stages in the same order."""
    count = len(line)
    known: dict[tuple[int, str], int] = {}
    rows = np.zeros((count, count + 1), dtype=np.int64)
    for start in range(count):
        row = -1
        for length in range(1, count - start + 1):
            row = known.setdefault((row, line[start + length - 1].key), len(known))
            rows[start, length] = row
    return rows
