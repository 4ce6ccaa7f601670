"""`rematplan targets`: the chips that can be named, and whether their compilers are installed."""

from __future__ import annotations

from rematplan.cli.common import DEFAULTS, Options, Progress, execute
from rematplan.report.display import Displayed


def targets(*, options: Options = DEFAULTS) -> None:
    """List the chips that can be named and whether their compilers are installed."""

    def action(_progress: Progress) -> Displayed:
        from rematplan.records import TargetList, plain
        from rematplan.target.target import targets as known

        return TargetList(tuple(plain(info) for info in known()))

    execute("targets", options, action)
