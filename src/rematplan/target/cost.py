"""What scheduled instructions cost: operations, bytes, a roofline, and fingerprints under which cycles are remembered.

Comes in: a parsed, scheduled HLO module and a chip. Goes out: totals for the program (`program_cost`), in which loops count
as often as they run, and one `InstructionCost` for each kind of instruction. The roofline of an instruction is the larger of
its matrix and vector operations by the chip's rates, and of its bytes in HBM by the chip's bandwidth.

    cost = program_cost(parse(text), chip)
    cost.flops, cost.roofline_seconds, cost.instructions
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from functools import lru_cache

from rematplan.target.chips import Chip
from rematplan.target.hlo import HBM, Computation, Instruction, Leaf, Module, executions
from rematplan.target.measurement import InstructionCost

_FREE = frozenset(
    {
        "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "optimization-barrier", "opt-barrier",
        "domain", "add-dependency", "partition-id", "replica-id", "while", "call", "conditional",
    }
)  # fmt: skip
_MOVES = frozenset(
    {
        "copy", "broadcast", "reshape", "transpose", "slice", "concatenate", "pad", "reverse", "gather", "iota",
        "dynamic-slice", "dynamic-update-slice", "rng-bit-generator", "custom-call", "convert", "bitcast-convert", "fusion",
    }
)  # no arithmetic; XLA's own count takes a convert for one operation, here it is data movement  # fmt: skip
_TRANSCENDENTAL = frozenset(
    {
        "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "tan", "sine", "cosine", "sqrt",
        "rsqrt", "cbrt", "power", "atan2", "erf",
    }
)  # counted apart by XLA and not as operations  # fmt: skip
_REDUCING = frozenset({"reduce", "reduce-window", "all-reduce"})
_PARTIAL_READS = frozenset({"dynamic-slice", "slice", "gather"})
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_COMPUTATION_ATTRIBUTE = re.compile(r"(calls|to_apply|body|condition)=%?[\w.\-]+")
_SPACE = re.compile(r"S\(\d+\)")
_WINDOW_FIELD = re.compile(r"(\w+)=([\dx_\-]+)")


@dataclass(frozen=True)
class ProgramCost:
    """Totals of one program, loops multiplied by their trip counts.

    Attributes:
      cycles: the compiler's estimate; None if it gave none.
      bytes_accessed: in HBM, asynchronous copies included.
    """

    flops: float
    bytes_accessed: float
    roofline_seconds: float
    cycles: float | None
    instructions: tuple[InstructionCost, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """Matrix operations by operand type, other operations, and bytes in HBM of one execution."""

    matrix_flops: tuple[tuple[str, float], ...]
    vector_flops: float
    hbm_bytes: float

    @property
    def flops(self) -> float:
        return sum(n for _, n in self.matrix_flops) + self.vector_flops


def program_cost(module: Module, chip: Chip) -> ProgramCost:
    """Cost of a program on a chip."""
    work_of, key_of = _WorkCounter(module), _Fingerprinter(module)
    flops = bytes_accessed = seconds = 0.0
    cycles, any_cycles = 0, False
    kinds: dict[tuple[str, str, int | None, float], int] = {}
    for instruction, times in executions(module):
        if instruction.opcode in _FREE:
            continue
        work = work_of.instruction(instruction)
        flops += times * work.flops
        bytes_accessed += times * work.hbm_bytes
        # asynchronous copies run beside the computation; their bytes count, their time does not
        roofline = 0.0 if instruction.opcode.endswith(("-start", "-done")) else _roofline(work, chip)
        seconds += times * roofline
        estimated = instruction.cycles
        if estimated is not None:
            any_cycles = True
            cycles += times * estimated
        if roofline or estimated:
            kind = (*key_of.instruction(instruction), estimated, roofline)
            kinds[kind] = kinds.get(kind, 0) + times
    instructions = tuple(InstructionCost(f, s, count, c, r) for (f, s, c, r), count in kinds.items())
    return ProgramCost(flops, bytes_accessed, seconds, float(cycles) if any_cycles else None, instructions)


def _roofline(work: _Work, chip: Chip) -> float:
    compute = sum(n / chip.peak(dtype) for dtype, n in work.matrix_flops)
    if chip.vector_flops:
        compute += work.vector_flops / chip.vector_flops.get("f32", chip.peak("f32"))
    return max(compute, work.hbm_bytes / chip.bandwidth)


class _WorkCounter:
    """Operations and bytes of instructions; computations are counted once and remembered."""

    def __init__(self, module: Module):
        self._module = module
        self._entry_shapes: dict[str, Instruction] = {
            i.name: i for c in module.computations.values() for i in c.instructions
        }
        self._computations: dict[str, tuple[dict[str, float], float]] = {}

    def instruction(self, instruction: Instruction) -> _Work:
        matrix, vector = self._operations(instruction)
        return _Work(tuple(matrix.items()), vector, self._hbm_bytes(instruction))

    def _operations(self, instruction: Instruction) -> tuple[dict[str, float], float]:
        opcode = instruction.opcode
        if opcode in ("fusion", "call", "async-start"):
            matrix: dict[str, float] = {}
            vector = 0.0
            for name in instruction.called:
                inner_matrix, inner_vector = self._computation(name)
                vector += inner_vector
                for dtype, n in inner_matrix.items():
                    matrix[dtype] = matrix.get(dtype, 0.0) + n
            return matrix, vector
        if opcode in ("dot", "convolution"):
            operands = [self._entry_shapes[name].leaves[0] for name in instruction.operands[:2]]
            result = instruction.leaves[0]
            n = _dot_flops(instruction, operands, result) if opcode == "dot" else _convolution_flops(
                instruction.attributes, operands[0], operands[1], result
            )  # fmt: skip
            return {_matrix_dtype(operands): n}, 0.0
        return {}, self._vector_operations(instruction)

    def _vector_operations(self, instruction: Instruction) -> float:
        opcode = instruction.opcode
        if opcode in _FREE or opcode in _MOVES or opcode in _TRANSCENDENTAL or opcode.endswith(("-start", "-done")):
            return 0.0
        if opcode in _REDUCING:
            outputs = instruction.leaves
            inputs = [self._entry_shapes[name].leaves[0] for name in instruction.operands[: len(outputs)]]
            reducer = max((self._computation(name)[1] for name in instruction.called), default=1.0)
            if opcode == "reduce-window":
                window = math.prod(_window(instruction.attributes).get("size", [1]))
                return outputs[0].elements * max(window - 1, 0) * reducer
            return max(inputs[0].elements - outputs[0].elements, 0) * reducer if inputs else 0.0
        return float(sum(leaf.elements for leaf in instruction.leaves))

    def _computation(self, name: str) -> tuple[dict[str, float], float]:
        if name not in self._computations:
            matrix: dict[str, float] = {}
            vector = 0.0
            computation = self._module.computations.get(name)
            for inner in computation.instructions if computation else ():
                inner_matrix, inner_vector = self._operations(inner)
                vector += inner_vector
                for dtype, n in inner_matrix.items():
                    matrix[dtype] = matrix.get(dtype, 0.0) + n
            self._computations[name] = matrix, vector
        return self._computations[name]

    def _hbm_bytes(self, instruction: Instruction) -> float:
        """Bytes read and written in HBM; of a sliced operand only the slice, of an updated one only the update."""
        if instruction.opcode.endswith("-done"):
            return 0.0
        if instruction.opcode.endswith("-start"):  # (from and to, one of them usually outside HBM)
            return float(_copied_bytes(instruction))
        if instruction.opcode == "fusion" and instruction.called:
            fused = self._module.computations.get(instruction.called[0])
            if fused is not None:
                return self._fusion_bytes(instruction, fused)
        operands = [self._entry_shapes[n] for n in instruction.operands if n in self._entry_shapes]
        result = sum(leaf.bytes for leaf in instruction.leaves if leaf.space == HBM)
        if instruction.opcode in _PARTIAL_READS:
            return 2.0 * result
        if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
            return 2.0 * sum(leaf.bytes for leaf in operands[1].leaves)
        read = sum(leaf.bytes for operand in operands for leaf in operand.leaves if leaf.space == HBM)
        return float(read + result)

    def _fusion_bytes(self, instruction: Instruction, fused: Computation) -> float:
        users: dict[str, list[Instruction]] = {}
        for inner in fused.instructions:
            for operand in inner.operands:
                users.setdefault(operand, []).append(inner)
        total = 0.0
        for inner in fused.instructions:
            if inner.opcode == "parameter":
                total += _read_bytes(inner, users, instruction.operands, self._entry_shapes)
        names = {inner.name: inner for inner in fused.instructions}
        root = fused.root
        results = [names[n] for n in root.operands] if root.opcode == "tuple" else [root]
        leaves = instruction.leaves
        for position, result in enumerate(results):
            if position >= len(leaves) or leaves[position].space != HBM:
                continue
            written = _through_bitcasts(result, names)
            if written.opcode == "dynamic-update-slice" and len(written.operands) > 1:
                total += sum(leaf.bytes for leaf in names[written.operands[1]].leaves)
            else:
                total += leaves[position].bytes
        return total


def _read_bytes(
    parameter: Instruction,
    users: dict[str, list[Instruction]],
    operands: tuple[str, ...],
    instructions: dict[str, Instruction],
) -> float:
    number = int(parameter.arguments)
    outer = instructions.get(operands[number]) if number < len(operands) else None
    leaves = outer.leaves if outer is not None else parameter.leaves
    if all(leaf.space != HBM for leaf in leaves):
        return 0.0
    readers, pending = [], list(users.get(parameter.name, []))
    while pending:
        reader = pending.pop()
        if reader.opcode == "bitcast":
            pending += users.get(reader.name, [])
        else:
            readers.append((reader, parameter.name))
    whole = float(sum(leaf.bytes for leaf in leaves))
    if not readers:
        return whole
    touched = 0.0
    for reader, _ in readers:
        if reader.opcode in _PARTIAL_READS:
            touched += sum(leaf.bytes for leaf in reader.leaves)
        elif reader.opcode == "dynamic-update-slice" and reader.operands[0] == parameter.name:
            continue  # overwritten in place
        else:
            return whole
    return min(whole, touched)


def _through_bitcasts(instruction: Instruction, names: dict[str, Instruction]) -> Instruction:
    while instruction.opcode == "bitcast" and instruction.operands[0] in names:
        instruction = names[instruction.operands[0]]
    return instruction


def _copied_bytes(instruction: Instruction) -> int:
    """Bytes of HBM traffic of an asynchronous copy: its destination's size, twice if both ends lie in HBM."""
    leaves = [leaf for leaf in instruction.leaves if leaf.elements > 1]
    if len(leaves) < 2:
        return 0
    size = min(leaf.bytes for leaf in leaves[:2])
    return size * sum(leaf.space == HBM for leaf in leaves[:2])


def _matrix_dtype(operands: list[Leaf]) -> str:
    """The operand type that decides the rate: the wider of the two."""
    return max((leaf.dtype for leaf in operands), key=lambda d: ({"bf16": 16, "f16": 16, "f64": 64}.get(d, 32 if d[0] == "f" and d[1:].isdigit() else 8)))  # fmt: skip


def _dot_flops(instruction: Instruction, operands: list[Leaf], result: Leaf) -> float:
    contracted = instruction.attribute("lhs_contracting_dims") or "{}"
    dimensions = [int(n) for n in contracted.strip("{}").split(",") if n.strip()]
    return 2.0 * result.elements * math.prod(operands[0].dimensions[d] for d in dimensions)


def _convolution_flops(attributes: str, lhs: Leaf, rhs: Leaf, result: Leaf) -> float:
    """Multiplications and additions of a convolution, positions in the padding and between dilated elements left out.

    The TPU compiler writes every matrix product as a convolution, batch dimensions as dilated spatial ones, so that most
    window positions multiply nothing.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    window = _window(attributes)
    spatial = [d for d in labels[1] if d.isdigit()]
    size = window.get("size", [1] * len(spatial))
    stride = window.get("stride", [1] * len(spatial))
    pads = window.get("pad", [0] * (2 * len(spatial)))
    lhs_dilation = window.get("lhs_dilate", [1] * len(spatial))
    rhs_dilation = window.get("rhs_dilate", [1] * len(spatial))
    positions = 1
    for index, label in enumerate(sorted(spatial)):
        positions *= _valid_positions(
            size[index], stride[index], pads[2 * index], lhs_dilation[index], rhs_dilation[index],
            lhs.dimensions[labels[1].index(label)], result.dimensions[labels[3].index(label)],
        )  # fmt: skip
    batch = result.dimensions[labels[3].index("b")]
    out_features = result.dimensions[labels[3].index("f")]
    in_features = rhs.dimensions[labels[2].index("i")]
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    return 2.0 * batch * out_features * in_features * positions / (int(groups[1]) if groups else 1)


@lru_cache(maxsize=4096)
def _valid_positions(size: int, stride: int, pad: int, lhs_dilation: int, rhs_dilation: int, input_: int, output: int) -> int:
    """Pairs of an output position and a window position that meet an input element."""
    if size == 1 and stride == 1 and pad == 0 and lhs_dilation == 1:
        return output
    valid = 0
    dilated = (input_ - 1) * lhs_dilation
    for k in range(size):
        for o in range(output):
            position = o * stride - pad + k * rhs_dilation
            valid += 0 <= position <= dilated and position % lhs_dilation == 0
    return valid


def _window(attributes: str) -> dict[str, list[int]]:
    """Fields of `window={size=3x3 pad=1_1x1_1}`; pads come as low and high of each dimension in turn."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    if match is None:
        return {}
    return {name: [int(n) for n in re.split(r"[x_]", value)] for name, value in _WINDOW_FIELD.findall(match[1])}


class _Fingerprinter:
    """Hashes of instructions that do not depend on names, metadata or the order in which independent lines are written."""

    def __init__(self, module: Module):
        self._module = module
        self._instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
        self._computations: dict[str, str] = {}

    def instruction(self, instruction: Instruction) -> tuple[str, str]:
        """Fingerprint, and the same with memory spaces left out."""
        shapes = [self._instructions[n].shape for n in instruction.operands if n in self._instructions]
        called = [self._computation(n) for n in instruction.called]
        parts = [instruction.opcode, _own_attributes(instruction), *called, instruction.shape, *shapes]
        return _hash(parts), _hash([_SPACE.sub("", part) for part in parts])

    def _computation(self, name: str) -> str:
        """Hash of what a computation computes, from its root down, memory spaces left out."""
        if name not in self._computations:
            computation = self._module.computations.get(name)
            hashes: dict[str, str] = {}
            for inner in computation.instructions if computation else ():
                parts = [inner.opcode, _SPACE.sub("", inner.shape)]
                if inner.opcode == "constant":
                    parts.append(inner.arguments)
                elif inner.opcode != "parameter":
                    parts.append(_own_attributes(inner))
                parts += [hashes.get(operand, "") for operand in inner.operands]
                parts += [self._computation(n) for n in inner.called]
                hashes[inner.name] = _hash(parts)
            self._computations[name] = hashes[computation.root.name] if computation else ""
        return self._computations[name]


def _own_attributes(instruction: Instruction) -> str:
    """Attributes without metadata, back-end configuration and names of computations."""
    attributes = instruction.attributes.split(", backend_config=", 1)[0]
    if "metadata=" in attributes:
        attributes = _METADATA.sub("", attributes)
    return _COMPUTATION_ATTRIBUTE.sub(r"\1", attributes)


def _hash(parts: list[str]) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
