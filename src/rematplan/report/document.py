"""A run as a file to keep or send: plain text, one self-contained HTML page, or a picture of its charts."""

from __future__ import annotations

import io

from rich.console import Console

from rematplan.errors import InputError
from rematplan.report.choices import choices
from rematplan.report.run import Run
from rematplan.report.terminal import render_run

_COLUMNS = 120


def text_document(run: Run) -> str:
    """The run as plain text."""
    console = Console(file=io.StringIO(), width=_COLUMNS, color_system=None, record=True, force_jupyter=False)
    console.print(render_run(run))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def html_document(run: Run) -> str:
    """The run as one HTML page without anything outside it."""
    from rematplan.report.page import html_page  # brings the template and charts, which text does not need

    return html_page(run)


def picture(run: Run, kind: str) -> bytes:
    """The frontier and the timeline of a run as one picture.

    Args:
      kind: "png" or "svg".

    Raises:
      InputError: the run has neither.
    """
    from rematplan.report import pictures  # as above

    found = choices(run.verb, run.record)
    chart = pictures.frontier_and_timeline(found) if found is not None else None
    if chart is None:
        raise InputError(
            f"a run of {run.verb} has neither a frontier nor a timeline to draw; compare, plan, frontier and measure "
            "write runs that have."
        )
    return pictures.png(chart) if kind == "png" else pictures.svg(chart).encode()
