"""`rematplan inspect`: what the backward pass saves, by module and value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, Options, Progress, Sizes, WorkloadName, execute
from rematplan.cli.workloads import load_workload
from rematplan.report.display import Displayed

PolicyName = Annotated[
    str | None,
    Parameter(
        help="A hand-written configuration (plain, whole, per-block, every-2, every-3, every-4, all-but-last, dots, "
        "dots_with_no_batch_dims, whole-dots, compiler), or a policy of jax.checkpoint_policies that needs no "
        "argument, then around the whole function."
    ),
]


def inspect(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    policy: PolicyName = None,
    plan: Annotated[Path | None, Parameter(help="Inspect with this plan applied.")] = None,
    options: Options = DEFAULTS,
) -> None:
    """Show what the backward pass saves: bytes by module and value, with findings."""

    def action(progress: Progress) -> Displayed:
        import rematplan

        progress(f"tracing {workload}")
        return rematplan.inspect(load_workload(workload, sizes), policy=policy, plan=plan)

    execute("inspect", options, action)
