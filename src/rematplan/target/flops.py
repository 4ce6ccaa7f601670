"""How many operations a scheduled instruction performs: products exactly, the rest one an element.

Comes in: instructions of a parsed HLO module. Goes out: operations, those of matrix units by operand type. XLA's own
`cost_analysis` counts the same way (transcendental functions as none), but it counts a loop's body once, is not there
for a probe, and gives nothing for library calls on GPU.

    counter = OperationCounter(module)
    matrix, vector = counter.operations(instruction)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from rematplan.target.hlo import Instruction, Leaf, Module, dtype_bits
from rematplan.target.kernels import kernel_estimate

# no arithmetic of their own
FREE = frozenset(
    {
        "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "optimization-barrier",
        "opt-barrier",
        "domain", "add-dependency", "partition-id", "replica-id", "while", "call", "conditional",
    }
)  # fmt: skip
_MOVES = frozenset(
    {
        "copy", "broadcast", "reshape", "transpose", "slice", "concatenate", "pad", "reverse", "gather", "iota",
        "dynamic-slice", "dynamic-update-slice", "rng-bit-generator", "custom-call", "convert", "bitcast-convert",
    }
)  # fmt: skip
_TRANSCENDENTAL = frozenset(
    {
        "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "tan", "sine", "cosine",
        "sqrt",
        "rsqrt", "cbrt", "power", "atan2", "erf",
    }
)  # fmt: skip
_REDUCING = frozenset({"reduce", "reduce-window", "all-reduce"})
_WINDOW_FIELD = re.compile(r"(\w+)=([\dx_\-]+)")
_LIBRARY_PRODUCT = re.compile(r"__cublas|__onednn\$matmul|__triton_gemm")
_LIBRARY_CONTRACTION = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')

Operations = tuple[dict[str, float], float]


class OperationCounter:
    """Counts operations; each computation is counted once and remembered."""

    def __init__(self, module: Module):
        self._module = module
        self._instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
        self._computations: dict[str, Operations] = {}

    def operations(self, instruction: Instruction) -> Operations:
        """Matrix operations by operand type, and all other operations, of one execution."""
        opcode = instruction.opcode
        if opcode in ("fusion", "call", "async-start"):
            return _sum(self._computation(name) for name in instruction.called)
        kernel = kernel_estimate(instruction)
        if kernel is not None:  # what is worth a kernel of one's own is products in bfloat16, as a rule
            return ({"bf16": kernel.flops} if kernel.flops else {}), 0.0
        product = self._product(instruction)
        if product is not None:
            return product, 0.0
        return {}, self._vector_operations(instruction)

    def _product(self, instruction: Instruction) -> dict[str, float] | None:
        """Operations of a matrix product or convolution, also as a library call; None for anything else."""
        if instruction.opcode not in ("dot", "convolution", "custom-call") or len(instruction.operands) < 2:
            return None
        if not instruction.leaves:  # a callback
            return None
        lhs, rhs = (self._instructions[name].leaves[0] for name in instruction.operands[:2])
        result = instruction.leaves[0]
        if instruction.opcode == "dot":
            contracted = (instruction.attribute("lhs_contracting_dims") or "{}").strip("{}")
            return {_rate_dtype(lhs, rhs): _dot(lhs, result, contracted)}
        if instruction.opcode == "convolution":
            return {_rate_dtype(lhs, rhs): convolution_flops(instruction.attributes, lhs, rhs, result)}
        library = instruction.attribute("custom_call_target") or ""
        if "$convForward" in library:
            return {_rate_dtype(lhs, rhs): convolution_flops(instruction.attributes, lhs, rhs, result)}
        if (
            "$convBackwardFilter" in library
        ):  # (input, output's cotangent) -> filter's; labels are those of the forward call
            return {_rate_dtype(lhs, rhs): convolution_flops(instruction.attributes, lhs, result, rhs)}
        if "$convBackwardInput" in library:
            return {_rate_dtype(lhs, rhs): convolution_flops(instruction.attributes, result, rhs, lhs)}
        if _LIBRARY_PRODUCT.search(library):
            contraction = _LIBRARY_CONTRACTION.search(instruction.attributes)
            contracted = contraction[1].replace('"', "") if contraction else str(len(lhs.dimensions) - 1)
            return {_rate_dtype(lhs, rhs): _dot(lhs, result, contracted)}
        return None

    def _vector_operations(self, instruction: Instruction) -> float:
        opcode = instruction.opcode
        if opcode in FREE or opcode in _MOVES or opcode in _TRANSCENDENTAL or opcode.endswith(("-start", "-done")):
            return 0.0
        if opcode not in _REDUCING:
            return float(sum(leaf.elements for leaf in instruction.leaves))
        output = instruction.leaves[0]
        if not instruction.operands:
            return 0.0
        source = self._instructions[instruction.operands[0]].leaves[0]
        reducer = max((self._computation(name)[1] for name in instruction.called), default=1.0)
        if opcode == "reduce-window":
            # the TPU compiler writes "reduce, then broadcast" as a window that reaches over everything from anywhere
            sizes = window(instruction.attributes).get("size", [1])
            reaches_all = all(size in (1, 2 * n - 1) for size, n in zip(sizes, source.dimensions, strict=False))
            return output.elements * (1 if reaches_all else max(math.prod(sizes) - 1, 0)) * reducer
        return max(source.elements - output.elements, 0) * reducer

    def _computation(self, name: str) -> Operations:
        if name not in self._computations:
            computation = self._module.computations.get(name)
            inner = computation.instructions if computation else ()
            self._computations[name] = _sum(self.operations(instruction) for instruction in inner)
        return self._computations[name]


def _sum(parts: Iterable[Operations]) -> Operations:
    matrix: dict[str, float] = {}
    vector = 0.0
    for part_matrix, part_vector in parts:
        vector += part_vector
        for dtype, n in part_matrix.items():
            matrix[dtype] = matrix.get(dtype, 0.0) + n
    return matrix, vector


def _dot(lhs: Leaf, result: Leaf, contracted: str) -> float:
    dimensions = [int(n) for n in contracted.split(",") if n.strip()]
    return 2.0 * result.elements * math.prod(lhs.dimensions[d] for d in dimensions)


def _rate_dtype(lhs: Leaf, rhs: Leaf) -> str:
    """The operand type that decides the rate: the wider of the two."""
    return max(lhs.dtype, rhs.dtype, key=dtype_bits)


def convolution_flops(attributes: str, lhs: Leaf, rhs: Leaf, result: Leaf) -> float:
    """Multiplications and additions of a convolution, positions in the padding and between dilated elements left out.

    The TPU compiler writes every matrix product as a convolution, batch dimensions as dilated spatial ones, so that
    most window positions multiply nothing.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    fields = window(attributes)
    spatial = sorted(label for label in labels[1] if label.isdigit())
    ones = [1] * len(spatial)
    size, stride = fields.get("size", ones), fields.get("stride", ones)
    pads = fields.get("pad", [0] * (2 * len(spatial)))  # low and high of each dimension in turn
    lhs_dilation, rhs_dilation = fields.get("lhs_dilate", ones), fields.get("rhs_dilate", ones)
    positions = 1
    for index, label in enumerate(spatial):
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
def _valid_positions(
    size: int, stride: int, pad: int, lhs_dilation: int, rhs_dilation: int, input_: int, output: int
) -> int:
    """Pairs of an output position and a window position that meet an input element."""
    if size == 1 and stride == 1 and pad == 0 and lhs_dilation == 1:
        return output
    dilated = (input_ - 1) * lhs_dilation
    valid = 0
    for k in range(size):
        for o in range(output):
            position = o * stride - pad + k * rhs_dilation
            valid += 0 <= position <= dilated and position % lhs_dilation == 0
    return valid


def window(attributes: str) -> dict[str, list[int]]:
    """Fields of `window={size=3x3 pad=1_1x1_1}`, each a list of numbers."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    if match is None:
        return {}
    found: dict[str, list[int]] = {}
    for name, value in _WINDOW_FIELD.findall(match[1]):
        found[name] = [int(n) for n in re.split(r"[x_]", value)]
    return found
