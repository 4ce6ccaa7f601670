"""What every verb shares: its options, where its record goes, and how progress is shown."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from rematplan.cli.output import say, show, write_out
from rematplan.cli.workloads import BUILT_IN
from rematplan.errors import InputError
from rematplan.report.display import Displayed
from rematplan.report.files import check_destination, write_text
from rematplan.report.run import Run, to_text, versions

Progress = Callable[[str], None]

WorkloadName = Annotated[
    str,
    Parameter(help=f"module:factory, file.py:factory, or built-in: {', '.join(BUILT_IN)}."),
]
Sizes = Annotated[str, Parameter(help="key=value words for the factory.", negative=())]
TargetName = Annotated[
    str, Parameter(help="The chip to compile for: tpu-v5e, gpu-h100, cpu, local, ...; rematplan targets lists them.")
]

OwnRegionsChoice = Annotated[
    Literal["keep", "replace"],
    Parameter(help="Checkpoint regions that the model brings along: keep them as they are, or plan inside them."),
]

OffloadChoice = Annotated[
    Literal["never", "host"],
    Parameter(help="Whether loops may keep saved values in the host's memory; copies are predicted, not measured."),
]

ExecutorName = Annotated[
    str | None,
    Parameter(
        help="Where compiles run: local (as many at a time as cores and memory bear), local:N, or dask:ADDRESS, the "
        "scheduler of a Dask cluster."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """Options of every verb."""

    json: Annotated[bool, Parameter(negative=(), help="Print one JSON document and nothing else.")] = False
    run: Annotated[Path | None, Parameter(help="Write the full record to this file.")] = None
    force: Annotated[bool, Parameter(negative=(), help="Replace files that exist.")] = False
    debug: Annotated[bool, Parameter(negative=(), help="Show the traceback of an error.")] = False


DEFAULTS = Options()
# NVIDIA, AMD, and both of the ways in which TPU machines show their chips.
_ACCELERATOR_DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())


def execute(
    verb: str,
    options: Options,
    action: Callable[[Progress], Displayed],
    *,
    target: str = "",
    budget: str | None = None,
    reserve: str | None = None,
    executor: str | None = None,
    writes: Path | None = None,
    contents: Callable[[Displayed], str] | None = None,
) -> Displayed:
    """Runs a verb: checks where its results go, does the work, writes the files, prints the record.

    Args:
      action: does the work; gets a function to say what it is doing.
      target, budget, reserve: checked before the work.
      executor: where everything that the action compiles is compiled; reached before the work.
      writes, contents: a file that the verb writes beside the run record, and its text.
    """
    if target:
        check_target(target, budget=budget, reserve=reserve)
    destinations = [path for path in (options.run, writes) if path is not None]
    for path in destinations:
        check_destination(path, force=options.force)
    if len({path.absolute() for path in destinations}) < len(destinations):
        raise InputError(f"both the result and its run record would go to {options.run}; give two names.")
    settle_platform(target)
    # What the user's code or a library prints must not end up between the braces of the JSON document.
    with _stdout_to_stderr() if options.json else contextlib.nullcontext(), _progress() as progress, _using(executor):
        record = action(progress)
        document = record.to_json()
    try:
        if writes is not None and contents is not None:
            say(f"Wrote {write_text(writes, contents(record), force=options.force)}")
        if options.run is not None:
            run = Run(verb=verb, command=COMMAND_LINE.get(), versions=versions(), target=target, record=document)
            say(f"Wrote {write_text(options.run, to_text(run.to_json()), force=options.force)}")
    finally:  # what was worked out is shown even if a disk turned out to be full
        if options.json:
            write_out(to_text(document))
        else:
            from rematplan.report.terminal import render

            show(render(verb, document))
    return record


def check_target(target: str, *, budget: str | None = None, reserve: str | None = None) -> None:
    """Refuses unknown targets, missing compilers and impossible budgets before any model is built."""
    from rematplan.budgets import budget_bytes
    from rematplan.target.target import resolve

    settle_platform(target)
    resolved = resolve(target)
    if budget is not None:
        budget_bytes(budget, target=resolved, reserve=reserve or 0)


def settle_platform(target: str) -> None:
    """Keeps this process off accelerators that it does not need.

    Programs are traced and lowered here and compiled elsewhere. With libtpu installed and no TPU attached, JAX would
    first look for one (seconds, and lines of warnings); with a GPU attached, it would take most of its memory. The
    platform that a user chose stays, and `local` is about the device itself, if there is one.
    """
    if target != "local" or not any(Path(device).exists() for device in _ACCELERATOR_DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _using(executor: str | None) -> contextlib.AbstractContextManager[object]:
    if executor is None:
        return contextlib.nullcontext()
    from rematplan.target.executors import using

    return using(executor)


@contextlib.contextmanager
def _progress() -> Generator[Progress]:
    """What is being done and for how long, on standard error if that is a terminal; silence otherwise."""
    if not sys.stderr.isatty():  # rich would take FORCE_COLOR for a terminal, and fill files with cursor movements
        yield _silent
        return
    console = Console(stderr=True)
    from rich import progress as bars  # slow to load, and help does not need it

    text = bars.TextColumn("{task.description}", markup=False)  # a plan's name may hold brackets
    with bars.Progress(bars.SpinnerColumn(), text, bars.TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)
        yield lambda message: shown.update(task, description=message)


def _silent(_message: str) -> None:
    """Progress that nobody watches."""


@contextlib.contextmanager
def _stdout_to_stderr() -> Generator[None]:
    """Sends what is written to standard output to standard error, from Python and from compiled code alike."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed
        kept = None
    try:
        if kept is not None:
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
