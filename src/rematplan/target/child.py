"""The compile child: a process that compiles programs for absent devices, one after another, until its parent ends.

Comes in: one JSON document a line on standard input, made by `workers.py`. Goes out: one JSON document a line on what
was standard output when the process started. The environment (which compiler, which flags) is complete before this
file is run; `python -m rematplan.target.child` is not meant to be started by hand.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from rematplan.errors import InputError
from rematplan.target.measurement import encode

_PARENT_POLL_SECONDS = 2.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it then ends its children
    answers = _private_output()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        answers.write(json.dumps(_answer(request)) + "\n")
        answers.flush()


def _private_output() -> TextIO:
    """Keep standard output for answers; what compilers print there goes to standard error instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the parent closed the pipe or ended: stop also in the middle of a compile


def _watch_parent(parent: int) -> None:
    """End when the parent has, even if somebody else still holds the other end of the pipe."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        from rematplan.target.backends import measure

        return {"measurement": encode(measure(request))}
    except InputError as error:
        return {"input": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever happens here is for the parent to tell
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main()
