"""`rematplan report`: a run file as a document of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, Options
from rematplan.report import run as runs
from rematplan.report.files import check_destination, write_text


def report(
    run_file: Annotated[Path, Parameter(help="A run file that `--run` wrote.")],
    /,
    *,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="Where to write: HTML if it ends in .html, else text.")
    ] = None,
    options: Options = DEFAULTS,
) -> None:
    """Write a report of a run file; without -o, print it."""
    if output is not None:
        check_destination(output, force=options.force)
    run = runs.from_document(runs.read_document(run_file), name=str(run_file))
    if options.json:
        sys.stdout.write(runs.to_text(run.to_json()))
    if output is None:
        if not options.json:
            from rematplan.report import terminal

            terminal.stdout().print(terminal.render_run(run))
        return
    from rematplan.report.document import html_document, text_document

    text = html_document(run) if output.suffix.lower() in {".html", ".htm"} else text_document(run)
    sys.stderr.write(f"Wrote {write_text(output, text, force=options.force)}\n")
