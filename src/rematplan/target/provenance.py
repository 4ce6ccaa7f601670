"""Where a scheduled instruction comes from: the module that was called, and which pass of the training step.

Comes in: instructions of a parsed HLO module. Goes out: the name that JAX gave to what an instruction computes, and the
pass that this name says. Compilers leave copies and some fusions without a name: those have that of what they copy, or
of what they compute last. Knows nothing of live ranges or costs.
"""

from __future__ import annotations

from enum import Enum

from rematplan.target.hlo import Instruction, Module
from rematplan.target.measurement import ARGUMENT_NAME

_STEPS = 32  # copies of copies are followed so far


class Pass(Enum):
    """Part of a training step."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"  # of the forward pass again, inside of the backward pass
    BACKWARD = "backward"
    OTHER = "other"  # the update, what depends on no parameter, and what the compiler does not say


def pass_of(op_name: str) -> Pass:
    """The pass that an operation's name says.

    >>> pass_of("jit(step)/transpose(jvp(~blocks/0~))/checkpoint/rematted_computation/tanh")
    <Pass.RECOMPUTE: 'recompute'>
    """
    if "rematted_computation" in op_name:
        return Pass.RECOMPUTE
    if "transpose(" in op_name:
        return Pass.BACKWARD
    return Pass.FORWARD if "jvp(" in op_name else Pass.OTHER


class Provenance:
    """Names of instructions, their own or that of what they copy or compute; each is looked up once."""

    def __init__(self, module: Module):
        self._module = module
        self._instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
        self._makers: dict[str, Instruction] = {}

    def maker(self, instruction: Instruction) -> Instruction:
        """The instruction that says where the value comes from: this one, or the one whose value it hands on."""
        found = self._makers.get(instruction.name)
        if found is None:
            found = self._makers[instruction.name] = self._search(instruction)
        return found

    def _search(self, instruction: Instruction) -> Instruction:
        at = instruction
        for _ in range(_STEPS):
            if at.op_name or at.opcode == "parameter":
                return at
            inside = self._last_named(at)
            if inside is not None:
                return inside
            following = next((self._instructions[n] for n in at.operands if n in self._instructions), None)
            if following is None:
                break
            at = following
        return instruction

    def _last_named(self, instruction: Instruction) -> Instruction | None:
        for name in instruction.called:
            computation = self._module.computations.get(name)
            for inner in reversed(computation.instructions if computation else ()):
                if inner.op_name and inner.opcode != "parameter":
                    return inner
        return None


def argument_number(instruction: Instruction) -> int | None:
    """Which argument of the step this is; None if it is none."""
    if instruction.opcode != "parameter":
        return None
    named = ARGUMENT_NAME.search(instruction.op_name)
    return int(named[1]) if named else None
