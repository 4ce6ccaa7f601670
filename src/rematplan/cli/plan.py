"""`rematplan plan`: the cheapest checkpointing that fits a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import (
    DEFAULTS,
    ExecutorName,
    OffloadChoice,
    Options,
    OwnRegionsChoice,
    Progress,
    Sizes,
    TargetName,
    WorkloadName,
    execute,
)
from rematplan.cli.workloads import load_workload
from rematplan.report.display import Displayed


def plan(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    budget: Annotated[str, Parameter(help="Device memory for the whole step: 12GiB, 600MiB, 12GB, 80%.")],
    target: TargetName,
    reserve: Annotated[
        str | None, Parameter(help="Part of the budget to keep free for what else lives there: 1GiB, 5%.")
    ] = None,
    own_regions: OwnRegionsChoice = "keep",
    offload: OffloadChoice = "never",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="Write the plan to this file.")] = None,
    executor: ExecutorName = None,
    options: Options = DEFAULTS,
) -> None:
    """Find the cheapest checkpointing that fits the budget, as the chip's own compiler measures it."""

    def action(progress: Progress) -> Displayed:
        import rematplan

        progress(f"tracing {workload}")
        found = rematplan.plan(
            load_workload(workload, sizes),
            budget=budget,
            target=target,
            reserve=reserve or 0,
            own_regions=own_regions,
            offload=offload,
            progress=progress,
        )
        return found.record()

    def contents(record: Displayed) -> str:
        return json.dumps(record.to_json()["plan"], indent=1) + "\n"

    execute(
        "plan",
        options,
        action,
        target=target,
        budget=budget,
        reserve=reserve,
        executor=executor,
        writes=output,
        contents=contents,
    )
