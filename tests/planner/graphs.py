"""Small synthetic graphs for the planner's tests, by hand and by hypothesis."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from rematplan.planner.price import Rates
from rematplan.program.graph import Graph, Operation, Subprogram, Value, ValueKind

# One FLOP a second and elements that cost a tenth of that: prices of synthetic operations are easy to follow.
UNIT = Rates({"float32": 1.0}, bytes_per_second=1.0)


class Builder:
    """Writes a graph operation by operation; every value is a vector of float32."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.inputs: list[int] = []

    def value(self, elements: int, kind: ValueKind = ValueKind.INTERMEDIATE, dtype: str = "float32") -> int:
        i = len(self.values)
        self.values.append(Value(i, f"v{i}", (elements,), dtype, 4 * elements, kind))
        if kind in (ValueKind.PARAMETER, ValueKind.INPUT):
            self.inputs.append(i)
        return i

    def parameter(self, elements: int) -> int:
        return self.value(elements, ValueKind.PARAMETER)

    def input(self, elements: int) -> int:
        return self.value(elements, ValueKind.INPUT)

    def op(
        self,
        primitive: str,
        inputs: Iterable[int],
        elements: int | tuple[int, ...],
        *,
        flops: float = 0.0,
        needed: Iterable[int] = (),
        needs_output: bool = False,
        module: str = "",
        signature: str = "",
        barrier: bool = False,
        dtype: str = "float32",
        subprogram: Subprogram | None = None,
    ) -> int:
        sizes = (elements,) if isinstance(elements, int) else elements
        outputs = tuple(self.value(n, dtype=dtype) for n in sizes)
        self.operations.append(
            Operation(
                index=len(self.operations),
                primitive=primitive,
                name=f"{module}/{primitive}" if module else primitive,
                inputs=tuple(inputs),
                outputs=outputs,
                module=module,
                flops=flops,
                needed=(*needed, *(outputs if needs_output else ())),
                signature=signature,
                barrier=barrier,
                subprogram=subprogram,
            )
        )
        return outputs[0]

    def matmul(self, x: int, w: int, elements: int, *, module: str = "", flops: float | None = None) -> int:
        cost = 256.0 * elements if flops is None else flops
        return self.op("dot_general", (x, w), elements, flops=cost, needed=(x, w), module=module)

    def graph(self, *outputs: int) -> Graph:
        producer = [-1] * len(self.values)
        for op in self.operations:
            for v in op.outputs:
                producer[v] = op.index
        return Graph(tuple(self.values), tuple(self.operations), tuple(self.inputs), outputs, producer=tuple(producer))


def mlp(layers: int, *, elements: int = 1000) -> Graph:
    """Layers of product, bias, activation; then a loss of two light operations."""
    b = Builder()
    x = b.input(elements)
    for i in range(layers):
        x = b.matmul(x, b.parameter(64), elements, module=f"layers/{i}")
        x = b.op("add", (x, b.parameter(8)), elements, flops=elements, module=f"layers/{i}")
        x = b.op("relu", (x,), elements, flops=elements, needs_output=True)
    square = b.op("square", (x,), elements, flops=elements, needed=(x,))
    return b.graph(b.op("reduce_sum", (square,), 1, flops=elements))


def transformer(layers: int, *, elements: int = 1000, mask: bool = True) -> Graph:
    """Embedding; layers of attention and MLP on a residual stream; a head. Scores are four times as large."""
    b = Builder()
    x = b.op("gather", (b.parameter(500), b.input(10)), elements)
    shared = [b.op("tril", (b.input(10),), elements // 4)] if mask else []
    for i in range(layers):
        at = f"blocks/{i}"
        h = _norm(b, x, elements, f"{at}/ln1")
        q, k, v = (b.matmul(h, b.parameter(64), elements, module=f"{at}/attn") for _ in range(3))
        scores = b.matmul(q, k, 4 * elements, module=f"{at}/attn")
        if mask:
            scores = b.op("where", (scores, *shared), 4 * elements, flops=elements, needed=shared, module=f"{at}/attn")
        top = b.op("reduce_max", (scores,), 40, flops=4 * elements, module=f"{at}/attn")
        e = b.op("exp", (scores, top), 4 * elements, flops=4 * elements, needs_output=True, module=f"{at}/attn")
        total = b.op("reduce_sum", (e,), 40, flops=4 * elements, module=f"{at}/attn")
        p = b.op("div", (e, total), 4 * elements, flops=4 * elements, needed=(e, total), module=f"{at}/attn")
        context = b.matmul(p, v, elements, module=f"{at}/attn")
        out = b.matmul(context, b.parameter(64), elements, module=f"{at}/attn")
        x = b.op("add", (x, out), elements, flops=elements, module=at)
        h = _norm(b, x, elements, f"{at}/ln2")
        up = b.matmul(h, b.parameter(256), 4 * elements, module=f"{at}/up")
        act = b.op("tanh", (up,), 4 * elements, flops=4 * elements, needs_output=True, module=at)
        down = b.matmul(act, b.parameter(256), elements, module=f"{at}/down")
        x = b.op("add", (x, down), elements, flops=elements, module=at)
    h = _norm(b, x, elements, "norm")
    logits = b.matmul(h, b.parameter(512), 8 * elements, module="head")
    return b.graph(b.op("reduce_sum", (logits,), 1, flops=8 * elements))


def _norm(b: Builder, x: int, elements: int, module: str) -> int:
    mean = b.op("reduce_sum", (x,), 20, flops=elements, module=module)
    centred = b.op("sub", (x, mean), elements, flops=elements, module=module)
    return b.op("mul", (centred, mean), elements, flops=elements, needed=(centred, mean), module=module)


@st.composite
def small_graphs(draw: st.DrawFn, *, most_operations: int = 8) -> Graph:
    """Random graphs of a few operations, each with a price, needed values, and one or two outputs."""
    b = Builder()
    for _ in range(draw(st.integers(1, 2))):
        b.input(draw(st.integers(1, 20)))
    for _ in range(draw(st.integers(1, most_operations))):
        known = range(len(b.values))
        inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=2))
        needed = draw(st.lists(st.sampled_from(inputs), max_size=2, unique=True))
        cost = float(draw(st.integers(0, 2000)))
        dtype = draw(st.sampled_from(["float32", "float32", "float32", "key<fry>"]))
        b.op("f", inputs, tuple(sizes), flops=cost, needed=needed, needs_output=draw(st.booleans()), dtype=dtype)
    return b.graph(b.operations[-1].outputs[0])
