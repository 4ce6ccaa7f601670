"""`rematplan report`: a run file as a document of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, Options
from rematplan.cli.output import say, write_out
from rematplan.cli.runfiles import read_run, reading, text_of
from rematplan.errors import InputError
from rematplan.report import run as runs
from rematplan.report.files import check_destination, write_bytes


def report(
    run_file: Annotated[Path, Parameter(help="A run file that `--run` wrote.")],
    comparison: Annotated[
        Path | None,
        Parameter(
            help="The run file of compare for the same workload: its rows in place of those that a search estimated."
        ),
    ] = None,
    /,
    *,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="Where to write: HTML if it ends in .html, else text.")
    ] = None,
    png: Annotated[Path | None, Parameter(help="Write the frontier and the timeline alone, as a PNG.")] = None,
    svg: Annotated[Path | None, Parameter(help="Write the frontier and the timeline alone, as an SVG.")] = None,
    options: Options = DEFAULTS,
) -> None:
    """Write a report of a run file; without -o, --png or --svg, print it. --run writes the run that it shows."""
    named = [path for path in (output, png, svg) if path is not None]
    written = [*named, *([options.run] if options.run is not None else [])]
    for path in written:
        check_destination(path, force=options.force)
    if len({path.resolve() for path in written}) < len(written):
        raise InputError(f"two results would go to {written[0]}; give each a name of its own.")
    run = read_run(run_file)
    if comparison is not None:
        beside = read_run(comparison)
        with reading(comparison):
            run = runs.with_comparison(run, beside)
    from rematplan.report.document import html_document, picture, text_document

    contents: list[tuple[Path, bytes]] = []  # everything is made before anything is written
    if options.run is not None:
        contents.append((options.run, text_of(run, file=run_file, json=True).encode()))
    with reading(run_file):
        if output is not None:
            is_page = output.suffix.lower() in {".html", ".htm"}
            contents.append((output, (html_document(run) if is_page else text_document(run)).encode()))
        contents += [(path, picture(run, kind)) for path, kind in ((png, "png"), (svg, "svg")) if path is not None]
    if options.json or not named:
        write_out(text_of(run, file=run_file, json=options.json))
    for path, content in contents:
        say(f"Wrote {write_bytes(path, content, force=options.force)}")
