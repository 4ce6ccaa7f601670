"""The fastest path through a chain under a budget, exactly, by label setting.

Comes in: a `Chain` and a budget, perhaps costs between neighbours and restrictions on what labels occur. Goes out: the
fastest selection and a proven lower bound.

All that the future of a partial selection depends on is where it ends, its last label and how many bytes it keeps: both
the forward and the backward pass at a later span see the kept bytes of earlier spans as one sum. So partial selections
("labels") are compared at each node (block position and state) by kept bytes and seconds, and dominated ones dropped.
That is exact. Three things keep it fast:

- `slack`: the most that can be kept at a node so that some completion fits, for any budget at once;
- `relaxed`: a lower bound on the seconds still to come by kept bytes, from the same recursion on bytes rounded down to
  a grid;
- a first pass that keeps only the most promising labels of each node, whose result bounds the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from rematplan.planner.chain import Chain, Choice, Pick, Selection, Span

SwitchSeconds = Callable[[str, str], float]

# Cells of the grid on which seconds to come are bounded: fine enough that the bound is within a percent or so.
GRID = 2048
# Labels kept for each node in one pass. Most chains are exact in the first; the last bounds memory and time, and what
# it drops is accounted for in the lower bound.
WIDTHS = (256, 4096, 65536)
# Seconds this close are equal.
RELATIVE_ROUNDING = 1e-12


@dataclass(frozen=True)
class Restriction:
    """Which labels of choices a selection may and must hold.

    Attributes:
      excluded: labels that must not occur.
      required: at least one label of each group must occur.
    """

    excluded: frozenset[str] = frozenset()
    required: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class Found:
    """The fastest selection, its seconds, and a lower bound that no selection can beat (equal if solved exactly)."""

    selection: Selection
    seconds: float
    bound_seconds: float


@dataclass(frozen=True)
class _Node:
    """Blocks `[0, block)` are decided; the last label was `label`; required groups in `met` have occurred."""

    block: int
    label: str | None = None
    met: int = 0


@dataclass
class _Arc:
    """One pick from a node. `need` is what must be free besides kept bytes of earlier spans, forward and backward."""

    target: int
    pick: Pick
    kept: int
    need: int
    seconds: float


@dataclass
class _Network:
    nodes: list[_Node] = field(default_factory=list[_Node])  # in order of block, the start first
    arcs: list[list[_Arc]] = field(default_factory=list[list[_Arc]])
    goals: set[int] = field(default_factory=set[int])


class Search:
    """The paths of one chain; budgets can be asked for one after the other."""

    def __init__(
        self, chain: Chain, *, switch_seconds: SwitchSeconds | None = None, restriction: Restriction | None = None
    ) -> None:
        self._chain = chain
        self._switch = switch_seconds
        self._restriction = restriction or Restriction()
        self._network = self._build()
        self._slack = self._slacks()
        self._end_need = sum(chain.gradient_bytes)

    @property
    def minimum_bytes(self) -> int | None:
        """The smallest budget under which a selection fits; None if the restrictions allow no selection."""
        least = self._slack[0]
        return None if least is None else self._chain.base_bytes + max(least, self._end_need)

    def fastest(self, *, budget_bytes: int) -> Found | None:
        """The fastest selection that fits; None if there is none."""
        minimum = self.minimum_bytes
        if minimum is None or budget_bytes < minimum:
            return None
        room = budget_bytes - self._chain.base_bytes
        relaxed = _Relaxation(self._network, self._slack, room)
        best: Found | None = None
        for width in WIDTHS:
            best, lost = self._pass(room, relaxed, width, best)
            if best is not None:
                exact = lost >= best.seconds - RELATIVE_ROUNDING * abs(best.seconds)
                best = Found(best.selection, best.seconds, best.seconds if exact else lost)
                if exact:
                    break
        return best

    def _build(self) -> _Network:
        by_start: dict[int, list[Span]] = {}
        for span in self._chain.spans:
            by_start.setdefault(span.start, []).append(span)
        gradients = self._chain.gradient_bytes or (0,) * self._chain.block_count
        later_gradients = [*accumulate(reversed(gradients), initial=0)][::-1]
        required = self._restriction.required
        network = _Network([_Node(0)], [])
        index = {network.nodes[0]: 0}
        pending: list[list[_Node]] = [[] for _ in range(self._chain.block_count + 1)]
        pending[0] = [network.nodes[0]]
        drafts: dict[_Node, list[tuple[_Node, _Arc]]] = {}
        for block in range(self._chain.block_count):
            if not pending[block]:
                continue
            picks = _picks(by_start.get(block, ()), self._restriction)
            needs = [self._need(pick.choice, later_gradients[pick.span.stop]) for pick in picks]
            for node in pending[block]:
                draft = drafts[node] = []
                for pick, need in zip(picks, needs, strict=True):
                    choice, stop = pick.choice, pick.span.stop
                    met = node.met
                    for bit, group in enumerate(required):
                        met |= (choice.label in group) << bit
                    target = _Node(stop, choice.label if self._switch else None, met)
                    seconds = choice.seconds
                    if self._switch is not None and node.label is not None:
                        seconds += self._switch(node.label, choice.label)
                    draft.append((target, _Arc(-1, pick, choice.kept_bytes, need, seconds)))
                    if target not in index:
                        index[target] = -1
                        pending[stop].append(target)
        network.nodes = [node for level in pending for node in level]
        index = {node: i for i, node in enumerate(network.nodes)}
        for node in network.nodes:
            arcs: list[_Arc] = []
            for target, arc in drafts.get(node, ()):
                arc.target = index[target]
                arcs.append(arc)
            network.arcs.append(arcs)
        complete = (1 << len(required)) - 1
        last = self._chain.block_count
        network.goals = {i for i, node in enumerate(network.nodes) if node.block == last and node.met == complete}
        return network

    @staticmethod
    def _need(choice: Choice, gradients: int) -> int:
        """What must be free besides what earlier spans keep, in the forward and in the backward pass."""
        return max(choice.forward_workspace_bytes, gradients + choice.backward_workspace_bytes + choice.kept_bytes)

    def _slacks(self) -> list[int | None]:
        """By node: what must be free besides kept bytes so far, on the completion that needs least; None without any.

        Every limit on kept bytes is the budget less some constant, so this does not depend on the budget.
        """
        slack: list[int | None] = [None] * len(self._network.nodes)
        for i in reversed(range(len(slack))):
            if i in self._network.goals:
                slack[i] = self._chain.turn_bytes
            options = [max(a.need, s + a.kept) for a in self._network.arcs[i] if (s := slack[a.target]) is not None]
            if options:
                slack[i] = min(options)
        return slack

    def _pass(self, room: int, relaxed: _Relaxation, width: int, known: Found | None) -> tuple[Found | None, float]:
        """One sweep over all nodes; returns the best selection known and the least bound among dropped labels."""
        arrivals: list[list[_Labels]] = [[] for _ in self._network.nodes]
        arrivals[0] = [_Labels.start()]
        settled: list[_Labels | None] = [None] * len(arrivals)
        limit = known.seconds if known else math.inf
        lost = math.inf
        for i, arcs in enumerate(self._network.arcs):
            if not arrivals[i]:
                continue
            labels = _merge(arrivals[i])
            arrivals[i] = []
            bound = labels.seconds + relaxed.to_come(i, labels.kept)
            promising = bound < limit - RELATIVE_ROUNDING * abs(limit) if limit < math.inf else np.isfinite(bound)
            labels, bound = labels.take(promising), bound[promising]
            if len(bound) > width:
                order = np.argsort(bound, kind="stable")
                lost = min(lost, float(bound[order[width]]))
                labels = labels.take(np.sort(order[:width]))
            settled[i] = labels
            for number, arc in enumerate(arcs):
                free = _free(room, arc, self._slack)
                if free is not None:
                    moved = labels.along(arc, i, number, int(np.searchsorted(labels.kept, free, side="right")))
                    if len(moved.kept):
                        arrivals[arc.target].append(moved)
        best = known
        for i in self._network.goals:
            labels = settled[i]
            if labels is not None and len(labels.kept):
                at = int(np.argmin(labels.seconds))
                if best is None or labels.seconds[at] < best.seconds:
                    best = Found(self._trace(settled, i, at), float(labels.seconds[at]), -math.inf)
        return best, lost

    def _trace(self, settled: Sequence[_Labels | None], node: int, at: int) -> Selection:
        picks: list[Pick] = []
        while node != 0:
            labels = settled[node]
            assert labels is not None
            previous, number = int(labels.node[at]), int(labels.arc[at])
            picks.append(self._network.arcs[previous][number].pick)
            node, at = previous, int(labels.parent[at])
        return tuple(reversed(picks))


@dataclass(frozen=True)
class _Labels:
    """Partial selections at one node, by increasing kept bytes and decreasing seconds, each with the way back."""

    kept: np.ndarray
    seconds: np.ndarray
    node: np.ndarray
    arc: np.ndarray
    parent: np.ndarray

    @staticmethod
    def start() -> _Labels:
        zero = np.zeros(1, dtype=np.int64)
        return _Labels(zero, np.zeros(1), zero, zero, zero)

    def take(self, which: np.ndarray) -> _Labels:
        return _Labels(self.kept[which], self.seconds[which], self.node[which], self.arc[which], self.parent[which])

    def along(self, arc: _Arc, node: int, number: int, count: int) -> _Labels:
        """The first `count` labels after one more pick."""
        full = lambda x: np.full(count, x, dtype=np.int64)
        return _Labels(
            self.kept[:count] + arc.kept,
            self.seconds[:count] + arc.seconds,
            full(node),
            full(number),
            np.arange(count, dtype=np.int64),
        )


def _merge(parts: Sequence[_Labels]) -> _Labels:
    """All labels that no other one beats in kept bytes and seconds."""
    columns = ("kept", "seconds", "node", "arc", "parent")
    joined = _Labels(*(np.concatenate([getattr(p, c) for p in parts]) for c in columns))
    order = np.lexsort((joined.seconds, joined.kept))
    seconds = joined.seconds[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(seconds)[:-1]])
    return joined.take(order[seconds < before])


class _Relaxation:
    """A lower bound on the seconds still to come, by node and kept bytes."""

    def __init__(self, network: _Network, slack: Sequence[int | None], room: int) -> None:
        self._cell = max(1, -(-(room + 1) // GRID))
        cells = room // self._cell + 1
        self._table = np.full((len(network.nodes), cells), np.inf)
        for i in reversed(range(len(network.nodes))):
            row = self._table[i]
            own = slack[i]
            if i in network.goals and own is not None and room >= own:
                row[: (room - own) // self._cell + 1] = 0.0
            for arc in network.arcs[i]:
                free = _free(room, arc, slack)
                if free is not None:
                    # kept bytes and limits both rounded down: a relaxation, because sums of rounded bytes are smaller
                    count, shift = free // self._cell + 1, arc.kept // self._cell
                    count = min(count, cells - shift)
                    np.minimum(
                        row[:count], self._table[arc.target, shift : shift + count] + arc.seconds, out=row[:count]
                    )

    def to_come(self, node: int, kept: np.ndarray) -> np.ndarray:
        return self._table[node, kept // self._cell]


def _free(room: int, arc: _Arc, slack: Sequence[int | None]) -> int | None:
    """The most kept bytes with which an arc can be taken and completed; None if it cannot."""
    after = slack[arc.target]
    if after is None:
        return None
    free = room - max(arc.need, after + arc.kept)
    return free if free >= 0 else None


def _picks(spans: Sequence[Span], restriction: Restriction) -> list[Pick]:
    """The picks that start at one block and may occur, without those that a twin beats in everything.

    A twin has the same span and label, so that it means the same to neighbours and to restrictions.
    """
    picks: list[Pick] = []
    for span in spans:
        allowed = [c for c in span.choices if c.label not in restriction.excluded]
        for i, choice in enumerate(allowed):
            twins = [o for j, o in enumerate(allowed) if j != i and o.label == choice.label]
            if not any(_beats(o, choice) for o in twins):
                picks.append(Pick(span, choice))
    return picks


def _beats(a: Choice, b: Choice) -> bool:
    row = lambda c: (c.kept_bytes, c.forward_workspace_bytes, c.backward_workspace_bytes, c.seconds)
    return row(a) != row(b) and all(x <= y for x, y in zip(row(a), row(b), strict=True))
