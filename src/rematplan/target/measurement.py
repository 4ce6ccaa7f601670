"""What a compiler, or a device, said of one program. Plain data; does not know JAX."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rematplan.report.display import Displayed
from rematplan.scopes import without_indices

ARGUMENT_NAME = re.compile(r"leaves\[(\d+)\]$")  # how a lowered step names its arguments


class Source(Enum):
    """Where a figure comes from."""

    #: Said before any compile of that very program.
    PREDICTED = "predicted"
    #: The compiler's schedule and buffers, no code generated.
    PROBED = "probed"
    #: The compiler's full result.
    COMPILED = "compiled"
    #: Measured on the device.
    RUN = "run"


class Role(Enum):
    """What a buffer is for."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    INPUT = "input"  # any other argument: the batch, state
    SAVED = "saved"  # computed by the forward pass, read by the backward pass
    RECOMPUTED = "recomputed"  # by the forward pass again, inside of the backward pass
    OFFLOADED = "offloaded"  # on its way back from the host's memory
    GRADIENT = "gradient"  # of parameters and of intermediate values
    OTHER = "other"  # workspace, other outputs, constants
    ARGUMENT = "argument"  # one of the first three, before `attributed` said which


@dataclass(frozen=True)
class Argument:
    """What one array that a step takes is: parameter, optimizer or input; and its path among the arguments."""

    role: Role
    path: str


@dataclass(frozen=True)
class Alive:
    """Bytes that are live at the peak in repeated modules, for one purpose; `module` has `*` for the index."""

    module: str
    role: str
    count: int
    bytes: int


@dataclass(frozen=True)
class ModuleTime:
    """Seconds of one step spent in repeated modules, in one pass: forward, recompute, backward or other.

    A fused instruction counts for the module of what it computes last.
    """

    module: str
    step_pass: str
    seconds: float


@dataclass(frozen=True)
class CollectiveUse:
    """Communication between devices in one step: collectives of one kind in one pass.

    Attributes:
      kind: as HLO calls it: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute.
      step_pass: as `ModuleTime.step_pass`; those of "recompute" are made once more because a region runs again.
      count: executions in one step.
      bytes: of the arrays that are gathered, reduced or scattered, added up.
      seconds: of a ring over the chip's links, whether or not computation hides them.
    """

    kind: str
    step_pass: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Buffer:
    """One buffer that is live at the peak.

    Attributes:
      bytes: as allocated, padded to the target's tiles.
      kind: argument, output, temporary or constant.
      shape: as HLO prints it, e.g. f32[8192,1024].
      module, operation, location: where it was computed, as in `Residual`; empty where the compiler does not say.
      role: what it is for, one of `Role`.
    """

    bytes: int
    kind: str
    shape: str
    module: str = ""
    operation: str = ""
    location: str = ""
    role: str = Role.OTHER.value


@dataclass(frozen=True)
class Timeline:
    """Live bytes along the scheduled program, thinned with every local maximum kept.

    Attributes:
      position: instruction index in the schedule, increasing.
      live_bytes: at each position, arguments and outputs included.
      backward_starts: instruction index where the backward pass begins; None if unknown.
      at_peak: the largest buffers that are live at the peak, largest first.
      alive: everything that is live at the peak by module and role, largest first.
      argument_bytes: by argument of the step; from these `attributed` makes the groups of `alive` that are arguments.
    """

    position: tuple[int, ...] = ()
    live_bytes: tuple[int, ...] = ()
    backward_starts: int | None = None
    at_peak: tuple[Buffer, ...] = ()
    alive: tuple[Alive, ...] = ()
    argument_bytes: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class InstructionCost:
    """What one kind of scheduled instruction costs. Equal kinds have equal fingerprints in every program.

    Attributes:
      fingerprint: hash of the operation, its shapes and its fused computation, names and metadata left out.
      count: executions in one run of the program.
      cycles: of one execution, as the compiler estimates; None in a probe, and where the compiler prices nothing.
      roofline_seconds: of one execution: the larger of operations by peak rate and bytes by bandwidth.
      work: of one execution, the fields of `work.Work` in order.
    """

    fingerprint: str
    count: int
    cycles: int | None
    roofline_seconds: float
    work: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement(Displayed):
    """Memory and time of one program on one target, per device.

    Attributes:
      source: how the figures were found, as a whole; `sources` says it for each.
      peak_bytes: live bytes at the peak, arguments and outputs included.
      required_bytes: what must be free for the program to run: the least limit under which it compiles (TPU: the
        probe's need + code), or arguments + outputs + temporaries - aliased (CPU, GPU).
      argument_bytes, output_bytes, temporary_bytes, alias_bytes, code_bytes: what the compiler allots to arguments, to
        results, to everything between, to results that take the place of donated arguments, and to the program itself.
      flops: floating-point operations, loops multiplied by trip counts; counted in the scheduled program.
      bytes_accessed: read and written by the scheduled instructions; None where it was not counted.
      cycles: estimated by the compiler, loops multiplied by trip counts; None where it gives none.
      seconds: from cycles where there are any, else a roofline on the scheduled program; `sources["seconds"]` says
        which: "cycles", "roofline" or "run".
      limit_bytes: the limit that it was compiled under (TPU) or is held against; None without one.
      compile_seconds: what measuring took; with `cached`, what it took when it was done.
      cached: whether it was found in the cache (`~/.cache/rematplan`).
      timeline: live bytes along the schedule.
      warnings: what a reader of the figures should know, a sentence each.
      host_bytes: copied to the host's memory and back, per step, each way; `seconds` is at least what that takes.
      devices: that run the program together; every figure is of one of them.
      collectives: communication between them, by kind and pass.
      waiting_seconds: part of `seconds` in which communication is waited for: what computation does not hide.
      sources: figure name -> "probed", "compiled", "run", or for seconds as above.
      fits_limit: whether it compiled under that limit, or needs no more; None if no limit was asked for.
      modules: seconds by module and pass; they add up to `seconds`, but for copies to the host.
      costs: cost by kind of instruction, from which `cycles.CycleTable` learns; `to_json` leaves it out.
      limit_matters: False if a TPU's probe found the same program under both of its limits; `to_json` leaves it out.
    """

    KIND = "measure"

    target: str
    source: Source
    peak_bytes: int
    required_bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int = 0
    code_bytes: int = 0
    flops: float | None = None
    bytes_accessed: float | None = None
    cycles: float | None = None
    seconds: float | None = None
    host_bytes: float = 0.0
    limit_bytes: int | None = None
    fits_limit: bool | None = None
    compile_seconds: float = 0.0
    cached: bool = False
    devices: int = 1
    collectives: tuple[CollectiveUse, ...] = ()
    waiting_seconds: float = 0.0
    sources: dict[str, str] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    warnings: tuple[str, ...] = ()
    modules: tuple[ModuleTime, ...] = ()
    costs: tuple[InstructionCost, ...] = field(default=(), repr=False)
    limit_matters: bool = field(default=True, repr=False)

    def held_against(self, limit_bytes: int | None) -> Measurement:
        """The same figures, with whether they fit under a limit where the compiler was not given one."""
        if self.fits_limit is not None or limit_bytes is None:
            return self
        return dataclasses.replace(self, limit_bytes=limit_bytes, fits_limit=self.required_bytes <= limit_bytes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; enums become their values."""
        timeline = dataclasses.replace(self.timeline, argument_bytes=())
        plain = _plain(dataclasses.asdict(dataclasses.replace(self, costs=(), timeline=timeline)), leave_out="costs")
        del plain["timeline"]["argument_bytes"], plain["limit_matters"]
        return plain


def encode(measurement: Measurement) -> dict[str, Any]:
    """Everything in a measurement as JSON-ready data, for `decode`: what the cache and compile children pass on."""
    encoded = measurement.to_json()
    encoded["timeline"]["argument_bytes"] = list(measurement.timeline.argument_bytes)
    encoded["limit_matters"] = measurement.limit_matters
    encoded["costs"] = [[c.fingerprint, c.count, c.cycles, c.roofline_seconds, list(c.work)] for c in measurement.costs]
    return encoded


def decode(encoded: dict[str, Any]) -> Measurement:
    """The measurement that `encode` wrote. Raises KeyError, TypeError or ValueError if it is not one."""
    timeline = encoded["timeline"]
    values: dict[str, Any] = {
        **encoded,
        "source": Source(encoded["source"]),
        "warnings": tuple(encoded["warnings"]),
        "timeline": Timeline(
            position=tuple(timeline["position"]),
            live_bytes=tuple(timeline["live_bytes"]),
            backward_starts=timeline["backward_starts"],
            at_peak=tuple(Buffer(**b) for b in timeline["at_peak"]),
            alive=tuple(Alive(**a) for a in timeline["alive"]),
            argument_bytes=tuple(timeline["argument_bytes"]),
        ),
        "modules": tuple(ModuleTime(**t) for t in encoded["modules"]),
        "collectives": tuple(CollectiveUse(**c) for c in encoded["collectives"]),
        "costs": tuple(InstructionCost(*row[:4], work=tuple(row[4])) for row in encoded["costs"]),
    }
    return Measurement(**values)


def _plain(value: Any, *, leave_out: str = "") -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k != leave_out}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def attributed(measurement: Measurement, arguments: Sequence[Argument]) -> Measurement:
    """Says of the arguments that are live at the peak what they are.

    A measurement is of a program, and programs that are equal have one: what their arguments are called is not part of it.

    Args:
      arguments: of the step, in order.
    """
    timeline = measurement.timeline
    groups = {(a.module, a.role): (a.count, a.bytes) for a in timeline.alive}
    for argument, size in zip(arguments, timeline.argument_bytes, strict=False):
        if size:
            key = without_indices(_module_of(argument)), argument.role.value
            count, total = groups.get(key, (0, 0))
            groups[key] = count + 1, total + size
    alive = (Alive(module, role, count, size) for (module, role), (count, size) in groups.items())
    return dataclasses.replace(
        measurement,
        timeline=dataclasses.replace(
            timeline,
            at_peak=tuple(_attributed(b, arguments) for b in timeline.at_peak),
            alive=tuple(sorted(alive, key=lambda a: (-a.bytes, a.module, a.role))),
            argument_bytes=(),  # said once
        ),
    )


def _attributed(buffer: Buffer, arguments: Sequence[Argument]) -> Buffer:
    named = ARGUMENT_NAME.search(buffer.operation)
    if buffer.role != Role.ARGUMENT.value or named is None or int(named[1]) >= len(arguments):
        return buffer
    argument = arguments[int(named[1])]
    return dataclasses.replace(
        buffer, role=argument.role.value, module=_module_of(argument), operation=argument.path.rpartition("/")[2]
    )


def _module_of(argument: Argument) -> str:
    """The module that holds a parameter; what is no parameter stands for itself."""
    return argument.path.rpartition("/")[0] if argument.role is Role.PARAMETER else ""
