"""What recomputing one operation costs, by an analytic roofline.

Comes in: an operation, and the rates of a chip. Goes out: seconds. These seconds only rank: they decide which values
are candidates and in which order, never what a plan is said to cost. That is read from the target's compiler, which
fuses, pads and schedules in ways that no formula here knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rematplan.program.graph import Graph, Nesting, Operation

# Fused elementwise work is bound by the vector unit, not by memory. On v5e about 8e12 elements a second, ten times the
# bytes that memory delivers; other chips have a similar ratio.
ELEMENTS_PER_BYTE_OF_BANDWIDTH = 10.0
# Operations that only rename, reshape or convert elements disappear in the fusion that reads them.
MOVE_DISCOUNT = 0.01
# A reduction is usually fused with what produces its input, so that about half of that input's traffic is its own.
REDUCTION_TRAFFIC = 0.5
# Below this many FLOPs per element of its largest array an operation does not run on the matrix unit.
MATRIX_FLOPS_PER_ELEMENT = 16
# Nothing is quite free, so that of two equal choices the one with fewer operations wins.
LEAST_SECONDS = 1e-12

_MOVES = frozenset(
    {
        *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "rev", "split", "slice"),
        *("convert_element_type", "stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "iota"),
    }
)
_REDUCTIONS = ("reduce_", "arg", "cum", "sort", "top_k")
_IRREGULAR = ("gather", "scatter", "dynamic_", "random_", "threefry", "rng_")


@dataclass(frozen=True)
class Rates:
    """A chip's peak rates.

    Attributes:
      flops_per_second: by dtype name of the operands ("bfloat16", "float32", ...).
      bytes_per_second: memory bandwidth.
      default_flops_per_second: for dtypes that are not listed; by default the slowest that is.
      link_bytes_per_second: from device to device; 0 where nothing is known of it.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    default_flops_per_second: float | None = field(default=None)
    link_bytes_per_second: float = 0.0

    def flops(self, dtype: str) -> float:
        """Peak FLOPs a second for operands of this dtype."""
        slowest = min(self.flops_per_second.values())
        return self.flops_per_second.get(dtype, self.default_flops_per_second or slowest)


def operation_seconds(graph: Graph, operation: Operation, rates: Rates) -> float:
    """Seconds that recomputing the operation takes as part of a larger region; only good for ranking."""
    sending = operation.sent_bytes / rates.link_bytes_per_second if rates.link_bytes_per_second else 0.0
    return max(_roofline(graph, operation, rates) + sending, LEAST_SECONDS)


def _roofline(graph: Graph, operation: Operation, rates: Rates) -> float:
    read = sum(graph.values[v].bytes for v in operation.inputs)
    written = sum(graph.values[v].bytes for v in operation.outputs)
    values = [graph.values[v] for v in (*operation.inputs, *operation.outputs)]
    elements = [math.prod(v.shape) // v.parts for v in values]
    largest = max(elements, default=0)
    nested = operation.subprogram is not None and operation.subprogram.kind is not Nesting.CUSTOM_RULE
    if nested or operation.flops >= MATRIX_FLOPS_PER_ELEMENT * largest > 0:
        return max(operation.flops / rates.flops(_dtype(graph, operation)), (read + written) / rates.bytes_per_second)
    name = operation.primitive
    if operation.collective:
        return (read + written) / rates.bytes_per_second
    if name.startswith(_REDUCTIONS):
        return REDUCTION_TRAFFIC * read / rates.bytes_per_second
    if name.startswith(_IRREGULAR):
        # what is read is as large as what is written, however large the table
        return (min(read, written) + written) / rates.bytes_per_second
    vector = ELEMENTS_PER_BYTE_OF_BANDWIDTH * rates.bytes_per_second
    outputs = sum(elements[len(operation.inputs) :])
    if name in _MOVES:
        return MOVE_DISCOUNT * outputs / vector
    return max(operation.flops, outputs) / vector


def _dtype(graph: Graph, operation: Operation) -> str:
    """The dtype of the largest operand; of the largest result if there is none."""
    ids = operation.inputs or operation.outputs
    return graph.values[max(ids, key=lambda v: graph.values[v].bytes)].dtype if ids else ""
