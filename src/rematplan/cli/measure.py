"""`rematplan measure`: one configuration, one target, one measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, ExecutorName, Options, Progress, Sizes, TargetName, WorkloadName, execute
from rematplan.cli.inspect import PolicyName
from rematplan.cli.workloads import load_workload
from rematplan.report.display import Displayed

MethodName = Annotated[
    str, Parameter(help="compile: the compiler's full result. probe: its schedule and buffers only, in seconds.")
]


def measure(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    target: TargetName,
    policy: PolicyName = None,
    plan: Annotated[Path | None, Parameter(help="Measure with this plan applied.")] = None,
    budget: Annotated[str | None, Parameter(help="Say whether it fits; 12GiB, 600MiB, 12GB, 80%.")] = None,
    method: MethodName = "compile",
    executor: ExecutorName = None,
    options: Options = DEFAULTS,
) -> None:
    """Measure memory and time of one training step on a chip's compiler, plain or under a policy or plan."""

    def action(progress: Progress) -> Displayed:
        import rematplan

        progress(f"tracing {workload}")
        work = load_workload(workload, sizes)
        return rematplan.measure(
            work, target=target, policy=policy, plan=plan, budget=budget, method=method, progress=progress
        )

    execute("measure", options, action, target=target, budget=budget, executor=executor)
