"""What runs where an executor runs it: one request, answered by a compile child of that process.

Comes in: a request of plain data (see `compiler.py`). Goes out: an answer of plain data: the measurement, or why there
is none. Knows nothing of executors, and loads neither JAX nor a compiler: those belong to the children.

    executor.submit(measured, request).result()       # threads, processes, or machines
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from rematplan import __version__
from rematplan.errors import CompilerError, InputError
from rematplan.target.cache import FORMAT
from rematplan.target.capacity import children
from rematplan.target.target import Kind, Target, compiler_versions, resolve
from rematplan.target.workers import POOL, ChildDied


class Slots:
    """How many children of a kind run at once in this process; whoever asks for more waits."""

    def __init__(self, count: int | None = None):
        """So many, or as many as the machine bears."""
        self._count = count
        self.free()

    def free(self) -> None:
        """Nobody holds one: so it is in a process that was just forked."""
        self._taken: dict[Kind, threading.Semaphore] = {}
        self._lock = threading.Lock()

    def count(self, kind: Kind) -> int:
        return self._count or children(kind)

    def of(self, kind: Kind) -> threading.Semaphore:
        with self._lock:
            if kind not in self._taken:
                self._taken[kind] = threading.Semaphore(self.count(kind))
            return self._taken[kind]


#: Shared by everything in this process that does not ask for a number of its own.
SLOTS = Slots()
os.register_at_fork(after_in_child=SLOTS.free)


def made_with(target: Target) -> dict[str, str]:
    """Versions on which an answer depends; those of who asks and of who answers have to be the same."""
    return {"rematplan": __version__, "measurements": str(FORMAT), **compiler_versions(target)}


def measured(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers one request with a child of this process, as soon as the machine bears another.

    Returns:
      One of `{"measurement": ...}`, `{"error": ...}` (the compiler refused the program), `{"input": ...}` (it knows no such
      target), `{"refused": ...}` (this machine cannot answer for that one) and `{"died": ..., "killed": ...}` (the child ended
      before it answered; killed from outside or not).
    """
    try:
        target = resolve(request["target"])
    except InputError as error:
        return {"refused": f"{socket.gethostname()}: {error}"}
    here, there = made_with(target), request["versions"]
    if here != there:
        names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        said = ", ".join(f"{name} {here.get(name, 'missing')} for {there.get(name, 'none')}" for name in names)
        return {"refused": f"{socket.gethostname()} has other versions than the process that asks ({said})"}
    return answered(request, target.kind, SLOTS, threading.Event())


def answered(request: Mapping[str, Any], kind: Kind, slots: Slots, stop: threading.Event) -> dict[str, Any]:
    """Answers a request that this process made itself, in one of these slots, unless it is stopped before there is one.

    Raises:
      CompilerError: it was stopped.
    """
    try:
        with slots.of(kind):
            if stop.is_set():
                raise CompilerError("the measurement was interrupted.")
            with POOL.borrow(kind, flags=request["flags"]) as child:
                return child.request(dict(request))
    except ChildDied as error:
        return {"died": str(error), "killed": error.signal == signal.SIGKILL}
