"""A traced program -> the scheduling problem.

Comes in: a `Graph` as `program/trace.py` makes it, usually of the joint forward and backward pass (the trace of a
`value_and_grad`), and what an operation costs. Goes out: a `ScheduleGraph` with a node for each operation, in the order of
the program, and a value for each intermediate.

Inputs, parameters and constants live anyway: they are free here, and a budget for this problem is what remains beside
them. Results of the program stay live to its end. A loop is one operation. Bytes are those of arrays as the program
names them; a compiler fuses some away and orders operations as it likes, so this says what schedules could do at best
with the values of the program, not what a compiler will make of one.
"""

from __future__ import annotations

from collections.abc import Callable

from rematplan.planner.schedule.graph import ScheduleGraph
from rematplan.program.graph import Graph, Operation, ValueKind


def from_program(graph: Graph, *, cost: Callable[[Operation], float] | None = None) -> ScheduleGraph:
    """The scheduling problem of a program.

    Args:
      graph: a traced program.
      cost: of computing an operation once, in any unit; by default its floating-point operations. For seconds, pass
        `price.operation_seconds` with a chip's rates.
    """
    price = _flops if cost is None else cost
    kept = [v.id for v in graph.values if v.kind is ValueKind.INTERMEDIATE]
    number = {value: i for i, value in enumerate(kept)}

    def numbers(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({number[v] for v in values if v in number}))

    return ScheduleGraph(
        costs=tuple(price(operation) for operation in graph.operations),
        sizes=tuple(graph.values[v].bytes for v in kept),
        reads=tuple(numbers(operation.inputs) for operation in graph.operations),
        makes=tuple(numbers(operation.outputs) for operation in graph.operations),
        outputs=numbers(graph.outputs),
        # effects happen once; what crosses devices is computed again like anything else, at its price
        once=tuple(operation.index for operation in graph.operations if operation.barrier),
    )


def _flops(operation: Operation) -> float:
    return operation.flops
