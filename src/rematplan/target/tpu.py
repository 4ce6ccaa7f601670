"""Probe and full compile of a TPU program, with no TPU in the machine. Runs only inside a compile child.

Comes in: a compile function that takes compiler options. Goes out: a `Measurement`.

What must be free for a program is not its peak of live bytes: buffers do not pack perfectly, and the code lies in the
same memory. The compiler accepts a limit when it holds what the buffer assignment needs, plus the code. The probe
reads the first from the compiler's dump; the second is known after a full compile near the limit, and estimated
before.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rematplan.target.assignment import Assignment, parse_assignment
from rematplan.target.chips import Chip
from rematplan.target.cost import ProgramCost, program_cost, step_seconds
from rematplan.target.cycles import only_probed
from rematplan.target.dumps import read_dump, scheduled_text
from rematplan.target.executions import executions
from rematplan.target.fingerprint import Fingerprinter
from rematplan.target.flops import FREE, OperationCounter
from rematplan.target.hlo import Module, parse
from rematplan.target.measurement import Measurement, Source, Timeline
from rematplan.target.stated import stated
from rematplan.target.timeline import live_ranges

_MIB = 1 << 20
# no instruction is this large, so the compiler's own rematerialization finds nothing to do
_REMATERIALIZATION_OFF = {"xla_tpu_rematerialization_min_size_in_bytes": 1 << 40}
_ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "HLO temporaries")
# The memory that ran out, as refusals name it. Only HBM is the program's: kernels that take more VMEM or SMEM than there is
# never compile, however large the limit.
_MEMORY = re.compile(r"memory space (\w+)|\bspace=(\w+)|CompileTime(\w+)Oom|out of memory on ([A-Z]+)\b")
# Either is said of programs over several devices, whose schedules grow with the limit to hide communication, and exceed it.
_USED = re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm|required for HLO temporaries \(([\d.]+)([KMG])\)")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# the compiler's assignment leaves out the padding of small arguments and outputs: up to 30 KB seen
_SLACK_BYTES = 1 << 16
# Code near a memory limit, libtpu 0.0.52: a fixed part, and one for each distinct kind of fusion; identical ones share
# theirs. A product takes 0.45 MiB (attention) to 0.9 (large ones in bfloat16). Estimated and true MiB of programs:
# transformer 19.3 and 16.1; perceptrons 8.0 and 7.9, 15.7 and 16.0, 8.0 and 10.8; convolutions 7.6 and 6.3.
_FIXED_CODE_BYTES = 1 << 20
_CODE_BYTES_OF_PRODUCT = 650 << 10
_CODE_BYTES_OF_FUSION = 100 << 10

# A limit as small as arguments + outputs distorts some schedules: perceptrons with regions then need up to an eighth more,
# and a transformer with SparseCores on v6e up to a third. At three quarters of that they are scheduled as near their own
# limit; no fixed multiple of arguments + outputs does it (2 is too little for a perceptron, 1.25 enough for another). Most
# programs are the same under both limits, to the last instruction.
_NEARER_LIMIT = 0.75

Compile = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class _Scheduled:
    """A program as the compiler scheduled it under some limit, and where its values lie."""

    module: Module
    assignment: Assignment

    def differs(self, other: _Scheduled) -> bool:
        """Whether the compiler made another program of the same."""
        return self.assignment.bytes != other.assignment.bytes or self._opcodes() != other._opcodes()

    def _opcodes(self) -> Counter[str]:
        return Counter(i.opcode for c in self.module.computations.values() for i in c.instructions)


def measure(
    compile_: Compile,
    *,
    target: str,
    chip: Chip,
    argument_bytes: int,
    output_bytes: int,
    full: bool,
    once: bool = False,
    limit_bytes: int | None,
    own_rematerialization: bool,
) -> Measurement:
    """Probe a program and, if asked, compile it in full.

    Args:
      compile_: compiles the program under these compiler options; raises what the compiler raises.
      once: probe it under the first limit alone.
      limit_bytes: HBM that a full compile may use.
      own_rematerialization: let the compiler rematerialize by itself in a full compile.
    """
    held_bytes = argument_bytes + output_bytes

    def near_need(scheduled: _Scheduled, under_bytes: int) -> _Scheduled:
        """Of the program as scheduled under a limit near enough to its need: this one, or else another."""
        nearer_bytes = max(held_bytes, round(_NEARER_LIMIT * scheduled.assignment.bytes))
        return scheduled if under_bytes >= nearer_bytes else _probe(compile_, nearer_bytes)

    def figures(scheduled: _Scheduled) -> Measurement:
        return _measurement(scheduled, target, chip, argument_bytes, output_bytes)

    if not full:
        first = _probe(compile_, held_bytes)
        near = first if once else near_need(first, held_bytes)
        probe = replace(figures(near), limit_matters=once or near.differs(first))
        fits = None if limit_bytes is None else probe.required_bytes <= limit_bytes
        return replace(probe, limit_bytes=limit_bytes, fits_limit=fits)
    options: dict[str, Any] = {} if own_rematerialization else dict(_REMATERIALIZATION_OFF)
    if limit_bytes is not None:
        options["xla_tpu_max_hbm_size_mib"] = limit_bytes // _MIB
    with tempfile.TemporaryDirectory(prefix="rematplan-compile-") as folder:
        try:
            # the dump takes some hundredths of a compile's time; to compile again where it is missed would take all of it
            executable = compile_({**options, "xla_dump_to": folder})
        except Exception as error:
            if not _was_scheduled(error, Path(folder)):
                raise
            refused = figures(near_need(_read(Path(folder)), limit_bytes or chip.compiler_memory_bytes))
            return _refused(refused, error, limit_bytes)
        module = parse(scheduled_text(lambda: executable.hlo_modules()[0].to_string(), lambda: Path(folder)))
        assignment = parse_assignment(read_dump(Path(folder), _ASSIGNMENT))
    probe = figures(near_need(_Scheduled(module, assignment), 0))  # without the generated code, whatever the limit was
    timeline = live_ranges(module, held=assignment.held)
    return _compiled(probe, executable, module, timeline, chip, limit_bytes, own_rematerialization)


def _probe(compile_: Compile, limit_bytes: int) -> _Scheduled:
    """Schedule and buffers of a program, without generating its code.

    The compiler is told that HBM is only so large, which is too small: it schedules and assigns buffers as usual, finds that
    it does not fit, dumps what it did, and stops. Should it fit, the compiler finishes; that takes longer, and what it dumps
    is as good.
    """
    with tempfile.TemporaryDirectory(prefix="rematplan-probe-") as folder:
        options = {**_REMATERIALIZATION_OFF, "xla_tpu_max_hbm_size_mib": limit_bytes // _MIB, "xla_dump_to": folder}
        try:
            compile_(options)
        except Exception as error:
            if not _was_scheduled(error, Path(folder)):
                raise
        return _read(Path(folder))


def _was_scheduled(error: Exception, folder: Path) -> bool:
    """Whether HBM ran out after the compiler had assigned buffers, so that its dump says what the program needs."""
    return _is_out_of_memory(error) and any(folder.glob(_ASSIGNMENT))


def _read(folder: Path) -> _Scheduled:
    """What the compiler dumped of a program that it has scheduled."""
    assignment = parse_assignment(read_dump(folder, _ASSIGNMENT))
    return _Scheduled(parse(read_dump(folder, "*after_optimizations.txt")), assignment)


def _measurement(scheduled: _Scheduled, target: str, chip: Chip, argument_bytes: int, output_bytes: int) -> Measurement:
    module, need = scheduled.module, scheduled.assignment.bytes
    peak, timeline = live_ranges(module, held=scheduled.assignment.held)
    cost = program_cost(module, chip)
    code = estimated_code_bytes(module)
    return Measurement(
        target=target,
        source=Source.PROBED,
        peak_bytes=peak,
        required_bytes=need + code + _SLACK_BYTES,
        argument_bytes=argument_bytes,
        output_bytes=output_bytes,
        temporary_bytes=max(0, need - argument_bytes - output_bytes),
        code_bytes=code,
        flops=cost.flops,
        bytes_accessed=cost.bytes_accessed,
        seconds=step_seconds(
            cost.roofline_seconds, host_bytes=cost.host_bytes, waiting=cost.waiting_seconds, chip=chip
        ),
        host_bytes=cost.host_bytes,
        collectives=cost.collectives,
        waiting_seconds=cost.waiting_seconds,
        sources={
            "peak_bytes": "probed",
            "required_bytes": "probed",
            "code_bytes": "estimated from the schedule",
            "flops": "counted in the scheduled program",
            "seconds": "roofline",
        },
        timeline=timeline,
        modules=cost.modules,
        costs=cost.instructions,
        warnings=_about_kernels(cost),
    )


def _compiled(
    probe: Measurement,
    executable: Any,
    module: Module,
    live: tuple[int, Timeline],
    chip: Chip,
    limit_bytes: int | None,
    own_rematerialization: bool,
) -> Measurement:
    stats = executable.get_compiled_memory_stats()
    cost = program_cost(module, chip)
    code = stats.generated_code_size_in_bytes
    need = probe.required_bytes - probe.code_bytes
    if limit_bytes is None or limit_bytes - need > 2 * code:
        # where memory is plentiful the compiler spends more of it on code than it must
        code = min(code, probe.code_bytes)
    required, said_by = need + code, "probed"
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    allocated = held + stats.temp_size_in_bytes
    # The probe's need is of the program as written, not of what the compiler makes of it; and near a limit schedules that hide
    # communication take more than the probe's.
    hides_communication = module.num_partitions > 1 and limit_bytes is not None
    if own_rematerialization or (hides_communication and allocated + code > required):
        required, said_by = allocated + code, "compiled"
    if limit_bytes is not None:
        required = min(required, limit_bytes)  # it does compile there
    seconds = cost.roofline_seconds if cost.cycles is None else cost.cycles / chip.clock_hz
    timeline_peak, timeline = live
    # at times the compiler states a peak above all that it allocated (0.0.52); the schedule then says what is live
    said = stats.peak_memory_in_bytes
    is_possible = said <= allocated
    return replace(
        probe,
        source=Source.COMPILED,
        peak_bytes=said if is_possible else min(timeline_peak, allocated),
        required_bytes=required,
        **stated(stats, cost),
        cycles=cost.cycles,
        seconds=step_seconds(seconds, host_bytes=cost.host_bytes, waiting=cost.waiting_seconds, chip=chip),
        limit_bytes=limit_bytes,
        fits_limit=None if limit_bytes is None else True,
        sources={
            **probe.sources,
            "peak_bytes": "compiled" if is_possible else "live ranges of the compiled schedule",
            "required_bytes": said_by,
            "code_bytes": "compiled",
            "cycles": "compiled",
            "seconds": "roofline" if cost.cycles is None else "cycles",
        },
        timeline=timeline,
        modules=cost.modules,
        costs=(*cost.instructions, *only_probed(probe.costs, cost.instructions, chip.clock_hz)),
        warnings=_about_kernels(cost),
    )


def _about_kernels(cost: ProgramCost) -> tuple[str, ...]:
    count = cost.unpriced_kernels
    if not count:
        return ()
    many = "1 kernel has no estimate" if count == 1 else f"{count} kernels have no estimate"
    priced = (
        "it is priced by its cost_estimate or its" if count == 1 else "they are priced by their cost_estimate or their"
    )
    return (f"{many} of cycles from the compiler: {priced} traffic",)


def _refused(probe: Measurement, error: Exception, limit_bytes: int | None) -> Measurement:
    """A program that does not fit: the figures of what was scheduled, and what it would have used by the compiler's word."""
    used = used_bytes(str(error))
    required = probe.required_bytes if used is None else used
    reason = str(error).splitlines()[0]
    return replace(
        probe,
        required_bytes=max(required, (limit_bytes or 0) + 1),
        limit_bytes=limit_bytes,
        fits_limit=False,
        sources={**probe.sources, "required_bytes": "probed" if used is None else "compiled"},
        warnings=(*probe.warnings, reason),
    )


def used_bytes(refusal: str) -> int | None:
    """What a program that does not fit would have used, by the compiler's message; None if it does not say."""
    found = _USED.search(refusal)
    if found is None:
        return None
    size, unit = (text for text in found.groups() if text)
    return int((float(size) + 0.005) * _UNITS[unit])  # two decimals of the unit are printed


def estimated_code_bytes(module: Module) -> int:
    """Bytes of code that a program takes in HBM near its limit, from the distinct kinds of fusions in its schedule."""
    counter, fingerprinter = OperationCounter(module), Fingerprinter(module)
    kinds: dict[str, int] = {}
    for instruction, _ in executions(module):
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-update", "-done")):
            continue
        if counter.operations(instruction)[0]:
            kinds[fingerprinter.fingerprint(instruction)] = _CODE_BYTES_OF_PRODUCT
        elif instruction.opcode == "fusion":
            kinds[fingerprinter.fingerprint(instruction)] = _CODE_BYTES_OF_FUSION
    return _FIXED_CODE_BYTES + sum(kinds.values())


def _is_out_of_memory(error: Exception) -> bool:
    """Whether HBM ran out; so it is too where the compiler names no memory."""
    text = str(error)
    named = _MEMORY.search(text)
    return any(sign in text for sign in _OUT_OF_MEMORY) and (
        named is None or "hbm" in map(str.lower, filter(None, named.groups()))
    )
