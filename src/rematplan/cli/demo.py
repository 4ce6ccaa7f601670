"""`rematplan demo`: the main job on built-in models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, Options, Progress, execute
from rematplan.cli.output import say
from rematplan.report.display import Displayed
from rematplan.report.files import check_folder


def demo(
    *,
    out: Annotated[Path, Parameter(help="The folder for plans, run records and the report.")] = Path("rematplan-demo"),
    options: Options = DEFAULTS,
) -> None:
    """Plan the built-in models beside what people write by hand, verify the plans, and say what was won."""
    check_folder(out, force=options.force)

    def action(progress: Progress) -> Displayed:
        from rematplan.demo import run_demo

        return run_demo(out, progress=progress)

    execute("demo", options, action)
    say(f"Wrote plans, run records, HTML reports (open MODEL.report.html) and report.txt to {out}")
