"""What a scheduled program costs: operations, bytes, a roofline, and cycles where the compiler gave them.

Comes in: a parsed, scheduled HLO module and a chip. Goes out: totals in which loops count as often as they run, and one
`InstructionCost` for each kind of instruction. The roofline of an instruction is the larger of its operations by the
chip's rates and its bytes in HBM by the chip's bandwidth; only the touched part of sliced and updated operands counts.
A user's kernels, of which the compiler estimates no cycles, take those of their roofline.

    cost = program_cost(parse(text), chip)
    cost.flops, cost.roofline_seconds, cost.instructions
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from rematplan.scopes import module_path, without_indices
from rematplan.target.chips import Chip
from rematplan.target.collectives import OPCODES, Clock, Collectives, results
from rematplan.target.executions import executions
from rematplan.target.fingerprint import Fingerprinter
from rematplan.target.flops import FREE, OperationCounter, Operations
from rematplan.target.hlo import HBM, HOST, Computation, Instruction, Module
from rematplan.target.kernels import kernels_in
from rematplan.target.measurement import CollectiveUse, InstructionCost, ModuleTime
from rematplan.target.provenance import Pass, Provenance, pass_of
from rematplan.target.work import Work, WorkCounter

_ASYNCHRONOUS = ("-start", "-update", "-done")
_PARTIAL_READS = frozenset({"dynamic-slice", "slice", "gather"})


@dataclass(frozen=True)
class ProgramCost:
    """Totals of one program, loops multiplied by their trip counts.

    Attributes:
      bytes_accessed: in HBM, asynchronous copies included.
      cycles: the compiler's estimate; None if it gave none.
      host_bytes: copied to and from the host's memory, the larger of both directions.
      modules: seconds by module and pass: from cycles where there are any, else of the roofline.
      collectives: by kind and pass.
      waiting_seconds: in which nothing is computed, because a collective is waited for; part of neither of the others.
      unpriced_kernels: scheduled kernels whose cycles, where there are any, are those of their roofline.
    """

    flops: float
    bytes_accessed: float
    roofline_seconds: float
    cycles: float | None
    instructions: tuple[InstructionCost, ...]
    host_bytes: float = 0.0
    modules: tuple[ModuleTime, ...] = ()
    collectives: tuple[CollectiveUse, ...] = ()
    waiting_seconds: float = 0.0
    unpriced_kernels: int = 0


def program_cost(module: Module, chip: Chip) -> ProgramCost:
    """Cost of a program on a chip."""
    counter, traffic, fingerprinter = OperationCounter(module), _Traffic(module), Fingerprinter(module)
    flops = bytes_accessed = seconds = 0.0
    to_host = from_host = 0.0
    any_cycles = _has_cycles(module)
    cycles = kernels = 0
    works = WorkCounter(module, chip)
    counts: dict[tuple[str, int | None], int] = {}
    kinds: dict[tuple[str, int | None], tuple[float, Work]] = {}
    shares, clock = _Shares(module), Clock(module, chip)
    for instruction, times in executions(module):
        if instruction.opcode in FREE:
            continue
        hbm_bytes = traffic.bytes_of(instruction)
        bytes_accessed += times * hbm_bytes
        if instruction.opcode.endswith("-start"):
            out, back = _host_bytes(instruction)
            to_host, from_host = to_host + times * out, from_host + times * back
        if instruction.opcode.endswith(_ASYNCHRONOUS):
            # asynchronous copies run beside the computation: their bytes count, their time does not
            passed = clock.passes(instruction, times, 0.0)
            shares.wait(passed.cause, times * passed.waited)
            continue
        operations = counter.operations(instruction)
        roofline = _roofline(operations, hbm_bytes, chip)
        estimated = instruction.cycles
        if estimated is None and kernels_in(instruction, module):
            kernels += 1
            estimated = round(roofline * chip.clock_hz) if any_cycles else None
        passed = clock.passes(instruction, times, roofline if estimated is None else estimated / chip.clock_hz)
        shares.wait(passed.cause, times * passed.waited)
        if passed.only_communicates:
            continue
        flops += times * (sum(operations[0].values()) + operations[1])
        seconds += times * roofline
        cycles += times * (estimated or 0)
        shares.add(instruction, cycles=times * (estimated or 0), roofline_seconds=times * roofline)
        kind = (fingerprinter.fingerprint(instruction), estimated)
        counts[kind] = counts.get(kind, 0) + times
        if kind not in kinds:
            kinds[kind] = roofline, works.work(instruction, hbm_bytes)
    instructions = tuple(
        InstructionCost(fingerprint, counts[fingerprint, estimated], estimated, roofline, astuple(work))
        for (fingerprint, estimated), (roofline, work) in kinds.items()
    )
    return ProgramCost(
        flops,
        bytes_accessed,
        seconds,
        float(cycles) if any_cycles else None,
        instructions,
        max(to_host, from_host),
        shares.modules(clock_hz=chip.clock_hz if any_cycles else None),
        clock.uses(),
        clock.waited,
        kernels,
    )


def step_seconds(computing: float, *, host_bytes: float, waiting: float, chip: Chip) -> float:
    """Seconds of a step from those in which it computes.

    Args:
      host_bytes: copies to and from the host run beside the computation, as fast as the link allows.
      waiting: seconds in which collectives are waited for.
    """
    copying = host_bytes / chip.host_bandwidth if chip.host_bandwidth else 0.0
    return max(computing, copying) + waiting


def _has_cycles(module: Module) -> bool:
    """Whether the compiler estimated cycles of anything that is computed."""
    return any(
        instruction.cycles is not None
        for instruction, _ in executions(module)
        if instruction.opcode not in FREE and not instruction.opcode.endswith(_ASYNCHRONOUS)
    )


def _roofline(operations: Operations, hbm_bytes: float, chip: Chip) -> float:
    matrix, vector = operations
    compute = sum(n / chip.peak(dtype) for dtype, n in matrix.items())
    if chip.vector_flops:
        compute += vector / chip.vector_flops.get("f32", chip.peak("f32"))
    return max(compute, hbm_bytes / chip.bandwidth)


class _Shares:
    """Time by module and pass."""

    def __init__(self, module: Module):
        self._provenance = Provenance(module)
        self._totals: dict[tuple[str, Pass], list[float]] = {}
        self._waits: dict[tuple[str, Pass], float] = {}

    def add(self, instruction: Instruction, *, cycles: float, roofline_seconds: float) -> None:
        total = self._totals.setdefault(self._place(instruction), [0.0, 0.0])
        total[0] += cycles
        total[1] += roofline_seconds

    def wait(self, collective: Instruction, seconds: float) -> None:
        """A collective is waited for."""
        if seconds:
            place = self._place(collective)
            self._totals.setdefault(place, [0.0, 0.0])
            self._waits[place] = self._waits.get(place, 0.0) + seconds

    def _place(self, instruction: Instruction) -> tuple[str, Pass]:
        op_name = self._provenance.maker(instruction).op_name
        return without_indices(module_path(op_name)), pass_of(op_name)

    def modules(self, *, clock_hz: float | None) -> tuple[ModuleTime, ...]:
        """Most time first; what takes none is left out."""
        found = (
            ModuleTime(
                place[0], place[1].value, self._waits.get(place, 0.0) + (cycles / clock_hz if clock_hz else seconds)
            )
            for place, (cycles, seconds) in self._totals.items()
        )
        return tuple(sorted((t for t in found if t.seconds), key=lambda t: (-t.seconds, t.module, t.step_pass)))


class _Traffic:
    """Bytes that instructions read and write in HBM."""

    def __init__(self, module: Module):
        self._module, self._collectives = module, Collectives(module)
        self._instructions = {i.name: i for c in module.computations.values() for i in c.instructions}

    def bytes_of(self, instruction: Instruction) -> float:
        if instruction.opcode.endswith(_ASYNCHRONOUS):
            return self._asynchronous_bytes(instruction)
        kernels = kernels_in(instruction, self._module)
        if kernels and all(kernel.bytes_accessed for kernel in kernels):
            return sum(kernel.bytes_accessed for kernel in kernels)
        if instruction.opcode == "fusion" and instruction.called:
            fused = self._module.computations.get(instruction.called[0])
            if fused is not None:
                return self._fusion_bytes(instruction, fused)
        operands = [self._instructions[n] for n in instruction.operands if n in self._instructions]
        written = _hbm_bytes(instruction)
        if instruction.opcode in _PARTIAL_READS:
            return 2.0 * written
        if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
            return 2.0 * _hbm_bytes(operands[1])
        return float(written + sum(_hbm_bytes(operand) for operand in operands))

    def _asynchronous_bytes(self, instruction: Instruction) -> float:
        """Of a collective as much as if it were waited for, where its operands come; of a copy at its start."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "async-update":
            start = self._instructions.get(operands[0])
            if start is None or start.operands:
                return 0.0  # counted already
            sends, operands = bool(self._collectives.inside(start)), operands[1:]
        else:
            sends = opcode.removesuffix("-start") in OPCODES or bool(self._collectives.inside(instruction))
        if sends and operands and not opcode.endswith("-done"):
            read = sum(_hbm_bytes(self._instructions[n]) for n in operands if n in self._instructions)
            return float(read + sum(leaf.bytes for leaf in results(instruction) if leaf.space == HBM))
        return float(_copied_bytes(instruction)) if opcode.endswith("-start") and operands else 0.0

    def _fusion_bytes(self, instruction: Instruction, fused: Computation) -> float:
        users: dict[str, list[Instruction]] = {}
        for inner in fused.instructions:
            for operand in inner.operands:
                users.setdefault(operand, []).append(inner)
        parameters = (inner for inner in fused.instructions if inner.opcode == "parameter")
        read = sum(self._read(parameter, users, instruction) for parameter in parameters)
        return read + _written(instruction, fused)

    def _read(self, parameter: Instruction, users: dict[str, list[Instruction]], fusion: Instruction) -> float:
        """Bytes that a fusion reads of one operand: slices only, where only slices are taken of it."""
        number = int(parameter.arguments)
        operand = self._instructions.get(fusion.operands[number]) if number < len(fusion.operands) else None
        whole = _hbm_bytes(operand if operand is not None else parameter)
        if not whole:
            return 0.0
        touched = 0.0
        pending = [(parameter.name, user) for user in users.get(parameter.name, [])]
        if not pending:
            return float(whole)
        while pending:
            name, user = pending.pop()
            if user.opcode == "bitcast":
                pending += [(user.name, further) for further in users.get(user.name, [])]
            elif user.opcode in _PARTIAL_READS and user.operands[0] == name:
                touched += sum(leaf.bytes for leaf in user.leaves)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # overwritten in place, not read
            else:
                return float(whole)
        return min(float(whole), touched)


def _written(fusion: Instruction, fused: Computation) -> float:
    """Bytes that a fusion writes: the update only, where it updates a slice in place."""
    inner = {i.name: i for i in fused.instructions}
    root = fused.root
    results = [inner[n] for n in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for result, leaf in zip(results, fusion.leaves, strict=False):
        if leaf.space != HBM:
            continue
        while result.opcode == "bitcast" and result.operands[0] in inner:
            result = inner[result.operands[0]]
        if result.opcode == "dynamic-update-slice" and len(result.operands) > 1:
            total += sum(each.bytes for each in inner[result.operands[1]].leaves)
        else:
            total += leaf.bytes
    return float(total)


def _copied_bytes(instruction: Instruction) -> int:
    """HBM traffic of an asynchronous copy: its size, once for each end that lies in HBM."""
    ends = [leaf for leaf in instruction.leaves if leaf.elements > 1][:2]
    if len(ends) < 2:
        return 0
    return min(leaf.bytes for leaf in ends) * sum(leaf.space == HBM for leaf in ends)


def _host_bytes(instruction: Instruction) -> tuple[int, int]:
    """Bytes that an asynchronous copy moves to the host's memory and from it."""
    leaves = [leaf for leaf in instruction.leaves if leaf.elements > 1]
    spaces = {leaf.space for leaf in leaves}
    if HOST not in spaces or len(spaces) < 2:
        return 0, 0
    size = min(leaf.bytes for leaf in leaves)  # of a slice that is read or written, not the array that it belongs to
    updates = any("update" in text for text in (instruction.name, instruction.op_name))
    written = updates or instruction.leaves[0].space == HOST
    return (size, 0) if written and "dynamic-slice" not in instruction.name else (0, size)


def _hbm_bytes(instruction: Instruction) -> int:
    return sum(leaf.bytes for leaf in instruction.leaves if leaf.space == HBM)
