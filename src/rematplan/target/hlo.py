"""Scheduled HLO text -> instructions and computations, as plain data.

Comes in: the text of one optimized, scheduled HLO module, from a compiler's dump or from `Compiled.as_text()`. Goes
out: a `Module`. One pass over the lines; attributes are looked up only when asked for, because most of the text
(back-end configurations) is never read. Knows nothing of JAX, chips or plans.

    module = parse(text)
    for instruction in module.entry.instructions:
        print(instruction.opcode, instruction.shape, module_path(instruction.op_name))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rematplan.target.locations import is_library

_BITS = {
    "pred": 8, "token": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
    "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_BITS_BY_PREFIX = (("f8", 8), ("f4", 4))  # the many 8 and 4 bit floats: f8e4m3fn, f4e2m1fn, ...

HBM = 0  # memory space of a layout without S(n); S(1) is VMEM on TPU
HOST = 5  # S(5): the host's memory, on TPU and GPU

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_TUPLE_END = re.compile(r"\) ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")  # jaxlib 0.12 writes an element of a tuple as `%tuple#0`
# jaxlib 0.12 writes an `async-start` that wraps one call as `custom-call-start`, and what follows it alike
_ASYNC = ("-start", "-update", "-done")
_SHORT_ASYNC = re.compile(r"(?:custom-call|fusion|call)(-start|-update|-done)$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_CYCLES = str(2**63 - 1)  # of what SparseCores do
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_LEAF = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_TUPLE_COMMENT = re.compile(r"/\*.*?\*/")
_TABLE_ROW = re.compile(r"(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a shape.

    Attributes:
      path: index into the tuple, `()` for a plain array.
      bytes: padded to the layout's tile, as the compiler allocates it.
      space: memory space, `HBM` or another number.
      order: dimensions by their stride, the smallest first.
    """

    path: tuple[int, ...]
    text: str
    dtype: str
    dimensions: tuple[int, ...]
    bytes: int
    space: int
    order: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bits(self) -> int:
        """Of one element."""
        return dtype_bits(self.dtype)

    def may_lie_in(self, other: Leaf) -> bool:
        """Whether its elements lie in memory as those of the other do; a different number of dimensions says nothing."""
        mine, others = ([n for n in leaf.order if leaf.dimensions[n] != 1] for leaf in (self, other))
        if len(mine) != len(others):
            return True
        sizes = [[leaf.dimensions[n] for n in order] for leaf, order in ((self, mine), (other, others))]
        same = [n for n in self.dimensions if n != 1] == [n for n in other.dimensions if n != 1]
        return sizes[0] == sizes[1] and (not same or _ranks(mine) == _ranks(others))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arguments: what stands between the parentheses: operands, a parameter's number or a constant's value.
      attributes: the rest of the line, metadata and backend configuration included.
    """

    name: str
    opcode: str
    shape: str
    arguments: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """The JAX name stack and primitive, empty if the compiler made this instruction."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def frame(self) -> int | None:
        match = _FRAME.search(self.attributes)
        return int(match[1]) if match else None

    @property
    def cycles(self) -> int | None:
        """Cycles estimated by the TPU compiler; None in a probe, and for instructions that it prices at nothing."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match and match[1] != _NO_CYCLES else None

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls."""
        names = _CALLED.findall(self.attributes)
        listed = _CALLED_LISTS.search(self.attributes)
        return (*names, *(_NAME.findall(listed[1]) if listed else ()))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return shape_leaves(self.shape)

    def attribute(self, name: str) -> str | None:
        """The word after `name=`, without a leading percent sign; None if there is none."""
        match = re.search(rf"(?:^|[ ,]){name}=%?([^\s,{{]+|\{{[^}}]*\}})", self.attributes)
        return match[1] if match else None


@dataclass(frozen=True, slots=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    text: str

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
      aliased_outputs: paths of the entry's outputs that reuse a donated argument's buffer.
      tables: the module's file, function, location and stack-frame tables, as text rows by number.
      num_partitions: devices that run it, each on its own part of the arrays.
    """

    name: str
    computations: dict[str, Computation]
    entry_name: str
    aliased_outputs: frozenset[tuple[int, ...]]
    tables: dict[str, dict[int, str]]
    num_partitions: int = 1

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    def location(self, frame: int | None) -> str:
        """The innermost frame outside JAX and Flax, as `file.py:12 (function)`; empty if unknown."""
        innermost = ""
        for file, line, function in self.frames(frame):
            text = f"{file.rsplit('/', 1)[-1]}:{line} ({function})"
            if not is_library(file):
                return text
            innermost = innermost or text
        return innermost

    def frames(self, frame: int | None) -> Iterator[tuple[str, int, str]]:
        """File, line and function of each frame, innermost first."""
        while frame:
            fields = _fields(self.tables["StackFrames"].get(frame, ""))
            place = _fields(self.tables["FileLocations"].get(fields.get("file_location_id", 0), ""))
            if not place:
                return
            file = self.tables["FileNames"].get(place["file_name_id"], "").strip('"')
            function = self.tables["FunctionNames"].get(place["function_name_id"], "").strip('"')
            yield file, place["line"], function
            # frame numbers start at 1 and parents are written one higher, so that a root's parent is 1 (jaxlib 0.10.2)
            parent = fields.get("parent_frame_id", 1) - 1
            frame = parent if parent < frame else 0


def parse(text: str) -> Module:
    """Read the text of one HLO module. Raises ValueError if it holds no entry computation."""
    lines = text.splitlines()
    header = lines[0] if lines else ""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table: dict[int, str] | None = None
    computations: dict[str, Computation] = {}
    entry_name = ""
    name, body, start = "", list[Instruction](), 0
    for number, line in enumerate(lines):
        if name and line.startswith("  "):
            instruction = _instruction(line)
            if instruction is not None:
                body.append(instruction)
        elif line.startswith("}"):
            if name:
                computations[name] = Computation(name, _with_elements(body), "\n".join(lines[start:number]))
            name, body = "", []
        elif match := _COMPUTATION.match(line):
            name, body, start, table = match[2], [], number + 1, None
            entry_name = name if match[1] else entry_name
        elif line in tables:
            table = tables[line]
        elif table is not None and (row := _TABLE_ROW.match(line)):
            table[int(row[1])] = row[2]
    if entry_name not in computations:
        raise ValueError("HLO text without an entry computation")
    module_name = header.removeprefix("HloModule ").split(",", 1)[0]
    partitions = _PARTITIONS.search(header)
    return Module(
        module_name,
        computations,
        entry_name,
        _aliased_outputs(header),
        tables,
        int(partitions[1]) if partitions else 1,
    )


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start = match.end()
    if line[start] == "(":  # a tuple: only at its end does a word with an opening parenthesis follow
        tuple_end = _TUPLE_END.search(line, start)
        if tuple_end is None:
            return None
        space = tuple_end.start() + 1
    else:
        space = line.index(" ", start)
    opening = line.index("(", space)
    closing = _closing(line, opening)
    arguments = line[opening + 1 : closing]
    operands = tuple((_OPERAND if "#" in arguments else _NAME).findall(arguments)) if "%" in arguments else ()
    opcode = line[space + 1 : opening]
    if opcode.endswith(_ASYNC) and (short := _SHORT_ASYNC.match(opcode)):
        opcode = f"async{short[1]}"
    return Instruction(match[2], opcode, line[start:space], arguments, operands, line[closing + 1 :], bool(match[1]))


def _with_elements(body: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """With the `get-tuple-element` instructions that operands like `%tuple#0` stand for, each behind what makes the tuple."""
    wanted: dict[str, dict[str, int]] = {}
    for instruction in body:
        if "#" in instruction.arguments:
            for operand in instruction.operands:
                name, *indices = operand.split("#")
                for index in indices:
                    wanted.setdefault(name, {})[f"{name}#{index}"] = int(index)
                    name = f"{name}#{index}"
    return tuple(each for i in body for each in _and_elements(i, wanted)) if wanted else tuple(body)


def _and_elements(of: Instruction, wanted: dict[str, dict[str, int]]) -> Iterator[Instruction]:
    yield of
    for name, index in wanted.get(of.name, {}).items():
        shape = _split(_TUPLE_COMMENT.sub("", of.shape).strip()[1:-1])[index]
        element = Instruction(
            name, "get-tuple-element", shape, f"%{of.name}", (of.name,), f", index={index}", is_root=False
        )
        yield from _and_elements(element, wanted)


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    closing = text.index(")", opening)
    inner = text.count("(", opening + 1, closing)
    while inner:  # operands printed with their shapes contain parentheses
        following = text.index(")", closing + 1)
        inner += text.count("(", closing + 1, following) - 1
        closing = following
    return closing


def _aliased_outputs(header: str) -> frozenset[tuple[int, ...]]:
    """Output paths of `input_output_alias={ {0}: (3, {}, may-alias), ... }`."""
    start = header.find("input_output_alias={")
    if start < 0:
        return frozenset()
    pairs = re.match(r"input_output_alias=\{((?: *\{[\d, ]*\}: \([^)]*\),?)*) *\}", header[start:])
    found = re.findall(r"\{([\d, ]*)\}: \(", pairs[1]) if pairs else []
    return frozenset(tuple(int(n) for n in path.split(",") if n.strip()) for path in found)


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in _FIELD.findall(row)}


@lru_cache(maxsize=1 << 16)
def shape_leaves(shape: str) -> tuple[Leaf, ...]:
    """The arrays of a shape as HLO prints it, tuples flattened."""
    return tuple(_leaves(_TUPLE_COMMENT.sub("", shape).strip(), ()))


def _leaves(shape: str, path: tuple[int, ...]) -> Iterator[Leaf]:
    if shape.startswith("("):
        for index, part in enumerate(_split(shape[1:-1])):
            yield from _leaves(part, (*path, index))
    else:
        yield _leaf(shape, path)


def _split(text: str) -> list[str]:
    """Split at commas outside of any bracket."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts


def _leaf(shape: str, path: tuple[int, ...]) -> Leaf:
    match = _LEAF.match(shape)
    if match is None:
        return Leaf(path, shape, "token", (), 0, HBM)
    dtype, layout = match[1], match[3] or ""
    dimensions = tuple(int(n.lstrip("<=")) for n in match[2].split(",") if n)
    space = _SPACE.search(layout)
    order_text, _, tail = layout.partition(":")
    order = tuple(int(n) for n in order_text.split(",") if n.strip())  # minor dimension first
    order_or_default = order or tuple(reversed(range(len(dimensions))))
    padded = _padded_bytes(dtype, dimensions, order, tail)
    return Leaf(path, shape, dtype, dimensions, padded, int(space[1]) if space else HBM, order_or_default)


def _ranks(order: list[int]) -> list[int]:
    """The same order where the dimensions are numbered without gaps."""
    numbered = sorted(order)
    return [numbered.index(n) for n in order]


def _padded_bytes(dtype: str, dimensions: tuple[int, ...], order: tuple[int, ...], tail: str) -> int:
    tile = _TILE.search(tail)
    sizes = list(dimensions)
    if tile and order and sizes:
        for position, size in enumerate(reversed([int(n) for n in tile[1].split(",")])):
            if position < len(order):
                padded = order[position]
                sizes[padded] = math.ceil(sizes[padded] / size) * size
    return math.ceil(math.prod(sizes) * dtype_bits(dtype) / 8)


def dtype_bits(dtype: str) -> int:
    """Bits of one element of an HLO element type."""
    if dtype in _BITS:
        return _BITS[dtype]
    return next((bits for prefix, bits in _BITS_BY_PREFIX if dtype.startswith(prefix)), 32)
