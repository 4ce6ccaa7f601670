"""The records that the interface returns and the command line prints. Plain data; knows no JAX, compiler or solver.

Every record has `to_json()`, whose keys are a contract (JSON Schemas in `report/schemas`), and shows itself in a
terminal and in a notebook.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rematplan.report.display import Displayed
from rematplan.scopes import without_indices
from rematplan.target.measurement import Measurement


def plain(value: Any) -> Any:
    """Dataclasses, enums, mappings and sequences as what JSON can hold; numbers that are not finite become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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


@dataclass(frozen=True)
class Row:
    """One configuration and what it costs.

    Attributes:
      name: of the configuration: "plain", "per-block", ...
      measurement: its figures, each with its source.
      note: what is special about it, in a few words.
    """

    name: str
    measurement: Measurement
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """`name`, `note` and the keys of the measurement."""
        return {"name": self.name, "note": self.note, **plain(self.measurement.to_json())}


@dataclass(frozen=True)
class Refused:
    """A configuration that could not be measured.

    Attributes:
      name: of the configuration.
      reason: one sentence.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison(Displayed):
    """Every hand-written configuration of one workload on one target.

    Attributes:
      target: its name.
      rows: in the order they are tried, `plain` first.
      budget_bytes: what the rows are held against; None without a budget.
      refused: what could not be measured.
      findings: traps met.
    """

    KIND = "compare"

    target: str
    rows: tuple[Row, ...]
    budget_bytes: int | None = None
    refused: tuple[Refused, ...] = ()
    findings: tuple[Finding, ...] = ()
    model: Model | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys: target, budget_bytes, rows, refused, findings, model."""
        return {
            "target": self.target,
            "budget_bytes": self.budget_bytes,
            "rows": [row.to_json() for row in self.rows],
            "refused": plain(self.refused),
            "findings": plain(self.findings),
            "model": plain(self.model),
        }


@dataclass(frozen=True)
class PlanRecord(Displayed):
    """A plan with the figures it was chosen by, all as JSON-ready data, since a plan file holds them so.

    Attributes:
      plan: the plan file's document.
      predicted: figures said before that very plan was compiled.
      measured: keys of a measurement: the compiler's figures for the plan applied.
      baselines: rows: hand-written configurations to hold it against.
      bound: `seconds`, and what that rests on.
      budget_bytes: device memory for the whole step.
      status: "fits"; a search that finds nothing that fits raises `InfeasibleBudget` instead.
      notes: decisions that a reader should know, a sentence each.
      findings: keys of a `Finding`: about the program that was planned.
      model: keys of a `Model`: what the hand-written configurations and the plan (`plan`) do with each value; None for a
        plan that was read from a file.
    """

    KIND = "plan"

    plan: Mapping[str, Any]
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any]
    baselines: tuple[Mapping[str, Any], ...]
    bound: Mapping[str, Any]
    budget_bytes: int
    status: str
    notes: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    model: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """One key an attribute."""
        return plain(self)


@dataclass(frozen=True)
class FrontierPoint:
    """The plan found for one budget.

    Attributes:
      budget_bytes: what the plan needs (`required_bytes`), and so the least budget that it is for.
      measurement: its figures: compiled at the ends and some points between, probed elsewhere.
      plan: the plan file's document, which `Plan.load` takes.
    """

    budget_bytes: int
    measurement: Measurement
    plan: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """`budget` in bytes, the keys of the measurement, and `plan`."""
        return {"budget": self.budget_bytes, **plain(self.measurement.to_json()), "plan": plain(self.plan)}


@dataclass(frozen=True)
class Frontier(Displayed):
    """Plans from the smallest feasible budget to the fastest found: each point is faster than all that need less.

    Attributes:
      target: its name.
      points: by rising bytes.
      baselines: hand-written configurations as they were probed.
      model: what each hand-written configuration, and each point (`point 0`, `point 1`, ...), does with each value.
    """

    KIND = "frontier"

    target: str
    points: tuple[FrontierPoint, ...]
    baselines: tuple[Row, ...] = ()
    model: Model | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys: target, points, baselines, model."""
        return {
            "target": self.target,
            "points": [point.to_json() for point in self.points],
            "baselines": [row.to_json() for row in self.baselines],
            "model": plain(self.model),
        }


@dataclass(frozen=True)
class Verification(Displayed):
    """Whether a planned function computes the same thing as the original.

    Attributes:
      structure_equal: the planned program without its remat and names is the original one, operation by operation.
      outputs_max_error, gradients_max_error: largest error relative to the largest magnitude of the array; None if the
        numbers were not computed.
      state_equal: module state written by the forward pass agrees.
      passed: all of it.
      saved_as_planned: what is really saved and recomputed is what the plan says.
      tolerances: by dtype, what the errors were held against.
      size: "full", or what was reduced to compute the numbers here.
      differences: what was wrong, one sentence each; empty if it passed.
      findings: what the program holds that a user should know, whether it passed or not.
    """

    KIND = "verify"

    structure_equal: bool
    outputs_max_error: float | None
    gradients_max_error: float | None
    state_equal: bool
    saved_as_planned: bool
    passed: bool
    tolerances: Mapping[str, float]
    size: str
    differences: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """One key an attribute."""
        return plain(self)


@dataclass(frozen=True)
class TargetList(Displayed):
    """The targets that can be named, and whether their compilers are here.

    Attributes:
      targets: keys of a `TargetInfo`.
    """

    KIND = "targets"

    targets: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Keys: targets."""
        return {"targets": plain(self.targets)}


@dataclass(frozen=True)
class DemoRun:
    """One model of the demo: hand-written configurations beside plans for several budgets.

    Attributes:
      baselines: rows, `plain` first.
      plans: rows with `budget` in bytes.
      verified: what was proved of the plans, as one sentence.
      sentence: what was won, as one sentence.
    """

    workload: str
    target: str
    description: str
    baselines: tuple[Mapping[str, Any], ...]
    plans: tuple[Mapping[str, Any], ...]
    verified: str
    sentence: str


@dataclass(frozen=True)
class Demo(Displayed):
    """The main job on built-in models."""

    KIND = "demo"

    runs: tuple[DemoRun, ...]

    def to_json(self) -> dict[str, Any]:
        """Keys: runs."""
        return {"runs": plain(self.runs)}
