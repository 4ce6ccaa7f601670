"""A program as frozen plain data: values, operations and what is nested in them.

Comes in: nothing but numbers and strings. Goes out: the record that planners read. This module does not know JAX;
`trace.py` builds a `Graph` from a function, `residuals.py` adds what differentiation needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class ValueKind(Enum):
    """Where a value comes from."""

    PARAMETER = "parameter"  # an input that is differentiated
    INPUT = "input"  # any other input
    CONSTANT = "constant"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True)
class Value:
    """One array of the program.

    Attributes:
      id: position in `Graph.values`.
      name: stable name, `<module path>/<operation>[.n]`; for inputs the argument's path.
      shape, dtype: as in JAX.
      bytes: size of the array on one device, unpadded.
      parts: into how many parts devices split it; 1 where each of them holds it whole.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: ValueKind
    parts: int = 1


class Nesting(Enum):
    """What kind of subprogram an operation holds."""

    LOOP = "loop"  # lax.scan: body planned inside
    REGION = "region"  # the user's own jax.checkpoint or nnx.remat
    CUSTOM_RULE = "custom_rule"  # custom_jvp, custom_vjp
    SHARD_MAP = "shard_map"
    OPAQUE = "opaque"  # while, cond, and whatever else holds programs: one operation


@dataclass(frozen=True)
class Subprogram:
    """A program nested in an operation.

    Attributes:
      length: trip count of a loop, 1 otherwise.
      constants, carries: of a loop, how many leading inputs of the body are loop constants and carries; the rest are
        slices of stacked inputs.
    """

    kind: Nesting
    graph: Graph
    length: int = 1
    constants: int = 0
    carries: int = 0


@dataclass(frozen=True)
class Operation:
    """One primitive application.

    Attributes:
      index: position in `Graph.operations`.
      name: stable name, as the name of its first output.
      inputs: value ids; literals are left out (they are part of `signature`).
      outputs: value ids.
      needed: ids of its inputs and outputs that the backward pass of this operation reads.
      flops: floating-point operations, loops multiplied by their trip count.
      signature: text that is equal for two operations that compute the same function of their inputs.
      location: the user's source line, `file.py:12 (function)`, empty if unknown.
      barrier: effects or callbacks: never inside a region.
      collective: communicates between devices.
      sent_bytes: that a device sends when partitioned operands have to be gathered or a partitioned sum reduced for it.
    """

    index: int
    primitive: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str = ""
    location: str = ""
    flops: float = 0.0
    needed: tuple[int, ...] = ()
    signature: str = ""
    barrier: bool = False
    collective: bool = False
    subprogram: Subprogram | None = None
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class Graph:
    """A flattened program in execution order. Dead operations are removed."""

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fingerprint: str = ""
    producer: tuple[int, ...] = field(
        default=(), repr=False
    )  # operation index by value id, -1 for inputs and constants

    def last_use(self) -> tuple[int, ...]:
        """By value id: the last operation that reads it; the number of operations for outputs; -1 if never read."""
        last = [-1] * len(self.values)
        for operation in self.operations:
            for value in operation.inputs:
                last[value] = operation.index
        for value in self.outputs:
            last[value] = len(self.operations)
        return tuple(last)
