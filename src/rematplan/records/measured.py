"""Measurements beside each other: of hand-written configurations, of a plan, of a frontier's plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.records.inspection import Finding
from rematplan.records.model import Model
from rematplan.records.plain import plain
from rematplan.report.display import Displayed
from rematplan.target.measurement import Measurement


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
