"""Programs and their measurements: the one door to compilers.

Comes in: a function of flat arrays, or a `Program` that was lowered from one. Goes out: a `Measurement`. The caller's
process lowers to StableHLO text; children compile that text (see `workers.py`), so that the caller never loads a TPU
or GPU compiler, closures need no pickling, and a compiler crash loses nothing. Results are cached on disk.

    target = resolve("tpu-v5e")
    program = lower(step, leaves, target=target)
    probe = measure(program, target=target, method=Method.PROBE)           # seconds: memory, no cycles
    full = measure(program, target=target, limit_bytes=600 << 20)          # tens of seconds: memory, cycles, fits or
    not many = measure_many([(p, Options(method=Method.PROBE)) for p in programs], target=target)
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Any, Self

from rematplan.errors import CompilerError, InputError
from rematplan.target.cache import FORMAT, Cache
from rematplan.target.cycles import CycleTable
from rematplan.target.executors import Dispatcher, in_use
from rematplan.target.locations import without_callers
from rematplan.target.measurement import Measurement, decode
from rematplan.target.remote import made_with
from rematplan.target.target import Kind, Target, compiler_versions, example_topology
from rematplan.target.workers import POOL, user_flags


class Method(Enum):
    """How thoroughly to measure."""

    #: TPU: schedule and buffers without code, in a tenth of the time; elsewhere the same as COMPILE.
    PROBE = "probe"
    #: The compiler's full result.
    COMPILE = "compile"


class Rematerialization(Enum):
    """The compiler's own rematerialization, apart from what the program says."""

    OFF = "off"
    ON = "on"


@dataclass(frozen=True)
class Options:
    """How to measure one program.

    Attributes:
      limit_bytes: memory limit given to the compiler (TPU), or compared with what it needs.
      compiler_options: further options, as `Lowered.compile(compiler_options=)` takes them.
      once: of a TPU's probe: under its first limit alone, which is enough for most programs and takes half the time.
    """

    method: Method = Method.COMPILE
    limit_bytes: int | None = None
    rematerialization: Rematerialization = Rematerialization.OFF
    compiler_options: dict[str, Any] = field(default_factory=dict)
    once: bool = False


@dataclass(frozen=True)
class Runnable:
    """A function of flat arrays with its arguments, arrays or shapes."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    donated: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A lowered program.

    Attributes:
      stablehlo: its text, with source locations and name stacks.
      argument_bytes, output_bytes: per device, unpadded.
      mesh_shape: sizes of the axes of the mesh that it is of; empty for a program of one device.
      runnable: what it was lowered from, kept only for the target `local`, which runs it.
    """

    stablehlo: str
    argument_bytes: int
    output_bytes: int
    name: str = ""
    mesh_shape: tuple[int, ...] = ()
    runnable: Runnable | None = field(default=None, repr=False, compare=False)

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh_shape)

    def key(self) -> str:
        """Hash of the text, from wherever it was lowered."""
        return hashlib.sha256(without_callers(self.stablehlo).encode()).hexdigest()


def lower(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    *,
    donated: Sequence[int] = (),
    target: Target,
    name: str = "",
    sources: Callable[[], Sequence[int | None]] | None = None,
) -> Program:
    """Lower a function of flat arrays for a target's platform, in this process and without its compiler.

    Args:
      leaves: arrays or shapes, one for each argument; their shardings say what each device holds.
      donated: indices of arguments whose buffers the outputs may reuse.
      sources: called after the trace: for each output the argument that it is laid out like, None for one that every device
        holds.

    Raises:
      InputError: arguments lie on a mesh of more or fewer devices than the target has.
    """
    import jax

    from rematplan._jax_private import release
    from rematplan.sharding import in_mesh, mesh_of, shard_bytes

    mesh = mesh_of(leaves)
    _check_devices(1 if mesh is None else mesh.size, {} if mesh is None else dict(mesh.shape), target)
    with in_mesh(leaves):
        traced = jax.jit(function, donate_argnums=tuple(donated), keep_unused=True).trace(*leaves)
        lowered = traced.lower(lowering_platforms=(target.platform,))
    release(traced)
    outputs: list[Any] = jax.tree.leaves(lowered.out_info)
    if mesh is not None and sources is not None:
        outputs = [leaf if i is None else leaves[i] for leaf, i in zip(outputs, sources(), strict=True)]
    return Program(
        stablehlo=lowered.as_text(debug_info=True),
        argument_bytes=sum(map(shard_bytes, leaves)),
        output_bytes=sum(map(shard_bytes, outputs)),
        mesh_shape=() if mesh is None else tuple(mesh.shape.values()),
        name=name or getattr(function, "__name__", ""),
        runnable=Runnable(function, tuple(leaves), tuple(donated)) if target.kind is Kind.LOCAL else None,
    )


def _check_devices(devices: int, axes: dict[str, int], target: Target) -> None:
    if target.kind is Kind.LOCAL or devices == target.device_count or devices == 1:
        return
    shape = "x".join(map(str, axes.values()))
    chip = target.name.partition(":")[0]
    example = example_topology(chip, devices)
    advice = f"name a target of {devices}, such as {example}" if example else f"no topology of {chip} has {devices}"
    raise InputError(
        f"the arguments lie on a mesh of {devices} devices ({shape}: {', '.join(f'{k}={n}' for k, n in axes.items())}), but "
        f"{target.name} is {target.device_count}; {advice}."
    )


def measure(
    program: Program,
    *,
    target: Target,
    method: Method = Method.COMPILE,
    limit_bytes: int | None = None,
    rematerialization: Rematerialization = Rematerialization.OFF,
    compiler_options: dict[str, Any] | None = None,
    cache: Cache | None = None,
) -> Measurement:
    """Measure one program. `cache=None` is the default cache; `Cache(None)` none.

    Raises:
      CompilerError: the compiler crashed or refused the program for a reason other than memory.
      InputError: the compiler knows no such target.
    """
    options = Options(method, limit_bytes, rematerialization, dict(compiler_options or {}))
    return _measure(program, options, target, cache or Cache.default(), in_use(), threading.Event())


def known(program: Program, options: Options, *, target: Target, cache: Cache | None = None) -> Measurement | None:
    """What was measured of a program before; None if it was not, or is not kept (`local`)."""
    return None if target.kind is Kind.LOCAL else (cache or Cache.default()).get(_key(program, options, target))


class SideBySide:
    """Measures programs at the same time: as many as the executor in use takes. Interrupting ends the children.

    with SideBySide(target) as measuring:
        futures = [measuring.submit(program, options) for program in programs]
    """

    def __init__(self, target: Target, *, workers: int | None = None, cache: Cache | None = None):
        """With the executor of the calling thread; at most `workers` at a time, default as many as it takes."""
        self._target = target
        self._cache = cache or Cache.default()
        self._dispatcher = in_use()
        self._stop = threading.Event()
        # these threads look into the cache and wait for answers
        self._threads = ThreadPoolExecutor(workers or self._dispatcher.in_flight(target.kind))

    def submit(self, program: Program, options: Options) -> Future[Measurement]:
        return self._threads.submit(_measure, program, options, self._target, self._cache, self._dispatcher, self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        if interrupted:
            self._stop.set()
            POOL.close()  # unblocks the threads that wait for an answer
        self._threads.shutdown(cancel_futures=interrupted)


def measure_many(
    tasks: Sequence[tuple[Program, Options]],
    target: Target,
    *,
    workers: int | None = None,
    cache: Cache | None = None,
    on_done: Callable[[int, Measurement], None] | None = None,
) -> list[Measurement]:
    """Measure several programs, at most `workers` at a time, in the order given. Interrupting ends the children.

    Args:
      workers: default as many as the executor in use takes.
      on_done: called with a task's index and its measurement as soon as it is there, from another thread.
    Raises:
      CompilerError: for the first task that failed; the others are finished, and cached.
    """
    with SideBySide(target, workers=workers, cache=cache) as measuring:
        futures = [measuring.submit(program, options) for program, options in tasks]
        for index, future in enumerate(futures):
            if on_done is not None:
                future.add_done_callback(lambda done, index=index: _tell(on_done, index, done))
        return [future.result() for future in futures]


def _tell(on_done: Callable[[int, Measurement], None], index: int, done: Future[Measurement]) -> None:
    if not done.cancelled() and done.exception() is None:
        on_done(index, done.result())


def _measure(
    program: Program, options: Options, target: Target, cache: Cache, dispatcher: Dispatcher, stop: threading.Event
) -> Measurement:
    if target.kind is Kind.LOCAL:
        return _measure_here(program, options, target)
    measured = _measure_once(program, options, target, cache, dispatcher, stop)
    if target.device_count > program.num_devices:  # 1: anything else was refused
        said = f"{target.name} has {target.device_count} devices, and the program is of one: figures are as if each ran it all"
        measured = replace(measured, warnings=(*measured.warnings, said))
    return measured


# What is being compiled in this process: folder of the cache and key -> who waits for it finds it there
_RUNNING: dict[tuple[str, str], Future[Measurement]] = {}
_RUNNING_LOCK = threading.Lock()


def _measure_once(
    program: Program, options: Options, target: Target, cache: Cache, dispatcher: Dispatcher, stop: threading.Event
) -> Measurement:
    """From the cache, from another thread that is at it, or from a compiler.

    Several processes that ask for the same at the same time each compile it: the results are equal, and one of them stays.
    A claim in the folder would save that, and leave everyone waiting whose claimant died on another machine.
    """
    key = _key(program, options, target)
    known = cache.get(key)
    if known is not None:
        return known
    if cache.folder is None:  # whoever switched it off wants everything measured
        return _measure_there(key, program, options, target, cache, dispatcher, stop)
    place = str(cache.folder), key
    mine: Future[Measurement] = Future()
    with _RUNNING_LOCK:
        running = _RUNNING.setdefault(place, mine)
    if running is not mine:
        return replace(running.result(), cached=True)
    try:
        # another thread may have finished between the look into the cache and the one at what is running
        measured = cache.get(key) or _measure_there(key, program, options, target, cache, dispatcher, stop)
        mine.set_result(measured)
        return measured
    except BaseException as error:
        passed_on = error if isinstance(error, Exception) else CompilerError("the measurement was interrupted.")
        mine.set_exception(passed_on)
        raise
    finally:
        with _RUNNING_LOCK:
            del _RUNNING[place]


def _measure_there(
    key: str,
    program: Program,
    options: Options,
    target: Target,
    cache: Cache,
    dispatcher: Dispatcher,
    stop: threading.Event,
) -> Measurement:
    answer = dispatcher.answer(_request(program, options, target), target.kind, stop=stop)
    if "input" in answer:
        raise InputError(answer["input"])
    if "error" in answer:
        raise CompilerError(f"{target.name}: the compiler refused {program.name or 'the program'}: {answer['error']}")
    measured = decode(answer["measurement"])
    cache.put(key, measured)
    if target.kind is Kind.TPU and measured.cycles is not None and measured.costs:
        CycleTable.remember(measured.costs, cache, target)  # every full compile teaches the prices of the next plan
    return measured


def _request(program: Program, options: Options, target: Target) -> dict[str, Any]:
    """What a compile child is asked, as plain data; the environment and versions that its answer depends on go with it."""
    return {
        "target": target.name,
        "stablehlo": program.stablehlo,
        "argument_bytes": program.argument_bytes,
        "output_bytes": program.output_bytes,
        "mesh_shape": list(program.mesh_shape),
        "method": options.method.value,
        "limit_bytes": options.limit_bytes,
        "rematerialization": options.rematerialization.value,
        "once": options.once,
        "compiler_options": options.compiler_options,
        "flags": user_flags(),
        "versions": made_with(target),
    }


# one program at a time on the device, or their times would be wrong
_DEVICE = threading.Lock()


def _measure_here(program: Program, options: Options, target: Target) -> Measurement:
    from rematplan.target.local import measure_here

    run = program.runnable
    if run is None:
        raise InputError("this program was lowered for another target; lower it for local to run it here.")
    with _DEVICE:
        return measure_here(
            run.function, run.leaves, donated=run.donated, target=target, limit_bytes=options.limit_bytes
        )


def _key(program: Program, options: Options, target: Target) -> str:
    """Hash of everything that the result depends on."""
    parts = {
        "format": FORMAT,
        "program": program.key(),
        "devices": program.mesh_shape,
        "target": target.name,
        "topology": target.topology,
        "chip": repr(target.chip),
        "method": options.method.value if target.kind is Kind.TPU else "compile",
        "limit": options.limit_bytes,
        "rematerialization": options.rematerialization.value,
        "options": options.compiler_options,
        **({"once": True} if options.once and target.kind is Kind.TPU else {}),
        "versions": compiler_versions(target),
        "flags": user_flags(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]
