"""`rematplan verify`: proof that a plan leaves the computation as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, Options, Progress, Sizes, WorkloadName, execute
from rematplan.cli.workloads import load_workload
from rematplan.errors import VerificationFailed
from rematplan.report.display import Displayed


def verify(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    plan: Annotated[Path, Parameter(help="The plan file.")],
    scale: Annotated[
        str, Parameter(help="Size of the numerical check: auto (full, or fewer examples), full, or none.")
    ] = "auto",
    options: Options = DEFAULTS,
) -> None:
    """Prove that a plan leaves the computation as it is: same program, same numbers, saved as planned."""

    def action(progress: Progress) -> Displayed:
        import rematplan

        progress(f"tracing {workload}")
        work = load_workload(workload, sizes)
        return rematplan.verify(work, plan=plan, scale=scale, progress=progress)

    record = execute("verify", options, action)
    from rematplan.records import Verification

    if isinstance(record, Verification) and not record.passed:
        raise VerificationFailed(f"{plan} does not compute the same as {workload}: {' '.join(record.differences)}")
