"""The cheapest selection of steps from a longer sequence, as a mixed-integer linear program.

Comes in: a sequence of candidate steps, some of them mandatory, and a budget. Goes out: a `Program` whose solutions are
the sub-sequences that compute every input before it is read and stay within the budget. Every exact search, every
neighbourhood of the local search and every lower bound here is such a program; only the candidates differ.

For each value, its *events* are the candidate steps that compute or read it. Between two consecutive events the value is
either live or not, one variable `x`; most of these variables are constants or equal to others and never appear:

- reading at an active step needs `x` before it, and `x` after it at most `x` before it;
- computing: `x` after it at most `x` before it plus whether the step is active;
- bytes at a step: each value that is live between the events around it, or up to it, plus what it computes.

A row of bytes at a step that is not active only repeats what its neighbours say, so all rows hold always.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

from rematplan.planner.schedule.candidates import Candidates
from rematplan.planner.schedule.graph import ScheduleGraph

# An expression is a constant 0 or 1, or variable number `expression - FIRST`.
NEVER, ALWAYS, FIRST = 0, 1, 2
# Bytes are scaled so that the budget is this: rounding of the solver (1e-6 per row) is then far below one byte in most
# graphs, and what it still lets through the referee catches.
BUDGET_SCALE = 1000.0


@dataclass(frozen=True)
class Program:
    """minimise `costs @ x + base_cost`, `relations @ x >= relation_floor`, `bytes @ x <= room`, x in {0, 1}.

    Attributes:
      base_cost: of the mandatory steps.
      bytes, room: a row for each step that can exceed the budget, in units of `budget / BUDGET_SCALE`.
      row_steps: by row of `bytes`, its candidate step.
      steps: by candidate step its variable, -1 where it is mandatory or useless.
      hopeless: some step exceeds the budget whatever is selected.
    """

    candidates: Candidates
    costs: np.ndarray
    base_cost: float
    relations: sparse.csr_matrix
    relation_floor: np.ndarray
    bytes: sparse.csr_matrix
    room: np.ndarray
    row_steps: np.ndarray
    steps: np.ndarray
    hopeless: bool

    @property
    def size(self) -> int:
        """How many variables there are."""
        return len(self.costs)

    def chosen(self, x: np.ndarray) -> np.ndarray:
        """By candidate step: whether a solution computes it, besides the mandatory ones."""
        picked = np.zeros(len(self.steps), dtype=bool)
        free = self.steps >= 0
        picked[free] = x[self.steps[free]] > 0.5
        return picked


def formulate(graph: ScheduleGraph, candidates: Candidates, *, budget_bytes: int) -> Program:
    """The program of a selection. Rows of steps that are not `counted` are left out."""
    return _Builder(graph, candidates, budget_bytes).build()


@dataclass
class _Builder:
    """Collects a program value by value.

    Attributes:
      count: variables so far.
      expression: by candidate step, whether it is active.
      row, column, value, floor: the relations, as triplets.
      live: where something is live: expression, first step, step after the last, bytes.
    """

    graph: ScheduleGraph
    candidates: Candidates
    budget_bytes: int
    count: int = 0
    expression: list[int] = field(default_factory=list[int])
    row: list[int] = field(default_factory=list[int])
    column: list[int] = field(default_factory=list[int])
    value: list[float] = field(default_factory=list[float])
    floor: list[float] = field(default_factory=list[float])
    live: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    def build(self) -> Program:
        graph, nodes = self.graph, self.candidates.nodes.tolist()
        mandatory = self.candidates.mandatory.tolist()
        events: list[list[int]] = [[] for _ in graph.sizes]
        for step, node in enumerate(nodes):
            for value in (*graph.reads[node], *graph.makes[node]):
                events[value].append(step)
        for step, useful in enumerate(self._useful(nodes, mandatory)):
            self.expression.append(ALWAYS if mandatory[step] else self._new() if useful else NEVER)
        for value, at in enumerate(events):
            self._walk(value, at, nodes)
        costs = np.zeros(self.count)
        steps = np.full(len(nodes), -1)
        base = 0.0
        for step, node in enumerate(nodes):
            e = self.expression[step]
            if e >= FIRST:
                costs[e - FIRST] = graph.costs[node]
                steps[step] = e - FIRST
            elif e == ALWAYS:
                base += graph.costs[node]
        relations = sparse.csr_matrix((self.value, (self.row, self.column)), shape=(len(self.floor), self.count))
        bytes_, room, row_steps, hopeless = self._bytes(len(nodes))
        return Program(
            self.candidates, costs, base, relations, np.asarray(self.floor), bytes_, room, row_steps, steps, hopeless
        )

    def _useful(self, nodes: list[int], mandatory: list[bool]) -> list[bool]:
        """By step: whether a later step may read what it makes."""
        wanted = set(self.graph.outputs)
        useful = [False] * len(nodes)
        for step in range(len(nodes) - 1, -1, -1):
            node = nodes[step]
            if mandatory[step] or not wanted.isdisjoint(self.graph.makes[node]):
                useful[step] = True
                if mandatory[step]:
                    # an optional step may stay idle, and an earlier one serve what it would have served
                    wanted.difference_update(self.graph.makes[node])
                wanted.update(self.graph.reads[node])
        return useful

    def _walk(self, value: int, at: list[int], nodes: list[int]) -> None:
        """The variables and relations of one value, from its last event to its first."""
        size = self.graph.sizes[value]
        after = ALWAYS if value in self.graph.outputs else NEVER
        self._alive(after, at[-1], len(nodes), size)
        for number in range(len(at) - 1, -1, -1):
            step = at[number]
            active = self.expression[step]
            if nodes[step] == self.graph.maker[value]:
                self.live.append((active, step, step + 1, size))
                if active == ALWAYS or after == NEVER:
                    before = NEVER
                elif active == NEVER:
                    before = after
                else:
                    before = self._new()
                    self._relate([(before, 1.0), (active, 1.0), (after, -1.0)])
            elif ALWAYS in (active, after):
                before = ALWAYS
            elif NEVER in (active, after):
                before = max(active, after)  # whichever is not constant, or never
            else:
                before = self._new()
                self._relate([(before, 1.0), (active, -1.0)])
                self._relate([(before, 1.0), (after, -1.0)])
            if number:
                self._alive(before, at[number - 1], step, size)
            after = before
        assert after == NEVER, f"the first step that makes value {value} must be mandatory and stand before its readers"

    def _alive(self, expression: int, after: int, last: int, size: int) -> None:
        """Live after one step up to and with another."""
        self.live.append((expression, after + 1, last + 1, size))

    def _new(self) -> int:
        self.count += 1
        return FIRST + self.count - 1

    def _relate(self, terms: list[tuple[int, float]]) -> None:
        """The sum of terms is at least zero."""
        floor = 0.0
        for expression, factor in terms:
            if expression == ALWAYS:
                floor -= factor
            elif expression >= FIRST:
                self.row.append(len(self.floor))
                self.column.append(expression - FIRST)
                self.value.append(factor)
        self.floor.append(floor)

    def _bytes(self, length: int) -> tuple[sparse.csr_matrix, np.ndarray, np.ndarray, bool]:
        """The rows of steps that can exceed the budget: matrix, room, steps; and whether one exceeds it in any case."""
        table = np.array([entry for entry in self.live if entry[0] != NEVER and entry[3] > 0], dtype=np.int64)
        expression, start, stop, size = table.reshape(-1, 4).T
        stop = np.minimum(stop, length)
        # what constants and all variables together have live at each step, from what changes at each
        change = np.zeros((2, length + 1), dtype=np.int64)
        for kind, which in enumerate((expression == ALWAYS, expression >= FIRST)):
            np.add.at(change[kind], start[which], size[which])
            np.add.at(change[kind], stop[which], -size[which])
        constant, variable = np.cumsum(change, axis=1)[:, :length]
        counted = self.candidates.counted
        binding = counted & (constant + variable > self.budget_bytes)
        hopeless = bool(np.any(counted & (constant > self.budget_bytes)))
        # one entry for each variable stretch and each such step in it
        row_of = np.cumsum(binding) - 1
        which = expression >= FIRST
        expression, start, stop, size = expression[which], start[which], stop[which], size[which]
        lengths = stop - start
        entry = np.repeat(np.arange(len(lengths)), lengths)
        step = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + start[entry]
        inside = binding[step]
        entry, step = entry[inside], step[inside]
        scale = BUDGET_SCALE / self.budget_bytes
        matrix = sparse.csr_matrix(
            (scale * size[entry], (row_of[step], expression[entry] - FIRST)), shape=(int(binding.sum()), self.count)
        )
        return matrix, scale * (self.budget_bytes - constant[binding]), np.nonzero(binding)[0], hopeless
