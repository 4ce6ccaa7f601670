"""`rematplan compare`: every hand-written configuration beside each other."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, ExecutorName, Options, Progress, Sizes, TargetName, WorkloadName, execute
from rematplan.cli.measure import MethodName
from rematplan.cli.workloads import load_workload
from rematplan.report.display import Displayed


def compare(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    target: TargetName,
    budget: Annotated[str | None, Parameter(help="Say which configurations fit; 12GiB, 600MiB, 12GB, 80%.")] = None,
    method: MethodName = "compile",
    executor: ExecutorName = None,
    options: Options = DEFAULTS,
) -> None:
    """Measure what people write by hand: no remat, per block, every few blocks, the usual policies."""

    def action(progress: Progress) -> Displayed:
        import rematplan

        progress(f"tracing {workload}")
        work = load_workload(workload, sizes)
        return rematplan.compare(work, target=target, budget=budget, method=method, progress=progress)

    execute("compare", options, action, target=target, budget=budget, executor=executor)
