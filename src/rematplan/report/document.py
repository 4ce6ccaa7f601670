"""A run as a file to keep or send: plain text, or one self-contained HTML page around the same text."""

from __future__ import annotations

import html
import io

from rich.console import Console

from rematplan.report.run import Run
from rematplan.report.terminal import render_run

_COLUMNS = 120

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>body {{ margin: 2rem; }} pre {{ font: 14px/1.25 ui-monospace, monospace; }}</style></head>
<body><pre>{body}</pre></body>
</html>
"""


def text_document(run: Run) -> str:
    """The run as plain text."""
    console = Console(file=io.StringIO(), width=_COLUMNS, color_system=None, record=True, force_jupyter=False)
    console.print(render_run(run))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def html_document(run: Run) -> str:
    """The run as one HTML page without anything outside it."""
    return _PAGE.format(title=html.escape(f"rematplan {run.verb}"), body=html.escape(text_document(run)))
