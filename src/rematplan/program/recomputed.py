"""What is really recomputed: a configured program -> the operations that run again in the backward pass.

The program is differentiated as it is and under a configuration, dead equations are left out, and equations are counted
by the operation that they come from. What runs more often than in the plain program is recomputed. That is compared with
what the configuration says: a name that a value carries proves nothing, because a derivative rule may read an unnamed copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jax
from jax.extend import core as jex

from rematplan import _jax_private, apply
from rematplan.program import evaluate
from rematplan.program.configuration import PLAIN, Configuration, LoopPlan, Region, in_every_iteration
from rematplan.program.flops import nested_jaxprs
from rematplan.program.graph import Graph, Operation
from rematplan.program.parameters import of_parameters
from rematplan.program.residuals import is_inexact
from rematplan.program.stamps import Path, path_of, stamped, with_all_loops
from rematplan.program.trace import Traced, shape_of, trace_jaxpr

# Equations that checkpointing itself adds; they compute nothing.
_BOOKKEEPING = frozenset(
    {"name", "reduce_precision", "optimization_barrier", "remat2", "checkpoint", "remat", "call_hi_primitive"}
)

# Their derivatives' products are transposed parts, which checkpointing does not repeat: what is more is a further run.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

Counts = Counter[tuple[Path, str]]
"""How many live equations of a primitive come from an operation."""

Program = Callable[..., Sequence[Any]]


class Deviation(Enum):
    """How a differentiated program differs from its plan."""

    SAVED_YET_RECOMPUTED = "saved yet recomputed"
    RECOMPUTED_UNPLANNED = "recomputed though the plan does not need it"


@dataclass(frozen=True)
class Mismatch:
    """An operation that runs again although the configuration says otherwise.

    Attributes:
      name: of the saved value, or of the operation.
      flops: what running it again costs.
    """

    deviation: Deviation
    name: str
    location: str
    flops: float

    def __str__(self) -> str:
        where = f" ({self.location})" if self.location else ""
        return f"{self.name}{where} is {self.deviation.value}"


def saved_as_planned(
    traced: Traced,
    configuration: Configuration,
    *,
    configured: Callable[[Traced, Configuration], Program] | None = None,
) -> tuple[Mismatch, ...]:
    """Compares what runs again with what the configuration says; regions with a policy of JAX's say nothing.

    Args:
      traced: with residuals (`with_residuals`), its first output the scalar loss.
      configured: applies a configuration; by default `apply.configured`.
    """
    found: list[Mismatch] = []
    for each in one_loop_each(configuration):
        found += [m for m in _deviations(traced, each, configured) if m not in found]
    return tuple(found)


def one_loop_each(configuration: Configuration) -> Iterator[Configuration]:
    """Configurations without parts and chunks in which every body of every loop occurs once.

    In a loop in parts the same operation stands in several loops, and a chunk runs its iterations once more: what is kept
    and what runs again is a matter of the bodies alone.
    """
    loops = [(index, tuple(loop.variants())) for index, loop in configuration.loops]
    for number in range(max((len(bodies) for _, bodies in loops), default=1)):
        whole = ((index, in_every_iteration(bodies[min(number, len(bodies) - 1)])) for index, bodies in loops)
        yield replace(configuration, loops=tuple(whole))


def _deviations(
    traced: Traced, configuration: Configuration, configured: Callable[[Traced, Configuration], Program] | None
) -> list[Mismatch]:
    again = recomputed(traced, configuration, configured=configured)
    allowed = planned(traced, configuration)
    found = []
    for path in sorted(path for path, runs in again.items() if runs > allowed[path]):
        if any(path[:depth] in again for depth in range(1, len(path))):
            continue  # it runs again with the loop around it, which has been looked at
        program, operation = _at(traced, path)
        region = _region_of(configuration, path)
        if (region is not None and region.policy is not None) or not operation.inputs:
            continue  # a policy was asked, not a plan; what has no inputs is a constant
        if runs_again_anyway(program, operation):
            continue
        kept = [program.graph.values[v].name for v in operation.outputs if region is not None and v in region.saved]
        deviation = Deviation.SAVED_YET_RECOMPUTED if kept else Deviation.RECOMPUTED_UNPLANNED
        found.append(Mismatch(deviation, kept[0] if kept else operation.name, operation.location, operation.flops))
    return found


def recomputed(
    traced: Traced,
    configuration: Configuration,
    *,
    configured: Callable[[Traced, Configuration], Program] | None = None,
) -> Counter[Path]:
    """The operations that run more often in the differentiated program than without any checkpointing, and how much more.

    More than once is only counted where that is certain: of products, and where the plain program has the equation a
    single time, so that no derivative rule brings others of its kind.
    """
    make = configured or apply.configured
    marked = stamped(traced)
    counts = []
    for each in (configuration, PLAIN):
        function = make(marked, with_all_loops(marked, each))
        counts.append(executions(function, _shapes(traced), traced.differentiated))
    more, plain = counts
    found: Counter[Path] = Counter()
    for path in {path for path, _ in more if path}:
        found[path] = _runs_more(traced, path, more, plain)
    return +found


def _shapes(traced: Traced) -> list[jax.ShapeDtypeStruct]:
    return [shape_of(traced.avals[i]) for i in traced.graph.inputs]


def _runs_more(traced: Traced, path: Path, more: Counts, plain: Counts) -> int:
    _, operation = _at(traced, path)
    if operation.subprogram is None or operation.primitive in ("scan", "while", "cond"):
        runs = more[path, operation.primitive] - plain[path, operation.primitive]
        certain = operation.primitive in PRODUCTS or plain[path, operation.primitive] == 1
        return runs if certain else min(runs, 1)
    # a custom rule leaves no equation of its own, only those that it consists of
    return int(_total(more, path) > _total(plain, path))


def _total(counts: Counts, path: Path) -> int:
    return sum(n for (at, primitive), n in counts.items() if at == path and primitive not in _BOOKKEEPING)


def planned(traced: Traced, configuration: Configuration) -> Counter[Path]:
    """The operations that the configuration says run again, by what each derivative needs, and how often at most.

    With every region around it, an operation may run once more. A loop that runs again stands for what is in its body.
    """
    found: Counter[Path] = Counter()
    for region in configuration.all_regions():
        found.update((index,) for index in _again(traced.graph, region))
    for index, loop in configuration.loops:
        for path, runs in planned(traced.bodies[index], _body(loop)).items():
            found[index, *path] += runs
    return found


def _body(loop: LoopPlan) -> Configuration:
    """The configuration of a loop's body; programs are counted with their loops whole (`one_loop_each`)."""
    assert loop.body is not None, "loops in parts are looked at part by part"
    return loop.body


def _again(graph: Graph, region: Region) -> list[int]:
    operations = graph.operations[region.start : region.stop]
    defined = {v for op in operations for v in op.outputs}
    read = {v for op in operations for v in op.needed if v in defined}
    again = []
    for op in reversed(operations):
        if any(v in read and v not in region.saved for v in op.outputs):
            again.append(op.index)
            read.update(op.inputs)
    return again


def _at(traced: Traced, path: Path) -> tuple[Traced, Operation]:
    """The program that an operation stands in, and the operation."""
    for index in path[:-1]:
        traced = traced.bodies[index]
    return traced, traced.graph.operations[path[-1]]


def _region_of(configuration: Configuration, path: Path) -> Region | None:
    """The innermost region around an operation."""
    found = None
    for depth, index in enumerate(path):
        for region in configuration.all_regions():  # outer ones first
            found = region if region.start <= index < region.stop else found
        loop = configuration.loop(index)
        if loop is None or depth == len(path) - 1:
            break
        configuration = _body(loop)
    return found


def runs_again_anyway(traced: Traced, operation: Operation) -> bool:
    """Whether the operation runs again even with all of its outputs saved.

    Its derivative then reads something that is neither input nor output, such as the permutation of a sort, and what
    computes that computes the outputs as well. No name can be put there.
    """
    equation = traced.equations[operation.index]
    function = evaluate.as_function(equation)
    leaves = [shape_of(traced.avals[v]) for v in equation.inputs]
    inexact = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def forward(*values: Any) -> tuple[list[Any], list[Any]]:
        def primal(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            everything = list(values)
            for index, value in zip(inexact, differentiated, strict=True):
                everything[index] = value
            outputs = function(*everything)
            return [o for o in outputs if is_inexact(o)], outputs

        _, transpose, outputs = jax.vjp(primal, *[values[i] for i in inexact], has_aux=True)
        return outputs, [r for r in jax.tree.leaves(transpose) if hasattr(r, "dtype")]

    flat = trace_jaxpr(jax.make_jaxpr(forward)(*leaves), differentiated=())
    count = sum(o >= 0 for o in equation.outputs)
    ids = [
        {o for o in outputs if not isinstance(o, jex.Literal)}
        for outputs in (flat.outputs[:count], flat.outputs[count:])
    ]
    results, residuals = ids
    computes_results = _ancestors(flat.graph, results, available=frozenset())
    return not computes_results.isdisjoint(_ancestors(flat.graph, residuals - results, available=frozenset(results)))


def _ancestors(graph: Graph, values: set[int], *, available: frozenset[int]) -> set[int]:
    """The operations that compute these values from the inputs and from what is available."""
    wanted = set(values)
    found = set()
    for op in reversed(graph.operations):
        if any(v in wanted and v not in available for v in op.outputs):
            found.add(op.index)
            wanted.update(op.inputs)
    return found


def executions(function: Program, leaves: Sequence[Any], differentiated: Sequence[int]) -> Counts:
    """Counts the live equations of a function and its gradient by the operation that they come from.

    Args:
      function: flat leaves -> flat outputs, the scalar loss first, its equations marked (`stamps.py`).
    """

    def gradient(*values: Any) -> Any:
        loss, parameters = of_parameters(function, values, differentiated)
        return jax.value_and_grad(loss, has_aux=True)(parameters)

    closed = jax.make_jaxpr(gradient)(*leaves)
    counts: Counts = Counter()
    _count(closed.jaxpr, [True] * len(closed.jaxpr.outvars), (), counts)
    return counts


def _count(jaxpr: Any, live_outputs: Sequence[bool], outer: Path, counts: Counts) -> list[bool]:
    """Adds the live equations; returns which inputs are read."""
    live = {v for v, keep in zip(jaxpr.outvars, live_outputs, strict=True) if keep and not isinstance(v, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        used = [v in live for v in eqn.outvars]
        if not any(used) and not eqn.effects:
            continue
        path = path_of(eqn.source_info.name_stack, outer)
        counts[path, eqn.primitive.name] += 1
        read = _count_nested(eqn, used, path, counts)
        live.update(v for v, keep in zip(eqn.invars, read, strict=True) if keep and not isinstance(v, jex.Literal))
    return [v in live for v in jaxpr.invars]


def _count_nested(eqn: Any, used: list[bool], path: Path, counts: Counts) -> list[bool]:
    bodies = [body.jaxpr for _, body in nested_jaxprs(eqn)]
    everything = [True] * len(eqn.invars)
    if eqn.primitive.name == "scan":
        return _count_loop(eqn, bodies[0], used, path, counts)
    read = everything
    for body in bodies:
        same = len(body.outvars) == len(used) and eqn.primitive.name != "while"
        inputs = _count(body, used if same else [True] * len(body.outvars), path, counts)
        if len(bodies) == 1 and same and len(inputs) == len(eqn.invars):
            read = inputs
    return read


def _count_loop(eqn: Any, body: Any, used: list[bool], path: Path, counts: Counts) -> list[bool]:
    """A carry is live if it is read outside or by a later step."""
    consts, carries = _jax_private.scan_sizes(eqn.params)
    live = list(used)
    while True:
        read = _count(body, live, path, Counter())
        grown = [a or b for a, b in zip(live[:carries], read[consts : consts + carries], strict=True)]
        if grown == live[:carries]:
            break
        live[:carries] = grown
    return _count(body, live, path, counts)
