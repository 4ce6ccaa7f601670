"""What `verify` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.records.inspection import Finding
from rematplan.records.plain import plain
from rematplan.report.display import Displayed


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
