"""Kernels that users write for the TPU (Pallas): what they say that they cost; the compiler estimates no cycles of them.

Comes in: an instruction of a parsed HLO module. Goes out: the operations and bytes that its author gave
(`pl.CostEstimate`), or that there are none.

    kernel_estimate(instruction)    # None: no kernel
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rematplan.target.hlo import Instruction, Module

_TARGET = 'custom_call_target="tpu_custom_call"'
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_FIGURE = re.compile(r'"(\w+)":"?(\d+)')


@dataclass(frozen=True, slots=True)
class KernelEstimate:
    """Of one execution of a kernel; 0 where its author says nothing.

    Attributes:
      bytes_accessed: in HBM.
    """

    flops: float = 0.0
    bytes_accessed: float = 0.0


def kernel_estimate(instruction: Instruction) -> KernelEstimate | None:
    """What a kernel says that it costs; None for any other instruction."""
    if instruction.opcode != "custom-call" or _TARGET not in instruction.attributes:
        return None
    said = _ESTIMATE.search(instruction.attributes)
    figures = {name: float(figure) for name, figure in _FIGURE.findall(said[1])} if said else {}
    return KernelEstimate(figures.get("flops", 0.0), figures.get("bytes_accessed", 0.0))


def kernels_in(instruction: Instruction, module: Module) -> tuple[KernelEstimate, ...]:
    """The kernels that a scheduled instruction runs: it is one, or a fusion of one with what makes its operands."""
    own = kernel_estimate(instruction)
    if own is not None:
        return (own,)
    if instruction.opcode != "fusion":
        return ()
    called = (module.computations[name] for name in instruction.called if name in module.computations)
    return tuple(kernel for computation in called for i in computation.instructions for kernel in kernels_in(i, module))
