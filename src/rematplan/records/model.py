"""The model as a reader of a report wants it: modules, values, and what configurations do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.records.plain import plain


@dataclass(frozen=True)
class ModelModule:
    """A module, folded over repeated layers.

    Attributes:
      module: its path, with `*` for positions in lists; empty for the function itself.
      count: how many modules the path stands for.
      parameters, parameter_bytes: elements and bytes of those that it holds itself, of all `count` together.
    """

    module: str
    count: int
    parameters: int
    parameter_bytes: int


@dataclass(frozen=True)
class ModelValue:
    """An intermediate value that a backward pass reads, folded over repeated layers.

    Attributes:
      module, name: of the module that computes it, and of the value in there.
      bytes, flops: of one instance: its size on one device, and what computing it takes.
      count: instances; iterations of a loop are instances.
      location: the user's source line.
    """

    module: str
    name: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    flops: float
    count: int
    location: str


@dataclass(frozen=True)
class Decided:
    """What a configuration does with the instances of a value.

    Attributes:
      saved, offloaded, recomputed: how many. None at all: this configuration's backward pass does not read it.
      where: which, by position in the list of layers or by iteration, where they are not all treated alike.
    """

    saved: int
    offloaded: int
    recomputed: int
    where: str = ""


@dataclass(frozen=True)
class Model:
    """The modules of a loss, the values that its backward pass reads, and what configurations do with them.

    Attributes:
      decisions: by configuration, one for each of `values`.
    """

    modules: tuple[ModelModule, ...]
    values: tuple[ModelValue, ...]
    decisions: Mapping[str, tuple[Decided, ...]]

    def to_json(self) -> dict[str, Any]:
        """Keys: modules, values, decisions."""
        return plain(self)
