"""Which scheduled instructions run, and how often.

Comes in: a parsed HLO module. Goes out: its instructions in the order of the schedule, loops entered, each with how often it
runs. How often a loop turns is read off its counter: where it begins, what a turn adds, and what the condition compares.

    for instruction, times in executions(module): ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rematplan.target.hlo import Computation, Instruction, Module

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"-?\d+")
# between places or, the last ones, between devices
_MOVES = frozenset(
    {
        "parameter", "constant", "bitcast", "copy", "slice", "dynamic-slice", "dynamic-update-slice", "tuple",
        "get-tuple-element",
        "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute",
    }
)  # fmt: skip
_SAME_VALUE = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"})
_ENTERED = frozenset({"fusion", "call"})


def executions(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Every scheduled instruction with how often it runs. Fusions are one instruction; loop bodies are entered.

    Each branch of a conditional is counted once. An asynchronous copy or collective is one instruction, however it is written.
    """
    return _executions(module, module.entry, 1)


def _executions(module: Module, computation: Computation, times: int) -> Iterator[tuple[Instruction, int]]:
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            body = module.computations.get(instruction.attribute("body") or "")
            if body is not None:
                yield from _executions(module, body, times * trip_count(module, computation, instruction))
        elif instruction.opcode in ("call", "conditional", "async-start"):
            if instruction.opcode == "async-start" and moves(module, instruction):
                yield instruction, times
                continue
            for name in instruction.called:
                if name in module.computations:
                    yield from _executions(module, module.computations[name], times)
        else:
            yield instruction, times


def moves(module: Module, instruction: Instruction) -> bool:
    """Whether what an instruction calls moves values only, between places or devices."""
    called = (module.computations[name] for name in instruction.called if name in module.computations)
    return all(_only_moves(module, computation) for computation in called)


def _only_moves(module: Module, computation: Computation) -> bool:
    """Whether nothing is computed; GPU compilers wrap a copy in a fusion, TPU7x's wraps what SparseCores send in a call."""
    for instruction in computation.instructions:
        if instruction.opcode in ("fusion", "custom-call"):
            called = [module.computations[name] for name in instruction.called if name in module.computations]
            if called and all(_only_moves(module, inner) for inner in called):
                continue
        if instruction.opcode not in _MOVES:
            return False
    return True


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int:
    """How often a `while` of a computation turns.

    As the compiler says (that of TPUs does not), else by its counter; where that cannot be followed, the largest integer that
    its condition mentions, and at least once.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    counted = _counted(module, computation, loop)
    if counted is not None:
        return counted
    return max([1, *_integer_constants(module, loop.attribute("condition") or "")])


def _integer_constants(module: Module, name: str) -> Iterator[int]:
    computation = module.computations.get(name)
    for instruction in computation.instructions if computation else ():
        if instruction.opcode == "constant" and instruction.arguments.strip().isdigit():
            yield int(instruction.arguments)
        for called in instruction.called:
            yield from _integer_constants(module, called)


@dataclass(frozen=True, slots=True)
class _Scalar:
    """An integer: an element of what a loop carries, as it was when the turn began, plus an offset; or the offset alone."""

    element: int | None
    offset: int

    def plus(self, other: _Scalar, sign: int) -> _Scalar | None:
        if other.element is None:
            return _Scalar(self.element, self.offset + sign * other.offset)
        return _Scalar(other.element, self.offset + other.offset) if self.element is None and sign > 0 else None


class _Frame:
    """A computation while it is followed: what its parameters stand for, or, of a loop, that it has the loop's elements."""

    def __init__(self, module: Module, computation: Computation, given: tuple[_Scalar | None, ...] | None = None):
        self._module, self._given, self.root = module, given, computation.root
        self._instructions = {i.name: i for i in computation.instructions}

    def scalar(self, name: str) -> _Scalar | None:
        """What a value is; None where it is nothing of that kind."""
        instruction = self._instructions.get(name)
        if instruction is None:
            return None
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            text = instruction.arguments.strip()
            return _Scalar(None, int(text)) if _INTEGER.fullmatch(text) else None
        if opcode == "parameter":
            number = int(instruction.arguments)
            return self._given[number] if self._given is not None and number < len(self._given) else None
        if opcode == "get-tuple-element":
            source = self._instructions.get(operands[0])
            carried = self._given is None and source is not None and source.opcode == "parameter"
            return _Scalar(int(instruction.attribute("index") or 0), 0) if carried else None
        if opcode in _SAME_VALUE:
            return self.scalar(operands[0])
        if opcode in ("add", "subtract"):
            left, right = (self.scalar(operand) for operand in operands[:2])
            return left.plus(right, 1 if opcode == "add" else -1) if left is not None and right is not None else None
        inner = self.entered(instruction)
        return inner.scalar(inner.root.name) if inner is not None else None

    def entered(self, instruction: Instruction) -> _Frame | None:
        """The computation that a fusion or call runs, with what it is given."""
        called = self._module.computations.get(instruction.called[0]) if instruction.called else None
        if instruction.opcode not in _ENTERED or called is None:
            return None
        return _Frame(self._module, called, tuple(self.scalar(operand) for operand in instruction.operands))

    def comparison(self) -> tuple[_Scalar, _Scalar, str] | None:
        """What the root compares, and in which direction."""
        if self.root.opcode != "compare":
            inner = self.entered(self.root)
            return inner.comparison() if inner is not None else None
        left, right = (self.scalar(operand) for operand in self.root.operands[:2])
        direction = self.root.attribute("direction")
        return (left, right, direction) if left is not None and right is not None and direction else None


def _counted(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop turns, from its counter; None if there is none that can be followed."""
    condition, body = (module.computations.get(loop.attribute(name) or "") for name in ("condition", "body"))
    if condition is None or body is None or not loop.operands:
        return None
    compared = _Frame(module, condition).comparison()
    begins = next((i for i in computation.instructions if i.name == loop.operands[0]), None)
    if compared is None or begins is None or begins.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    outside, inside = _Frame(module, computation, ()), _Frame(module, body)
    *sides, direction = compared
    first = step = 0
    for sign, side in zip((1, -1), sides, strict=True):
        first += sign * side.offset
        if side.element is None:
            continue
        at_first, next_ = outside.scalar(begins.operands[side.element]), inside.scalar(body.root.operands[side.element])
        if at_first is None or at_first.element is not None or next_ is None or next_.element != side.element:
            return None
        first += sign * at_first.offset
        step += sign * next_.offset
    return _turns(first, step, direction)


def _turns(first: int, step: int, direction: str) -> int | None:
    """How many of first, first + step, ... compare with 0 in that direction before one does not; None if all do."""
    if direction in ("GT", "GE"):
        return _turns(-first, -step, {"GT": "LT", "GE": "LE"}[direction])
    if direction == "LE":
        return _turns(first - 1, step, "LT")
    if direction == "LT":
        if first >= 0:
            return 0
        return -(first // step) if step > 0 else None
    if direction == "NE" and step and first % step == 0 and -(first // step) >= 0:
        return -(first // step)
    return None
