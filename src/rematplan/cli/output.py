"""What the command line prints. A reader that has gone (`| head`) ends the printing; it is no error, and hides none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType


def open_closed() -> None:
    """Gives the program standard streams where it was started without (`>&-`): Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end


def write_out(text: str = "") -> None:
    """Prints a text, and whatever was printed before, to standard output."""
    _write(sys.stdout, text)


def show(renderable: RenderableType) -> None:
    """Prints a record's rendering to standard output."""
    write_out(rendered(renderable))


def rendered(renderable: RenderableType) -> str:
    """What standard output would show of a record."""
    from rematplan.report import terminal

    console = terminal.stdout()
    with console.capture() as whole:
        console.print(renderable)
    return whole.get()


def say(message: str) -> None:
    """Prints a line to standard error."""
    _write(sys.stderr, f"{message}\n")


class PipeConsole(Console):
    """A console that outlives its reader; rich's own ends the program with 1."""

    def on_broken_pipe(self) -> None:
        _silence(self.file)


def _write(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: IO[str]) -> None:
    """Lets a stream lead nowhere: what it still holds must not fail again when the interpreter flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
