"""Where compiles run: children of this process, or any `concurrent.futures` executor, over several machines too.

Comes in: an executor, or the name of one. Goes out: a `Dispatcher`, which gets a request answered: again where a worker
died, and here where the executor is broken. One is in use at a time in a thread (`using`), so that whatever measures
need not hand it on. Knows nothing of programs, measurements or caches.

    with using("dask:tcp://10.0.0.1:8786"):
        rp.plan(...)
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future
from contextvars import ContextVar
from typing import Any

from rematplan.errors import CompilerError, InputError
from rematplan.target.remote import SLOTS, Slots, answered, measured
from rematplan.target.target import Kind

#: An executor, the name of one ("local", "local:4", "dask:tcp://10.0.0.1:8786"), or None for the one in use.
ExecutorLike = Executor | str | None

# How often a request is sent: the first time, and again when its worker was lost
ATTEMPTS = 3
# A request for each worker and one that waits for it, so that none is idle while programs are lowered
_PER_WORKER = 2
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 5
_FIRST_ANSWER_SECONDS = 60  # workers that are started on demand take a while


class Dispatcher:
    """Gets requests answered, by an executor or by this process. Thread-safe.

    Attributes:
      name: as the user wrote it.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        name: str = "local",
        workers: int | None = None,
        alive: Callable[[], bool] = lambda: True,
    ):
        """Uses an executor with so many workers, or None for children of this process, default as many as it bears.

        Args:
          alive: whether an answer may still come; not every executor tells those who wait when it ends.
        """
        self.name = name
        self._alive = alive
        self._executor = executor
        self._workers = workers
        self._slots = SLOTS if executor is not None or workers is None else Slots(workers)
        self._lock = threading.Lock()

    def in_flight(self, kind: Kind) -> int:
        """How many requests of a kind are worth sending at once."""
        if self._executor is None:
            return self._slots.count(kind)
        return _PER_WORKER * (self._workers or 1)

    def answer(self, request: Mapping[str, Any], kind: Kind, *, stop: threading.Event) -> dict[str, Any]:
        """The answer of whoever got that far, as `remote.measured` gives it.

        Args:
          stop: once it is set, nothing is begun, sent again or waited for.

        Raises:
          InputError: a worker's versions or compilers are not those of this process.
          CompilerError: the child that compiled the program died, again and again if it was killed; or it was stopped.
        """
        answer: dict[str, Any] = {}
        for _ in range(ATTEMPTS):
            answer = self._one(request, kind, stop)
            if not answer.get("killed"):  # a compiler that ends by itself does so again
                break
        if "refused" in answer:
            raise InputError(
                f"executor {self.name}: {answer['refused']}; figures of another compiler would pass for those of this one. "
                "Install the same versions there."
            )
        if "died" in answer:
            raise CompilerError(answer["died"])
        return answer

    def _one(self, request: Mapping[str, Any], kind: Kind, stop: threading.Event) -> dict[str, Any]:
        """One answer: from the executor, if it can be had there, and otherwise from here."""
        for attempt in range(ATTEMPTS):
            if stop.is_set():
                raise CompilerError("the measurement was interrupted.")
            executor = self._executor
            if executor is None:
                break
            try:
                future = executor.submit(measured, request)
            except Exception as error:  # noqa: BLE001  # broken or shut down; each kind has errors of its own
                self._fall_back(error, for_good=True)
                break
            try:
                return _result(future, stop, self._alive)
            # What a request can cause comes back as an answer: errors here are of workers and of the way to them.
            except Exception as error:
                if stop.is_set():
                    raise
                broken = isinstance(error, BrokenExecutor)
                if broken or attempt == ATTEMPTS - 1:
                    self._fall_back(error, for_good=broken)
                    break
        return answered(request, kind, self._slots, stop)

    def _fall_back(self, error: BaseException, *, for_good: bool) -> None:
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
        with self._lock:
            if self._executor is None:
                return  # another thread noticed, and said so
            if for_good:
                self._executor = None
        what = "it is used no longer, and what is left" if for_good else "what it lost"
        warnings.warn(
            f"executor {self.name} does not answer ({said}): {what} is compiled in this process instead. Results that came "
            "back are kept.",
            stacklevel=2,
        )


def _result(future: Future[dict[str, Any]], stop: threading.Event, alive: Callable[[], bool]) -> dict[str, Any]:
    """A future's result. Whoever stops waiting cancels it."""
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=_POLL_SECONDS)
            if future.done():
                return future.result()  # a TimeoutError of its own
            if stop.is_set():
                raise CompilerError("the measurement was interrupted.")
            if not alive():
                raise BrokenExecutor("the connection was closed")
    finally:
        future.cancel()


_HERE = Dispatcher()
_IN_USE: ContextVar[Dispatcher] = ContextVar("_IN_USE", default=_HERE)


def in_use() -> Dispatcher:
    """The dispatcher of the calling thread."""
    return _IN_USE.get()


@contextlib.contextmanager
def using(executor: ExecutorLike) -> Generator[Dispatcher]:
    """Measures with an executor as long as the context lasts; None leaves the one in use.

    An executor that was given stays open; a connection that was made by name is closed at the end.

    Raises:
      InputError: no executor has that name, or nothing answers at the address.
    """
    if executor is None:
        yield in_use()
        return
    with _dispatcher(executor) as dispatcher:
        token = _IN_USE.set(dispatcher)
        try:
            yield dispatcher
        finally:
            _IN_USE.reset(token)


@contextlib.contextmanager
def _dispatcher(executor: Executor | str) -> Generator[Dispatcher]:
    if isinstance(executor, Executor):
        workers: int | None = getattr(
            executor, "_max_workers", None
        )  # pools of threads and processes; others do not say
        yield Dispatcher(executor, name=type(executor).__name__, workers=workers or os.cpu_count())
        return
    kind, _, rest = executor.partition(":") if isinstance(executor, str) else ("", "", "")
    if kind == "local" and ((rest.isdecimal() and int(rest) > 0) or executor == "local"):
        yield Dispatcher(name=executor, workers=int(rest) if rest else None)
    elif kind == "dask" and rest:
        with _dask(rest) as dispatcher:
            yield dispatcher
    else:
        raise InputError(
            f"executor {executor!r} is not known; write local, local:N for N compiles at a time, dask:ADDRESS for the "
            "scheduler of a Dask cluster, or give a concurrent.futures.Executor."
        )


@contextlib.contextmanager
def _dask(address: str) -> Generator[Dispatcher]:
    """A connection to the scheduler at an address, for as long as the context lasts."""
    client = _connected(address)
    try:
        # what each worker says first also shows that it has this package
        first = client.submit(_hello, pure=False)
        try:
            first.result(timeout=_FIRST_ANSWER_SECONDS)
        except TimeoutError as error:
            raise InputError(
                f"executor dask:{address}: no worker of that cluster answered within {_FIRST_ANSWER_SECONDS} s; start one with "
                f"`dask worker {address}`."
            ) from error
        except Exception as error:
            raise InputError(
                f"executor dask:{address}: its workers cannot run rematplan ({_first_line(error)}); install it there, in the "
                "version that is here."
            ) from error
        first.release()  # or the scheduler would have it computed again when its worker is lost
        threads = sum(client.nthreads().values())
        yield Dispatcher(
            client.get_executor(pure=False),
            name=f"dask:{address}",
            workers=threads,
            alive=lambda: client.status not in ("closing", "closed"),
        )
    finally:
        client.close()


def _connected(address: str) -> Any:
    """A client of the scheduler at an address, in a few seconds or not at all.

    Raises:
      InputError: nothing answers there, or Dask is not installed.
    """
    try:
        from distributed import Client
    except ImportError:
        raise InputError(
            f"executor dask:{address} needs Dask, which is not installed: pip install 'rematplan[dask]'"
        ) from None
    made: Future[Any] = Future()

    def connect() -> None:
        try:
            client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except Exception as error:  # noqa: BLE001  # of sockets, names and protocols; all mean the same here
            if made.set_running_or_notify_cancel():
                made.set_exception(error)
        else:
            if made.set_running_or_notify_cancel():
                made.set_result(client)
            else:  # nobody waits any longer
                client.close()

    # The client's own limit does not hold while something listens there and says nothing.
    threading.Thread(target=connect, daemon=True).start()
    try:
        return made.result(timeout=_CONNECT_SECONDS + 1)
    except Exception as error:
        made.cancel()
        cause = _first_line(error) if made.done() and not made.cancelled() else "it is silent"
        raise InputError(
            f"executor dask:{address}: no Dask scheduler answers there within {_CONNECT_SECONDS} s ({cause}); "
            "`dask scheduler` prints its address when it starts."
        ) from error


def _hello() -> int:
    """Runs on a worker before anything else does."""
    return os.getpid()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
