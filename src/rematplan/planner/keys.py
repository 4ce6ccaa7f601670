"""When two stretches of operations compute the same thing.

Comes in: operations of a `Graph`. Goes out: a hash of their structure: primitives and parameters, wiring, shapes and
dtypes, what the backward pass needs, what is handed on. Values are numbered by first use, so neither names nor
positions count; scalar literals are no part of `Operation.signature` and do not count either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from rematplan.program.graph import Graph, Operation, Value, ValueKind


class Keys:
    """Canonical hashes of stretches of one graph. Nested programs are hashed once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nested: dict[int, str] = {}

    def __call__(self, operations: Sequence[Operation], outputs: Sequence[int]) -> str:
        """The hash of these operations, of which later ones read, or the program returns, `outputs`."""
        return _hash(self._lines(self._graph, operations, outputs))

    def _lines(self, graph: Graph, operations: Sequence[Operation], outputs: Sequence[int]) -> list[str]:
        number: dict[int, int] = {}

        def wire(value: int) -> str:
            known = number.get(value)
            if known is not None:
                return str(known)
            number[value] = len(number)
            return f"{number[value]}:{_type(graph.values[value])}"

        lines: list[str] = []
        for op in operations:
            made = set(op.outputs)
            read = " ".join(map(wire, op.inputs))
            wrote = " ".join(map(wire, op.outputs))
            # a set, so that the order in which needs were found does not matter
            needs = " ".join(sorted(f"{wire(v)}{'o' if v in made else ''}" for v in op.needed))
            lines.append(f"{op.signature or op.primitive}|{read}|{wrote}|{needs}|{op.barrier}|{self._subprogram(op)}")
        lines.append("returns " + " ".join(map(wire, outputs)))
        return lines

    def _subprogram(self, op: Operation) -> str:
        if op.subprogram is None:
            return ""
        sub = op.subprogram
        if id(sub.graph) not in self._nested:
            inner = self._lines(sub.graph, sub.graph.operations, sub.graph.outputs)
            self._nested[id(sub.graph)] = _hash(inner)
        return f"{sub.kind.value}*{sub.length}/{sub.constants}/{sub.carries}:{self._nested[id(sub.graph)]}"


def _type(value: Value) -> str:
    kind = "" if value.kind is ValueKind.INTERMEDIATE else value.kind.value
    return f"{kind}{value.dtype}{list(value.shape)}"


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
