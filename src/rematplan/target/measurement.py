"""What a compiler, or a device, said of one program. Plain data; does not know JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rematplan.report.display import Displayed


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


@dataclass(frozen=True)
class Buffer:
    """One buffer that is live at the peak.

    Attributes:
      bytes: as allocated, padded to the target's tiles.
      kind: argument, output, temporary, constant or code.
      shape: as HLO prints it, e.g. f32[8192,1024].
      module, operation, location: where it was computed, as in `Residual`; empty where the compiler does not say.
    """

    bytes: int
    kind: str
    shape: str
    module: str = ""
    operation: str = ""
    location: str = ""


@dataclass(frozen=True)
class Timeline:
    """Live bytes along the scheduled program, thinned with every local maximum kept.

    Attributes:
      position: instruction index in the schedule, increasing.
      live_bytes: at each position, arguments and outputs included.
      backward_starts: instruction index of the first backward operation; None if unknown.
      at_peak: what is live at the peak, largest first.
    """

    position: tuple[int, ...] = ()
    live_bytes: tuple[int, ...] = ()
    backward_starts: int | None = None
    at_peak: tuple[Buffer, ...] = ()


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
      limit_bytes: the limit that it was compiled under; None without one.
      compile_seconds: what measuring took; with `cached`, what it took when it was done.
      cached: whether it was found in the cache (`~/.cache/rematplan`).
      timeline: live bytes along the schedule.
      warnings: what a reader of the figures should know, a sentence each.
      host_bytes: copied to the host's memory and back, per step, each way; `seconds` is at least what that takes.
      sources: figure name -> "probed", "compiled", "run", or for seconds as above.
      fits_limit: whether it compiled under the limit that was asked for; None if no limit was asked for.
      costs: cost by kind of instruction, from which `cycles.CycleTable` learns; `to_json` leaves it out.
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
    sources: dict[str, str] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    warnings: tuple[str, ...] = ()
    costs: tuple[InstructionCost, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; enums become their values."""
        return _plain(dataclasses.asdict(dataclasses.replace(self, costs=())), leave_out="costs")


def encode(measurement: Measurement) -> dict[str, Any]:
    """Everything in a measurement as JSON-ready data, for `decode`: what the cache and compile children pass on."""
    encoded = measurement.to_json()
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
        ),
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
