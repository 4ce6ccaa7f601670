"""What the command line lists: targets, and the runs of the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.records.plain import plain
from rematplan.report.display import Displayed


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
