"""`rematplan frontier`: plans from the smallest feasible budget to the fastest found."""

from __future__ import annotations

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


def frontier(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    target: TargetName,
    own_regions: OwnRegionsChoice = "keep",
    offload: OffloadChoice = "never",
    executor: ExecutorName = None,
    options: Options = DEFAULTS,
) -> None:
    """Trade memory for time: plans from the smallest feasible budget to the fastest found."""

    def action(progress: Progress) -> Displayed:
        import rematplan

        progress(f"tracing {workload}")
        return rematplan.frontier(
            load_workload(workload, sizes), target=target, own_regions=own_regions, offload=offload, progress=progress
        )

    execute("frontier", options, action, target=target, executor=executor)
