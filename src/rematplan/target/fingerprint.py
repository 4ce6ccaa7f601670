"""Fingerprints of scheduled instructions: equal for instructions that do the same thing in whatever program.

Comes in: instructions of a parsed HLO module. Goes out: short hashes that depend on operation, shapes, layouts and
the fused computation, not on names, metadata, back-end configuration or the order in which independent lines are
written. Of a user's kernel, what it says that it costs counts.
"""

from __future__ import annotations

import hashlib
import re

from rematplan.target.hlo import Instruction, Module
from rematplan.target.kernels import kernels_in

# Ends the fingerprint of a price that no compiler gave: a user's kernel, a share of what a program took beyond what is known
UNPRICED = "~"
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_CALLED_NAME = re.compile(r"(calls|to_apply|body|condition)=%?[\w.\-]+|(called_computations)=\{[^}]*\}")
_SPACE = re.compile(r":?S\(\d+\)")


class Fingerprinter:
    """Hashes instructions; each computation is hashed once and remembered."""

    def __init__(self, module: Module):
        self._module = module
        self._instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
        self._computations: dict[str, str] = {}

    def fingerprint(self, instruction: Instruction) -> str:
        """Hash of an instruction; the memory spaces of its operands and results count."""
        shapes = [self._instructions[n].shape for n in instruction.operands if n in self._instructions]
        called = [self._computation(n) for n in instruction.called]
        parts = [instruction.opcode, _own_attributes(instruction), *called, instruction.shape, *shapes]
        # Kernels differ in back-end configuration only, most of which says from where they were called.
        kernels = kernels_in(instruction, self._module)
        return _hash([*parts, *map(repr, kernels)]) + (UNPRICED if kernels else "")

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
    return _CALLED_NAME.sub(r"\1\2", attributes)


def _hash(parts: list[str]) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
