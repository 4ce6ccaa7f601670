"""Words of a command line -> a verb -> an exit code. The one place where errors become messages and codes."""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError

from rematplan import __version__
from rematplan.cli.common import COMMAND_LINE
from rematplan.cli.compare import compare
from rematplan.cli.demo import demo
from rematplan.cli.fit import fit
from rematplan.cli.frontier import frontier
from rematplan.cli.inspect import inspect
from rematplan.cli.measure import measure
from rematplan.cli.output import PipeConsole, open_closed, say, write_out
from rematplan.cli.plan import plan
from rematplan.cli.report import report
from rematplan.cli.show import show
from rematplan.cli.targets import targets
from rematplan.cli.userframe import users_frame
from rematplan.cli.verify import verify
from rematplan.errors import RematplanError
from rematplan.report.files import noting

EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
_DEBUG_FLAG = "--debug"

_HELP = (
    "Checkpointing plans for Flax NNX and JAX training steps, measured by the chip's own compiler.\n\n"
    "A WORKLOAD is module:factory, file.py:factory or a built-in one (gpt, mlp, ...), followed by key=value for the "
    "factory, which returns a rematplan.Workload.\n\n"
    "Exit codes: 0 done, 1 internal error, 2 wrong usage or input, 3 the budget cannot be met, 4 the plan is not for this "
    "function, 5 verification failed, 130 interrupted."
)


def build_app() -> App:
    """The command line's verbs."""
    app = App(
        name="rematplan",
        help=_HELP,
        help_format="plaintext",  # a tenth of the time that help may take would go into loading a Markdown renderer
        version=__version__,
        console=PipeConsole(),
        suppress_keyboard_interrupt=False,  # main gives it a message and an exit code
    )
    for verb in (demo, inspect, measure, compare, plan, frontier, fit, verify, show, targets, report):
        app.command(verb)
    return app


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. `words` are without the program's name; default `sys.argv`."""
    with noting() as written:
        return _main(words, written)


def _main(words: Sequence[str] | None, written: list[Path]) -> int:
    words = list(sys.argv[1:] if words is None else words)
    open_closed()
    app = build_app()
    COMMAND_LINE.set(tuple(words))
    default_warning, warnings.showwarning = warnings.showwarning, _show_warning
    try:
        app(words, print_error=False, exit_on_error=False, result_action="return_value")
        write_out()  # what the user's code printed
    except CycloptsError as error:
        verb = f"{words[0]} " if words and words[0] in app else ""
        _complain(f"{_first_line(error)} `rematplan {verb}--help` says what it takes.")
        return EXIT_USAGE
    except RematplanError as error:
        _debug(words)
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain(f"interrupted; {_kept(written)}.")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort of a program
        _debug(words)
        frame = users_frame(error)
        if frame is not None:
            _complain(f"the workload's own code raised {type(error).__name__}: {_first_line(error)} ({frame}).")
            return EXIT_USAGE
        _complain(
            f"internal error: {type(error).__name__}: {_first_line(error)} This is a fault of rematplan: please report "
            "it with what `--debug` prints."
        )
        return EXIT_INTERNAL
    finally:
        warnings.showwarning = default_warning
    return 0


def _kept(written: list[Path]) -> str:
    """What an interruption left behind."""
    if not written:
        return "nothing was written"
    if len(written) == 1:
        return f"{written[0]} had been written, and is whole"
    return f"{len(written)} files had been written, and are whole; the last is {written[-1]}"


def _first_line(error: Exception) -> str:
    """The message as one line, closed by a full stop."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    """A warning as one line: where in the source it was raised says nothing to a user of the command line."""
    say(f"warning: {message}")


def _debug(words: Sequence[str]) -> None:
    if _DEBUG_FLAG in words:
        say(traceback.format_exc().rstrip())


def _complain(message: str) -> None:
    console = PipeConsole(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, emoji=False)  # an address may hold :x:
