"""Run files as the command line reads them: what is damaged in one is an error of the file, not of rematplan."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from rematplan.cli.output import rendered
from rematplan.errors import InputError, RematplanError
from rematplan.report import run as runs
from rematplan.report.run import Run


def read_run(file: Path) -> Run:
    """The run in a file.

    Raises:
      InputError: it holds none, or cannot be read.
      PlanMismatch: it is of an unknown format version.
    """
    return runs.from_document(runs.read_document(file), name=str(file))


def text_of(run: Run, *, file: Path, json: bool) -> str:
    """What is printed of a run that was read from a file: all of it is made before any of it is shown.

    Raises:
      InputError: the record is damaged.
    """
    from rematplan.report import terminal

    with reading(file):
        text = runs.to_text(run.to_json()) if json else rendered(terminal.render_run(run))
        text.encode()  # JSON can hold halves of characters, which no file can
    return text


@contextlib.contextmanager
def reading(file: Path) -> Generator[None]:
    """A record is plain data that anyone may have edited: what is missing in it is an error of the file.

    Raises:
      InputError: what was done in here failed for what is in the record.
    """
    try:
        yield
    except (RematplanError, OSError, MemoryError):
        raise
    except Exception as error:  # renderers of text, pages and charts each have errors of their own
        raise InputError(f"the record in {file} cannot be read ({error!r}); write it anew with --run.") from error
