"""`rematplan show`: a plan file or a run file, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rematplan.cli.common import DEFAULTS, Options
from rematplan.cli.output import rendered, say, write_out
from rematplan.cli.runfiles import read_run, text_of
from rematplan.errors import InputError, PlanMismatch
from rematplan.report import run as runs
from rematplan.report.files import check_destination, write_text


def show(
    file: Annotated[Path, Parameter(help="A plan file, or a run file that `--run` wrote.")],
    /,
    *,
    code: Annotated[bool, Parameter(negative=(), help="Of a plan: the hand-written NNX code it amounts to.")] = False,
    options: Options = DEFAULTS,
) -> None:
    """Show a plan file or a run file."""
    if options.run is not None:
        check_destination(options.run, force=options.force)
    if code and options.json:
        raise InputError("--code prints Python and --json a document; give one of them.")
    if not runs.looks_like_run(file):
        document = _show_plan(file, code=code, json=options.json)
    elif code:
        raise InputError(f"{file} is a run record, not a plan; --code is for plan files.")
    else:
        document = _show_run(file, json=options.json)
    if options.run is not None:
        say(f"Wrote {write_text(options.run, runs.to_text(document), force=options.force)}")


def _show_run(file: Path, *, json: bool) -> dict[str, Any]:
    run = read_run(file)
    write_out(text_of(run, file=file, json=json))
    return run.to_json()


def _show_plan(file: Path, *, code: bool, json: bool) -> dict[str, Any]:
    from rematplan._plan import Plan
    from rematplan.report import terminal
    from rematplan.report.code import plan_code, record_of

    plan = Plan.load(file)
    if json:
        write_out(runs.to_text(plan.to_json()))
    elif code:
        write_out(plan_code(plan))
    else:
        try:
            shown = rendered(terminal.render("plan", record_of(plan.to_json())))
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            # what a plan does has been checked; its figures are only looked at here
            raise PlanMismatch(f"the figures in {file} cannot be read ({error!r}); plan again") from error
        write_out(shown)
    return plan.to_json()
