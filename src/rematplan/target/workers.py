"""Compile children, seen from the parent: started once, reused, replaced when they crash, ended with the parent.

Comes in: requests as JSON-ready dictionaries. Goes out: answers, or a `CompilerError` that names the cause. Knows
nothing of programs or measurements; `child.py` is the other end of the pipes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

from rematplan.errors import CompilerError
from rematplan.target.target import CPU_DEVICES, Kind

_LAST_LINES = 6  # of a crashed child's standard error, quoted in the error

_COMMON_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the child never opens a real accelerator: compile-only devices need none
    # JAX's cache cannot read back what was compiled for absent devices; ours stands in front of the children
    "JAX_ENABLE_COMPILATION_CACHE": "0",
}
_ENVIRONMENT = {
    Kind.TPU: {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: several children, and whoever has a real TPU open
    },
    Kind.GPU: {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    Kind.CPU: {"JAX_NUM_CPU_DEVICES": str(CPU_DEVICES)},  # more than one cost nothing
}
# They describe the machine's own TPUs (a TPU VM sets them, and so does JAX when it looks for one) and would be taken
# for a description of the absent ones.
_OF_REAL_DEVICES = ("TPU_", "CLOUD_TPU_", "MEGASCALE_")
_KEPT = ("TPU_LIBRARY_PATH",)
SCRATCH = "REMATPLAN_SCRATCH"  # names a folder that a child may use, and that its parent removes
# what the user may set to change how programs compile; read by the children and part of the cache key
USER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class ChildDied(CompilerError):
    """A compile child ended before it answered.

    Attributes:
      signal: that ended it; 0 if it ended by itself.
    """

    def __init__(self, message: str, *, signal: int):
        super().__init__(message)
        self.signal = signal


def user_flags() -> dict[str, str]:
    """What the user set in this process to change how programs compile."""
    return {name: os.environ.get(name, "") for name in USER_FLAGS}


def child_environment(kind: Kind, flags: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a compile child: the user's, with what keeps it off real devices.

    Args:
      flags: of the user, default those of this process; a request from another machine brings its own.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_OF_REAL_DEVICES)}
    for name, value in (user_flags() if flags is None else flags).items():
        kept.pop(name, None)
        if value:
            kept[name] = value
    return {**kept, **_COMMON_ENVIRONMENT, **_ENVIRONMENT[kind], "PYTHONPATH": search_path}


class Child:
    """One compile child. Not thread-safe: whoever holds it sends one request at a time."""

    def __init__(self, kind: Kind, flags: Mapping[str, str] | None = None):
        # both live as long as the child
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._scratch = tempfile.TemporaryDirectory(prefix="rematplan-child-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rematplan.target.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**child_environment(kind, flags), SCRATCH: self._scratch.name},
        )

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None  # asked for as a pipe
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises ChildDied if the child ends before it answers."""
        return json.loads(self.request_text(json.dumps(payload).encode() + b"\n"))

    def request_text(self, text: bytes) -> bytes:
        """The same, with lines of JSON."""
        try:
            self._stdin.write(text)
            self._stdin.flush()
            line = self._stdout.readline()
        except (BrokenPipeError, ValueError):  # ValueError: closed by another thread
            line = b""
        if not line.endswith(b"\n"):
            raise self._death()
        return line

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError, ValueError):  # bytes that can no longer be delivered
                pipe.close()
        self._errors.close()
        self._scratch.cleanup()

    def _death(self) -> ChildDied:
        code = self._process.wait()
        cause = f"exit status {code}"
        if code < 0:
            try:
                cause = f"signal {signal.Signals(-code).name}"
            except ValueError:
                cause = f"signal {-code}"
        if -code == signal.SIGKILL:
            cause += " (killed: often the machine ran out of memory; use fewer workers)"
        try:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
        except ValueError:  # closed
            lines = []
        said = "\n".join(line for line in lines if line.strip())
        tail = "\n".join(said.splitlines()[-_LAST_LINES:])
        message = f"the compiler process ended with {cause}; other results are kept, and it is started anew."
        return ChildDied(f"{message} It last said:\n{tail}" if tail else message, signal=max(-code, 0))


class Pool:
    """Idle children by kind of target. Thread-safe."""

    def __init__(self) -> None:
        self._inherited: list[set[Child]] = []
        self._begin()

    def _begin(self) -> None:
        self._idle: dict[tuple[Kind, str], list[Child]] = {}
        self._all: set[Child] = set()
        self._lock = threading.Lock()

    def leave_to_parent(self) -> None:
        """In a process that was forked: its parent's children are not its own, neither to ask nor to end."""
        self._inherited.append(self._all)  # keeps them from being finalized here
        self._begin()

    @contextlib.contextmanager
    def borrow(self, kind: Kind, *, flags: Mapping[str, str] | None = None) -> Generator[Child]:
        """A child for one request. It goes back to the pool unless it crashed or the caller was interrupted.

        Args:
          flags: that the child reads; default those that the user set in this process.
        """
        read = user_flags() if flags is None else flags
        key = (kind, "\0".join(read.get(name, "") for name in USER_FLAGS))  # a child reads them only once
        with self._lock:
            idle = self._idle.setdefault(key, [])
            child = idle.pop() if idle else None
        if child is None or not child.alive:
            child = Child(kind, read)
            with self._lock:
                self._all.add(child)
        try:
            yield child
        except BaseException:
            self.discard(child)
            raise
        with self._lock:
            idle.append(child)

    def discard(self, child: Child) -> None:
        with self._lock:
            self._all.discard(child)
        child.close()

    def close(self) -> None:
        """End all children; the pool stays usable and starts new ones."""
        with self._lock:
            children = list(self._all)
            self._all.clear()
            self._idle.clear()
        for child in children:
            child.close()


POOL = Pool()
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.leave_to_parent)
