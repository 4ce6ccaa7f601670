"""What kinds of work an instruction consists of: the quantities that its time depends on.

Comes in: instructions of a parsed HLO module and a chip. Goes out: one `Work` for each, from which `cycles.CycleTable`
prices instructions that no compiler has priced yet. A roofline knows only matrix units and HBM; on TPU most fusions
take longer: exponentials, reductions, conversions, and products whose results leave the matrix unit slowly.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from rematplan.target.chips import Chip
from rematplan.target.flops import OperationCounter
from rematplan.target.hlo import Instruction, Module

_TRANSCENDENTAL = frozenset(
    {
        "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "rsqrt", "sqrt", "power",
        "erf", "divide",
    }
)  # fmt: skip
_REDUCING = frozenset({"reduce", "reduce-window"})
_PRODUCTS = frozenset({"convolution", "dot"})
_CONVERTING = frozenset({"convert", "broadcast", "select", "compare", "copy", "reshape"})
_PERMUTING = frozenset({"transpose", "concatenate", "pad", "slice", "reverse", "dynamic-slice"})


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one execution of an instruction.

    Attributes:
      matrix_seconds: of its products at the chip's peak rate.
      hbm_seconds: of its traffic at the chip's bandwidth.
      bytes: of operands and results in any memory.
      transcendentals, reduced, converted, permuted: elements that go through such operations.
      product_bytes: of what products write, padded to tiles.
    """

    matrix_seconds: float = 0.0
    hbm_seconds: float = 0.0
    bytes: float = 0.0
    transcendentals: float = 0.0
    reduced: float = 0.0
    product_bytes: float = 0.0
    converted: float = 0.0
    permuted: float = 0.0


class WorkCounter:
    """Counts work; each computation is counted once and remembered."""

    def __init__(self, module: Module, chip: Chip):
        self._module, self._chip = module, chip
        self._operations = OperationCounter(module)
        self._instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
        self._computations: dict[str, Work] = {}

    def work(self, instruction: Instruction, hbm_bytes: float) -> Work:
        """Work of a scheduled instruction that moves that many bytes through HBM."""
        inner = self._inner(instruction)
        matrix = self._operations.operations(instruction)[0]
        operands = [self._instructions[name] for name in instruction.operands if name in self._instructions]
        touched = sum(leaf.bytes for each in (instruction, *operands) for leaf in each.leaves)
        return Work(
            matrix_seconds=sum(n / self._chip.peak(dtype) for dtype, n in matrix.items()),
            hbm_seconds=hbm_bytes / self._chip.bandwidth,
            bytes=float(touched),
            transcendentals=inner.transcendentals,
            reduced=inner.reduced,
            product_bytes=inner.product_bytes,
            converted=inner.converted,
            permuted=inner.permuted,
        )

    def _inner(self, instruction: Instruction) -> Work:
        opcode = instruction.opcode
        if opcode == "fusion":
            return _sum([self._computation(name) for name in instruction.called])
        if not instruction.leaves:
            return Work()
        elements = float(instruction.leaves[0].elements)
        if opcode in _TRANSCENDENTAL:
            return Work(transcendentals=elements)
        if opcode in _REDUCING and instruction.operands:
            return Work(reduced=float(self._instructions[instruction.operands[0]].leaves[0].elements))
        if opcode in _PRODUCTS:
            return Work(product_bytes=float(instruction.leaves[0].bytes))
        if opcode in _CONVERTING:
            return Work(converted=elements)
        if opcode in _PERMUTING:
            return Work(permuted=elements)
        return Work()

    def _computation(self, name: str) -> Work:
        if name not in self._computations:
            computation = self._module.computations.get(name)
            inner = computation.instructions if computation else ()
            self._computations[name] = _sum([self._inner(instruction) for instruction in inner])
        return self._computations[name]


def _sum(parts: list[Work]) -> Work:
    return Work(*(sum(column) for column in zip(*map(astuple, parts), strict=True))) if parts else Work()
