"""The records that the interface returns and the command line prints. Plain data; knows no JAX, compiler or solver.

Every record has `to_json()`, whose keys are a contract (JSON Schemas in `report/schemas`), and shows itself in a
terminal and in a notebook.
"""

from rematplan.records.fit import FitPoint, FitRecord, FitRow, SkippedValue
from rematplan.records.inspection import Finding, Inspection, Residual, ResidualGroup
from rematplan.records.listed import Demo, DemoRun, TargetList
from rematplan.records.measured import Comparison, Frontier, FrontierPoint, PlanRecord, Refused, Row
from rematplan.records.model import Decided, Model, ModelModule, ModelValue
from rematplan.records.plain import plain
from rematplan.records.verification import Verification

__all__ = [
    "Comparison",
    "Decided",
    "Demo",
    "DemoRun",
    "Finding",
    "FitPoint",
    "FitRecord",
    "FitRow",
    "Frontier",
    "FrontierPoint",
    "Inspection",
    "Model",
    "ModelModule",
    "ModelValue",
    "PlanRecord",
    "Refused",
    "Residual",
    "ResidualGroup",
    "Row",
    "SkippedValue",
    "TargetList",
    "Verification",
    "plain",
]
