"""Live bytes along a scheduled program, and the buffers that are live at the peak.

Comes in: a parsed HLO module. Goes out: a `Timeline` and its peak. Every value of the schedule is a buffer from the
instruction that makes it to the last one that reads it, through tuples, bitcasts, asynchronous pairs and loops; loops
and calls add the peak of their body. Two rules imitate the compiler's buffer assignment: arguments and outputs are held
throughout, and an element-wise instruction, or a product that adds to an operand, writes over one of the same size that
dies there.

    peak_bytes, timeline = live_ranges(parse(text))
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from rematplan.scopes import module_path, without_indices
from rematplan.target.executions import moves
from rematplan.target.hlo import HBM, HOST, Computation, Instruction, Leaf, Module
from rematplan.target.measurement import Alive, Buffer, Role, Timeline
from rematplan.target.provenance import Pass, Provenance, argument_number, pass_of

LIMIT = 600  # points kept in a timeline: enough for any screen
_AT_PEAK = 40  # largest buffers listed

_FORWARDED = frozenset({"bitcast", "while", "optimization-barrier", "opt-barrier", "add-dependency", "domain"})
_ENTERED = frozenset({"while", "call", "conditional", "async-start"})
_IN_PLACE = frozenset(
    {"fusion", "add", "multiply", "subtract", "convert", "select", "maximum", "dynamic-update-slice", "scatter", "copy"}
)
_ELEMENT_WISE = frozenset(
    {"add", "multiply", "subtract", "divide", "convert", "select", "maximum", "minimum", "negate", "bitcast"}
)
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_ALIASING = re.compile(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}")

Path = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Range:
    """One buffer while live ranges are worked out; mutable, because its end moves with every use.

    Attributes:
      outermost: it is one of the entry's, so that `end` is a position in the whole schedule.
      from_host: it is where a copy from the host's memory goes.
    """

    leaf: Leaf
    bytes: int
    start: int
    end: int
    kind: str
    maker: Instruction
    outermost: bool = True
    from_host: bool = False


@dataclass(slots=True)
class _Ranges:
    """Live ranges of one computation.

    Attributes:
      inner: by instruction index, the peak of the computations called there.
    """

    ranges: list[_Range] = field(default_factory=list)
    values: dict[str, dict[Path, _Range]] = field(default_factory=dict)
    inner: dict[int, _Peak] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Peak:
    bytes: int
    position: int
    live: tuple[_Range, ...]
    series: tuple[int, ...]


def live_ranges(module: Module, *, space: int = HBM, held: Set[tuple[str, Path]] = frozenset()) -> tuple[int, Timeline]:
    """Peak of live bytes in a memory space, and the timeline that leads to it.

    Args:
      held: temporaries, by instruction and tuple path, that lie in an argument's or output's memory, which counts anyway.
    """
    peak = _computation_peak(module, module.entry, space, held, {})
    backward = _backward_start(module.entry)
    kept = _thinned(peak.series)
    describe = _Describer(module, backward)
    buffers = [describe.buffer(r) for r in sorted(peak.live, key=lambda r: -r.bytes)]
    timeline = Timeline(
        position=tuple(kept),
        live_bytes=tuple(peak.series[i] for i in kept),
        backward_starts=backward,
        at_peak=tuple(buffers[:_AT_PEAK]),
        alive=_groups(buffers),
        argument_bytes=_argument_bytes(peak.live, describe.provenance),
    )
    return peak.bytes, timeline


def _backward_start(entry: Computation) -> int | None:
    """Where the backward pass begins: the position that leaves the fewest instructions on the wrong side.

    Schedulers move single instructions across, such as the conversion of a weight that is recomputed.
    """
    passes = [pass_of(i.op_name) for i in entry.instructions]
    behind = [step_pass in (Pass.BACKWARD, Pass.RECOMPUTE) for step_pass in passes]
    if not any(behind):
        return None
    wrong = [passes.count(Pass.FORWARD)]  # by position: forward instructions from there on, and backward ones before it
    for step_pass, is_behind in zip(passes, behind, strict=True):
        wrong.append(wrong[-1] + is_behind - (step_pass is Pass.FORWARD))
    return min(range(len(passes)), key=wrong.__getitem__)


def _computation_peak(
    module: Module, computation: Computation, space: int, held: Set[tuple[str, Path]], known: dict[str, _Peak]
) -> _Peak:
    is_entry = computation.name == module.entry_name
    ranges = _Ranges()
    for index, instruction in enumerate(computation.instructions):
        _use_operands(ranges, index, instruction)
        ranges.values[instruction.name] = _value(module, ranges, index, instruction, is_entry)
        inner = _inner_peak(module, instruction, space, held, known)
        if inner is not None:
            ranges.inner[index] = inner
    _hold_outputs(module, computation, ranges, is_entry)
    for each in ranges.ranges:
        each.outermost = is_entry
        if each.kind == "temporary" and (each.maker.name, each.leaf.path) in held:
            each.bytes = 0
    _write_in_place(module, computation, ranges)
    return _peak(len(computation.instructions), ranges, space)


def _use_operands(ranges: _Ranges, index: int, instruction: Instruction) -> None:
    if instruction.opcode == "get-tuple-element":
        return  # reads nothing; it may stand far behind the last use of the tuple's other elements
    for operand in instruction.operands:
        for used in ranges.values.get(operand, {}).values():
            used.end = index


def _inner_peak(
    module: Module, instruction: Instruction, space: int, held: Set[tuple[str, Path]], known: dict[str, _Peak]
) -> _Peak | None:
    """The largest peak among the computations that an instruction enters."""
    if instruction.opcode not in _ENTERED:
        return None
    if instruction.opcode == "async-start" and (not instruction.operands or moves(module, instruction)):
        return None  # what is moved goes to the result, which the start or its update has already
    largest = None
    for name in instruction.called:
        if name not in module.computations:
            continue
        if name not in known:
            known[name] = _computation_peak(module, module.computations[name], space, held, known)
        if largest is None or known[name].bytes > largest.bytes:
            largest = known[name]
    return largest


def _value(module: Module, ranges: _Ranges, index: int, instruction: Instruction, is_entry: bool) -> dict[Path, _Range]:
    """The buffers that an instruction's result consists of, by tuple path: new ones or those of its operands."""
    opcode, values = instruction.opcode, ranges.values
    operands = [values.get(name, {}) for name in instruction.operands]
    if opcode == "parameter":
        return _new(ranges, index, instruction, "argument" if is_entry else "loop state")
    if opcode == "constant" and is_entry:
        return _new(ranges, index, instruction, "constant")
    if opcode == "get-tuple-element":
        element = int(instruction.attribute("index") or 0)
        return {path[1:]: b for path, b in operands[0].items() if path and path[0] == element}
    if opcode == "tuple":
        return {(i, *path): b for i, operand in enumerate(operands) for path, b in operand.items()}
    if opcode in _FORWARDED and operands:
        forwarded = dict(operands[0])
        if opcode == "bitcast" and () not in forwarded:
            return {(): next(iter(forwarded.values()))} if forwarded else {}
        return forwarded
    if opcode.endswith("-done") and operands:
        return _finished(instruction, operands[0])
    if opcode.endswith("-start") and operands:
        return _started(ranges, index, instruction, operands)
    if opcode == "async-update" and len(operands) < 2:
        return operands[0]
    if opcode == "custom-call" and "ConcatBitcast" in instruction.attributes:
        for operand in operands:  # the parts already lie next to each other inside the whole
            for part in operand.values():
                part.bytes = 0
        return _new(ranges, index, instruction, "temporary")
    return _computed(module, ranges, index, instruction, operands)


def _new(ranges: _Ranges, index: int, instruction: Instruction, kind: str) -> dict[Path, _Range]:
    return {leaf.path: _new_leaf(ranges, index, instruction, leaf, kind) for leaf in instruction.leaves}


def _new_leaf(ranges: _Ranges, index: int, instruction: Instruction, leaf: Leaf, kind: str) -> _Range:
    made = _Range(leaf, leaf.bytes, index, index, kind, instruction)
    ranges.ranges.append(made)
    return made


def _finished(instruction: Instruction, started: dict[Path, _Range]) -> dict[Path, _Range]:
    """The result in what an asynchronous start returned: its first element for copies, its second otherwise, or all of it."""
    if instruction.opcode == "all-reduce-done":
        return started
    element = 0 if instruction.opcode == "copy-done" else 1
    result = {path[1:]: b for path, b in started.items() if path and path[0] == element}
    return result or started


def _started(
    ranges: _Ranges, index: int, instruction: Instruction, operands: list[dict[Path, _Range]]
) -> dict[Path, _Range]:
    """A start returns its source and a new destination: (to, from, ...) for copies, ((from), to, ...) otherwise.

    That of an all-reduce returns destinations only.
    """
    if instruction.opcode == "all-reduce-start":
        return _new(ranges, index, instruction, "temporary")
    sources = [b for operand in operands for b in operand.values()]
    is_copy = instruction.opcode == "copy-start"
    value: dict[Path, _Range] = {}
    for leaf in instruction.leaves:
        is_source = leaf.path == (1,) if is_copy else leaf.path[:1] == (0,)
        if is_source and sources:
            position = 0 if is_copy or len(leaf.path) < 2 else leaf.path[1]
            value[leaf.path] = sources[min(position, len(sources) - 1)]
        else:
            value[leaf.path] = _new_leaf(ranges, index, instruction, leaf, "temporary")
            value[leaf.path].from_host = is_copy and any(b.leaf.space == HOST for b in sources)
    return value


def _computed(
    module: Module, ranges: _Ranges, index: int, instruction: Instruction, operands: list[dict[Path, _Range]]
) -> dict[Path, _Range]:
    aliased = _declared_aliases(instruction, operands)
    value: dict[Path, _Range] = {}
    for leaf in instruction.leaves:
        if leaf.path in aliased:
            value[leaf.path] = aliased[leaf.path]
            continue
        if instruction.opcode == "async-update" and leaf.path[:1] == (0,):  # what it brings to its start
            value[leaf.path] = operands[1 + leaf.path[1]][()]
            continue
        updated = None
        if _updates_in_place(module, instruction, leaf.path):
            candidates = (b for operand in operands for b in operand.values() if b.kind != "argument")
            for b in candidates:
                if b.bytes == leaf.bytes and b.leaf.space == leaf.space:
                    updated = b
        value[leaf.path] = updated or _new_leaf(ranges, index, instruction, leaf, "temporary")
    return value


def _declared_aliases(instruction: Instruction, operands: list[dict[Path, _Range]]) -> dict[Path, _Range]:
    if "output_to_operand_aliasing" not in instruction.attributes:
        return {}
    text = instruction.attributes.split("output_to_operand_aliasing=", 1)[1]
    aliased: dict[Path, _Range] = {}
    for output, operand, inner in _ALIASING.findall(text):
        source = operands[int(operand)].get(_path(inner)) if int(operand) < len(operands) else None
        if source is not None:
            aliased[_path(output)] = source
    return aliased


def _path(text: str) -> Path:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _updates_in_place(module: Module, instruction: Instruction, path: Path) -> bool:
    """Dynamic-update-slices and scatters write into their operand, also as a fusion's result or where it says so."""
    if instruction.opcode in _UPDATES or "dynamic-update-slice" in instruction.name:
        return True
    if instruction.opcode != "fusion":
        return False
    fused = (module.computations.get(name) for name in instruction.called)
    return "dynamic_update_slice" in instruction.op_name or any(_result(f, path).opcode in _UPDATES for f in fused if f)


def _result(fused: Computation, path: Path) -> Instruction:
    """What makes this element of a fusion's result."""
    root = fused.root
    if root.opcode != "tuple" or len(path) != 1:
        return root
    return next(i for i in fused.instructions if i.name == root.operands[path[0]])


def _hold_outputs(module: Module, computation: Computation, ranges: _Ranges, is_entry: bool) -> None:
    """Arguments, constants and outputs of the entry are held for the whole run; loop state belongs to the caller."""
    end = len(computation.instructions)
    for path, output in ranges.values.get(computation.root.name, {}).items():
        output.end = end
        if not is_entry:
            continue
        if path in module.aliased_outputs and output.kind != "argument":
            output.bytes = 0  # written into a donated argument
        if output.kind == "temporary":
            output.kind = "output"
    for each in ranges.ranges:
        if each.kind in ("argument", "constant", "output"):
            each.start, each.end = 0, end
        elif each.kind == "loop state":
            each.bytes = 0


def _write_in_place(module: Module, computation: Computation, ranges: _Ranges) -> None:
    """Let instructions reuse the buffer of an operand that they read where they write, if it dies there."""
    for index, instruction in enumerate(computation.instructions):
        if instruction.opcode not in _IN_PLACE:
            continue
        dying: list[_Range] = []
        for number, operand in enumerate(instruction.operands):
            for b in ranges.values.get(operand, {}).values():
                dies = b.kind == "temporary" and b.end == index and b.start < index and b not in dying
                if dies and _reads_where_it_writes(module, instruction, number):
                    dying.append(b)
        for made in ranges.values[instruction.name].values():
            if (made.start != index and made.kind != "output") or made.maker is not instruction:
                continue
            reused = next((b for b in dying if _may_write_over(made, b)), None)
            if reused is not None:
                dying.remove(reused)
                reused.end = index - 1


def _reads_where_it_writes(module: Module, instruction: Instruction, number: int) -> bool:
    """Whether it may do without an element of this operand once it has written the same one of its result.

    A product's fusion reads its factors as a whole, and what is added to the product one by one.
    """
    if instruction.opcode != "fusion" or "kind=kLoop" in instruction.attributes:
        return True
    if "kind=kOutput" not in instruction.attributes:
        return False
    fused = module.computations[instruction.called[0]]
    reached = {i.name for i in fused.instructions if i.opcode == "parameter" and i.arguments.strip() == str(number)}
    for inner in fused.instructions:
        if not reached.isdisjoint(inner.operands):
            if inner.opcode not in _ELEMENT_WISE:
                return inner is fused.root and inner.opcode == "tuple"
            reached.add(inner.name)
    return fused.root.name in reached


def _may_write_over(made: _Range, dying: _Range) -> bool:
    same_place = made.bytes == dying.bytes and made.leaf.space == dying.leaf.space
    return same_place and made.leaf.may_lie_in(dying.leaf)  # what transposes reads where it has written


def _peak(count: int, ranges: _Ranges, space: int) -> _Peak:
    change = [0] * (count + 2)
    counted = [r for r in ranges.ranges if r.leaf.space == space and r.bytes]
    for each in counted:
        change[each.start] += each.bytes
        change[min(each.end, count) + 1] -= each.bytes
    series, live_bytes = [], 0
    for index in range(count):
        live_bytes += change[index]
        inner = ranges.inner.get(index)
        series.append(live_bytes + (inner.bytes if inner else 0))
    if not series:
        return _Peak(0, 0, (), ())
    position = max(range(count), key=series.__getitem__)
    live = [r for r in counted if r.start <= position <= r.end]
    inner = ranges.inner.get(position)
    return _Peak(series[position], position, (*live, *(inner.live if inner else ())), tuple(series))


def _thinned(series: tuple[int, ...]) -> list[int]:
    """Positions of at most `LIMIT` points: all, or first, last and the extremes of equal stretches, so peaks stay."""
    if len(series) <= LIMIT:
        return list(range(len(series)))
    stretches = LIMIT // 2 - 1
    kept = {0, len(series) - 1}
    for stretch in range(stretches):
        span = range(stretch * len(series) // stretches, (stretch + 1) * len(series) // stretches)
        kept.add(max(span, key=series.__getitem__))
        kept.add(min(span, key=series.__getitem__))
    return sorted(kept)


class _Describer:
    """Says of buffers where they come from and what they are for."""

    def __init__(self, module: Module, backward_starts: int | None):
        self._module = module
        self._backward_starts = backward_starts
        self.provenance = Provenance(module)

    def buffer(self, each: _Range) -> Buffer:
        maker = self.provenance.maker(each.maker)
        op_name = maker.op_name
        return Buffer(
            bytes=each.bytes,
            kind="temporary" if each.kind == "loop state" else each.kind,
            shape=each.leaf.text.split("{", 1)[0],
            module=module_path(op_name),
            operation=op_name.rsplit("/", 1)[-1] if op_name else each.maker.opcode,
            location=self._module.location(maker.frame),
            role=self._role(each, maker).value,
        )

    def _role(self, each: _Range, maker: Instruction) -> Role:
        if argument_number(maker) is not None:
            return Role.ARGUMENT if each.kind == "argument" else Role.OTHER  # a copy of it is one more buffer
        if each.kind == "constant":
            return Role.OTHER
        step_pass = pass_of(maker.op_name)
        if each.kind == "output":
            return Role.GRADIENT if step_pass is Pass.BACKWARD else Role.OTHER
        if each.from_host:
            return Role.OFFLOADED
        if step_pass is Pass.RECOMPUTE:
            return Role.RECOMPUTED
        if step_pass is Pass.BACKWARD:
            return Role.GRADIENT
        read_later = self._backward_starts is not None and each.outermost and each.end >= self._backward_starts
        return Role.SAVED if step_pass is Pass.FORWARD and read_later else Role.OTHER


def _groups(buffers: Sequence[Buffer]) -> tuple[Alive, ...]:
    """All buffers, folded over repeated modules; arguments of the step are left to `argument_bytes`."""
    found: dict[tuple[str, str], list[int]] = {}
    for buffer in buffers:
        if buffer.role != Role.ARGUMENT.value:
            found.setdefault((without_indices(buffer.module), buffer.role), []).append(buffer.bytes)
    groups = (Alive(module, role, len(sizes), sum(sizes)) for (module, role), sizes in found.items())
    return tuple(sorted(groups, key=lambda a: (-a.bytes, a.module, a.role)))


def _argument_bytes(live: Sequence[_Range], provenance: Provenance) -> tuple[int, ...]:
    """Bytes of each argument of the step, as the compiler lays it out."""
    sizes: dict[int, int] = {}
    for each in live:
        number = argument_number(provenance.maker(each.maker)) if each.kind == "argument" else None
        if number is not None:
            sizes[number] = sizes.get(number, 0) + each.bytes
    return tuple(sizes.get(n, 0) for n in range(max(sizes, default=-1) + 1))
