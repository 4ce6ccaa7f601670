"""The cheapest values to save in a region, as a minimum cut.

Comes in: the recompute problem of a region (`menu.Stretch`) and a price per saved byte. Goes out: the set of saved
values that minimizes recompute seconds + price * saved bytes. What the backward pass needs is connected to the source.
Every value leads to the operation that makes it, with the price of saving the value as capacity; every operation leads
to its inputs, without limit, and to the sink, with its own cost as capacity. Operations on the source's side are
recomputed; cut edges from values are saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

if TYPE_CHECKING:
    from rematplan.planner.menu import SaveSet, Stretch

# scipy's maximum_flow takes int32 capacities. No cut that matters is worth more than the bound it is scaled by, so the
# flow stays below this, and edges "without limit" can have twice that.
_SCALE = 2**30
_UNLIMITED = 2**31 - 1
_SOURCE, _SINK = 0, 1


class RecomputeNetwork:
    """The network of one region; its capacities are set for each price."""

    def __init__(self, problem: Stretch) -> None:
        self._problem = problem
        graph, defined = problem.graph, problem.defined
        self._values = list(defined)
        value_node = {v: 2 + i for i, v in enumerate(self._values)}
        operation_node = {i: 2 + len(defined) + i - problem.start for i in range(problem.start, problem.stop)}

        edges: list[tuple[int, int]] = []
        seconds: list[float] = []  # the capacity of an edge is seconds + price * bytes
        saved: list[float] = []

        def add(tail: int, head: int, cost: float, size: float) -> None:
            edges.append((tail, head))
            seconds.append(cost)
            saved.append(size)

        for v in problem.needed:
            add(_SOURCE, value_node[v], np.inf, 0.0)
        for v, producer in defined.items():
            if v in problem.unsavable:
                add(value_node[v], operation_node[producer], np.inf, 0.0)
            else:
                add(value_node[v], operation_node[producer], 0.0, float(graph.values[v].bytes))
        for op in graph.operations[problem.start : problem.stop]:
            node = operation_node[op.index]
            add(node, _SINK, problem.seconds[op.index - problem.start], 0.0)
            for v in dict.fromkeys(op.inputs):
                if v in value_node:
                    add(node, value_node[v], np.inf, 0.0)
        self._nodes = 2 + len(defined) + len(operation_node)
        self._tails, self._heads = np.array(edges, dtype=np.int32).reshape(-1, 2).T
        self._seconds, self._bytes = np.array(seconds), np.array(saved)

    def cheapest(self, price: float, *, bound: float) -> SaveSet:
        """The save set that minimizes recompute seconds + price * saved bytes.

        Args:
          price: seconds per byte.
          bound: the cost of some known save set at this price; capacities are scaled by it, so that the result is
            exact to about 1e-9 of it per edge.
        """
        with np.errstate(over="ignore"):
            scaled = np.rint((self._seconds + price * self._bytes) * (_SCALE / bound))
        # an edge of capacity 0 would make its operation or value free to cut; one unit keeps small sets preferred
        capacity = np.where(scaled > _SCALE, _UNLIMITED, np.maximum(scaled, 1)).astype(np.int32)
        shape = (self._nodes, self._nodes)
        matrix = csr_matrix((capacity, (self._tails, self._heads)), shape=shape)
        residual = matrix - maximum_flow(matrix, _SOURCE, _SINK).flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = np.zeros(self._nodes, dtype=bool)
        reached[breadth_first_order(residual, _SOURCE, return_predecessors=False)] = True
        first_operation = 2 + len(self._values)
        defined, start = self._problem.defined, self._problem.start
        chosen = {
            v
            for i, v in enumerate(self._values)
            if reached[2 + i] and not reached[first_operation + defined[v] - start]
        }
        return self._problem.save_set(chosen)

    def nothing_recomputed(self) -> SaveSet:
        """The least recomputation that is possible, and of those sets the smallest."""
        # a price so low that all saves together cost less than half of the cheapest operation
        finite = self._seconds[np.isfinite(self._seconds) & (self._seconds > 0)]
        total = float(self._bytes.sum())
        if not len(finite) or not total:
            return self._problem.save_set(())
        price = float(finite.min()) / (2 * total)
        everything = self._problem.save_set(set(self._values).difference(self._fixed()))
        best = everything
        for _ in range(2):  # the second cut is scaled by the first one's cost
            bound = best.recompute_seconds + price * best.saved_bytes
            if bound <= 0:
                return best
            found = self.cheapest(price, bound=bound)
            if found.recompute_seconds + price * found.saved_bytes < bound:
                best = found
        return best

    def _fixed(self) -> set[int]:
        values = range(2, 2 + len(self._values))
        unlimited = {int(t) for t in self._tails[np.isinf(self._seconds)]}
        return {self._values[t - 2] for t in values if t in unlimited}
