"""What `inspect` returns: values kept for the backward pass, and findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rematplan.records.plain import plain
from rematplan.report.display import Displayed
from rematplan.scopes import without_indices


@dataclass(frozen=True)
class Residual:
    """One array that the forward pass keeps for the backward pass.

    Attributes:
      bytes: size on one device, unpadded.
      shape, dtype: as in JAX; a residual of a loop is stacked over its steps.
      module: path of the module that made it, `blocks/0/attention`; empty outside modules.
      operation: the primitive that made it; `argument` if it is an argument of the function.
      location: the user's source line, `model.py:12 (fwd)`.
      name: the name that a plan would use for it; empty where it has none.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    operation: str
    location: str
    name: str = ""


@dataclass(frozen=True)
class ResidualGroup:
    """Residuals that differ only in the index of a repeated layer, as one line.

    Attributes:
      count: members.
      bytes: sum over all members.
      shape, dtype, operation, location: of each member, as in `Residual`.
      module: with `*` for the index.
    """

    count: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    operation: str
    location: str


@dataclass(frozen=True)
class Finding:
    """Something about a program that a user should know.

    Attributes:
      code: stable; `docs/findings.md` explains each.
      message: one paragraph: what, why, what to do.
      module, location: where, as in `Residual`; empty where it is about the whole.
      bytes, flops: what is at stake, for one step; None where it is not that.
    """

    code: str
    message: str
    module: str = ""
    location: str = ""
    bytes: int | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Inspection(Displayed):
    """What the backward pass of a function saves.

    Attributes:
      residuals: saved values that are computed by the function, in the order of the program, one entry a value.
      arguments: arguments (parameters, inputs) that the backward pass reads; they exist anyway.
      findings: traps met.
      configuration: what was inspected: "plain", or the policy's name.
    """

    KIND = "inspect"

    residuals: tuple[Residual, ...]
    arguments: tuple[Residual, ...] = ()
    findings: tuple[Finding, ...] = ()
    configuration: str = "plain"

    @property
    def total_bytes(self) -> int:
        """Sum over `residuals`; arguments are not in it."""
        return sum(residual.bytes for residual in self.residuals)

    @property
    def argument_bytes(self) -> int:
        """Sum over `arguments`."""
        return sum(argument.bytes for argument in self.arguments)

    def groups(self) -> tuple[ResidualGroup, ...]:
        """`residuals` folded over repeated layers, largest first."""
        members: dict[tuple[Any, ...], list[Residual]] = {}
        for residual in self.residuals:
            module = without_indices(residual.module)
            key = (module, residual.shape, residual.dtype, residual.operation, residual.location)
            members.setdefault(key, []).append(residual)
        groups = [
            ResidualGroup(len(same), sum(r.bytes for r in same), shape, dtype, module, operation, location)
            for (module, shape, dtype, operation, location), same in members.items()
        ]
        return tuple(sorted(groups, key=lambda group: -group.bytes))

    def to_json(self) -> dict[str, Any]:
        """Keys: configuration, total_bytes, argument_bytes, residuals, groups, arguments, findings."""
        return {
            "configuration": self.configuration,
            "total_bytes": self.total_bytes,
            "argument_bytes": self.argument_bytes,
            "residuals": plain(self.residuals),
            "groups": plain(self.groups()),
            "arguments": plain(self.arguments),
            "findings": plain(self.findings),
        }
