"""A function of flat arrays -> a flattened program: `Graph` (plain data) beside the equations that can be run again.

Comes in: a JAX-traceable function and the shapes of its arguments. Goes out: `Traced`. Nested `jit` calls are inlined
with their contexts and name stacks; loops, custom rules, the user's own checkpoint regions, `shard_map` and everything
else that holds programs stay one operation with a `Subprogram`. Dead operations are removed. Knows nothing of budgets.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import jax
from jax.extend import core as jex

from rematplan import _jax_private
from rematplan.program import evaluate, flops
from rematplan.program.configuration import OwnRegions
from rematplan.program.graph import Graph, Nesting, Operation, Subprogram, Value, ValueKind
from rematplan.scopes import module_path

# Calls that only group equations: inlining them changes nothing but who can see the values inside.
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
NESTINGS = {
    "scan": Nesting.LOOP,
    "checkpoint": Nesting.REGION,
    "remat": Nesting.REGION,
    "remat2": Nesting.REGION,
    "custom_jvp_call": Nesting.CUSTOM_RULE,
    "custom_vjp_call": Nesting.CUSTOM_RULE,
    "custom_vjp_call_jaxpr": Nesting.CUSTOM_RULE,
    "shard_map": Nesting.SHARD_MAP,
}
CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print", "custom_partitioning"})
# what draws from a state that no value holds: other numbers each time
STATEFUL = frozenset({"rng_uniform"})
_RUN_ONCE = CALLBACKS | STATEFUL
# what JAX cannot lower until `checkify.checkify` around it has turned it into values
UNFUNCTIONALIZED = frozenset({"check"})
COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant all_to_all reduce_scatter".split()
)


class Detail(Enum):
    """How much a trace says of each operation."""

    FULL = "full"
    STRUCTURE = "structure"  # names, modules and wiring only: enough to apply a plan, in half the time


@dataclass(frozen=True)
class Equation:
    """One equation of the flattened program that can be run again.

    Attributes:
      eqn: the equation, literals substituted and the full name stack attached.
      inputs: value ids of its distinct variables, in order of first appearance.
      outputs: value ids; -1 for an output that is dropped.
      location: the user's source line; inside an inlined library call that has none, the line of the call.
    """

    eqn: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    location: str = ""

    def variables(self) -> list[Any]:
        return list(dict.fromkeys(a for a in self.eqn.invars if not isinstance(a, jex.Literal)))


@dataclass(frozen=True)
class Traced:
    """A program twice: as plain data to plan on, and as equations to run.

    Attributes:
      graph: plain data; `graph.operations[i]` describes `equations[i]`.
      constants: arrays that the function closes over, by value id.
      outputs: value ids, or literals' values wrapped in `jex.Literal`.
      bodies: the traced body of each loop, by operation index.
      avals: shape and dtype of every value.
      differentiated: positions of the inputs that are differentiated.
    """

    graph: Graph
    equations: tuple[Equation, ...]
    constants: dict[int, Any]
    outputs: tuple[Any, ...]
    bodies: dict[int, Traced]
    avals: tuple[Any, ...]
    differentiated: tuple[int, ...]


def trace(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    *,
    differentiated: Sequence[int],
    detail: Detail = Detail.FULL,
    own_regions: OwnRegions = OwnRegions.KEEP,
) -> Traced:
    """Traces `function(*leaves) -> list of arrays`.

    Args:
      leaves: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
      differentiated: positions in `leaves` with respect to which the program is differentiated.
      own_regions: whether the function's own checkpoint regions, also those in the bodies of loops, stay one operation
        each or are opened.
    """
    closed = jax.make_jaxpr(function)(*leaves)
    return trace_jaxpr(closed, differentiated=differentiated, detail=detail, own_regions=own_regions)


def trace_jaxpr(
    closed: Any,
    *,
    differentiated: Sequence[int],
    names: Sequence[str] = (),
    detail: Detail = Detail.FULL,
    own_regions: OwnRegions = OwnRegions.KEEP,
) -> Traced:
    """Flattens a closed jaxpr; `names` are readable names of its inputs."""
    flat = _Flattener(detail, own_regions)
    inputs = [flat.value(v.aval) for v in closed.jaxpr.invars]
    outputs = flat.inline(closed, inputs)
    return _assemble(flat, inputs, outputs, tuple(differentiated), tuple(names), detail)


class _Flattener:
    """Walks a jaxpr and its inlined calls, numbering values in order of appearance."""

    def __init__(self, detail: Detail, own_regions: OwnRegions) -> None:
        self._locations = detail is Detail.FULL
        self._opens_regions = own_regions is OwnRegions.REPLACE
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}
        self._constant_ids: dict[int, int] = {}

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, array: Any, aval: Any) -> int:
        # the same array closed over by several inlined calls is one value
        known = self._constant_ids.get(id(array))
        if known is None:
            known = self._constant_ids[id(array)] = self.value(aval)
            self.constants[known] = array
        return known

    def inline(self, closed: Any, arguments: Sequence[Any], caller: Any = None) -> list[Any]:
        """Adds the equations of `closed` applied to value ids or literals; returns the same for its outputs.

        Args:
          caller: the source information of the call that is inlined, its name stack complete; None for the whole function.
        """
        env: dict[Any, Any] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for variable, array in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[variable] = self.constant(array, variable.aval)

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else env[atom]

        for eqn in closed.jaxpr.eqns:
            source = eqn.source_info
            if caller is not None:
                source = source.replace(name_stack=caller.name_stack + source.name_stack)
                if not _jax_private.user_location(source):  # in a library's jit, which knows no line of who called it
                    source = source.replace(traceback=caller.traceback)
            body = self._inlined(eqn)
            if body is not None:
                results = self.inline(body, [read(a) for a in eqn.invars], source)
                for variable, out in zip(eqn.outvars, results, strict=True):
                    if not isinstance(variable, jex.DropVar):
                        env[variable] = out
                continue
            self._append(eqn, read, env, source)
        return [read(a) for a in closed.jaxpr.outvars]

    def _inlined(self, eqn: Any) -> Any:
        """The program of an equation that is opened, None for one that stays an operation."""
        if eqn.primitive.name in INLINED and not _keeps_sharding(eqn):
            body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        else:
            body = region_body(eqn) if self._opens_regions else None
        return body if body is None or isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())

    def _append(self, eqn: Any, read: Callable[[Any], Any], env: dict[Any, Any], source: Any) -> None:
        if self._opens_regions and eqn.primitive.name == "scan":
            eqn = eqn.replace(params={**eqn.params, "jaxpr": _with_open_regions(eqn.params["jaxpr"])})
        atoms = [read(a) for a in eqn.invars]
        # a variable bound to a literal by an inlined call becomes that literal
        invars = [a if isinstance(a, jex.Literal) else v for a, v in zip(atoms, eqn.invars, strict=True)]
        kept = eqn.replace(invars=invars, source_info=source)
        variables = dict.fromkeys(v for v in invars if not isinstance(v, jex.Literal))
        outputs = []
        for variable in eqn.outvars:
            if isinstance(variable, jex.DropVar):
                outputs.append(-1)
            else:
                env[variable] = self.value(variable.aval)
                outputs.append(env[variable])
        location = _jax_private.user_location(source) if self._locations else ""
        self.equations.append(Equation(kept, tuple(read(v) for v in variables), tuple(outputs), location))


def region_body(eqn: Any) -> Any:
    """The program in a checkpoint region; None for an equation that is no region."""
    if NESTINGS.get(eqn.primitive.name) is Nesting.REGION:
        return eqn.params["jaxpr"]
    kind, body = _jax_private.checkpointing(eqn)
    return body if kind == "region" else None


def _with_open_regions(closed: Any) -> Any:
    """The same program without checkpoint regions; itself if it holds none."""
    if not _holds_region(closed.jaxpr):
        return closed
    flat = trace_jaxpr(closed, differentiated=(), detail=Detail.STRUCTURE, own_regions=OwnRegions.REPLACE)
    shapes = [shape_of(a) for a in closed.in_avals]
    return jax.make_jaxpr(evaluate.plain(flat))(*shapes)


def _holds_region(jaxpr: Any) -> bool:
    return any(
        region_body(eqn) is not None or any(_holds_region(body.jaxpr) for _, body in flops.nested_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _keeps_sharding(eqn: Any) -> bool:
    """Whether a jit call carries shardings that inlining would lose; such a call stays one operation."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(not _jax_private.is_unspecified(s) for s in shardings)


def _assemble(
    flat: _Flattener,
    inputs: list[int],
    outputs: list[Any],
    differentiated: tuple[int, ...],
    names: tuple[str, ...],
    detail: Detail,
) -> Traced:
    equations = _live(flat.equations, outputs)
    order = {v: i for i, v in enumerate(_used(inputs, flat.constants, equations))}
    renumber = lambda ids: tuple(order[i] if i >= 0 else -1 for i in ids)
    equations = [replace(e, inputs=renumber(e.inputs), outputs=renumber(e.outputs)) for e in equations]
    avals = [None] * len(order)
    for old, new in order.items():
        avals[new] = flat.avals[old]
    constants = {order[v]: a for v, a in flat.constants.items() if v in order}
    results = tuple(o if isinstance(o, jex.Literal) else order[o] for o in outputs)

    operations, bodies = _operations(equations, detail)
    operation_of = {v: op for op in operations for v in op.outputs}
    values = []
    for i, aval in enumerate(avals):
        if i < len(inputs):
            kind = ValueKind.PARAMETER if i in differentiated else ValueKind.INPUT
            name = names[i] if i < len(names) else f"input.{i}"
        elif i in constants:
            kind, name = ValueKind.CONSTANT, f"constant.{i}"
        else:
            op = operation_of[i]
            kind = ValueKind.INTERMEDIATE
            name = op.name if op.outputs[0] == i else f"{op.name}:{op.outputs.index(i)}"
        values.append(
            Value(i, name, tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "token")), nbytes(aval), kind)
        )
    producer = [-1] * len(values)
    for op in operations:
        for v in op.outputs:
            producer[v] = op.index
    graph = Graph(
        tuple(values),
        tuple(operations),
        tuple(range(len(inputs))),
        tuple(o for o in results if not isinstance(o, jex.Literal)),
        fingerprint=_fingerprint(operations),
        producer=tuple(producer),
    )
    return Traced(graph, tuple(equations), constants, results, bodies, tuple(avals), differentiated)


def _live(equations: list[Equation], outputs: Iterable[Any]) -> list[Equation]:
    """The equations that outputs or effects depend on."""
    live = {o for o in outputs if not isinstance(o, jex.Literal)}
    kept = []
    for equation in reversed(equations):
        if equation.eqn.effects or any(o in live for o in equation.outputs):
            kept.append(equation)
            live.update(equation.inputs)
    return kept[::-1]


def _used(inputs: list[int], constants: dict[int, Any], equations: list[Equation]) -> list[int]:
    """Value ids that survive dead-code removal: inputs first, then constants, then results in order."""
    read = {v for e in equations for v in e.inputs}
    return [*inputs, *(c for c in constants if c in read), *(o for e in equations for o in e.outputs if o >= 0)]


def _operations(equations: list[Equation], detail: Detail) -> tuple[list[Operation], dict[int, Traced]]:
    counts: Counter[str] = Counter()
    operations, bodies = [], {}
    cache: dict[Any, Any] = {}
    for index, equation in enumerate(equations):
        eqn = equation.eqn
        module = module_path(str(eqn.source_info.name_stack))
        stem = f"{module}/{eqn.primitive.name}" if module else eqn.primitive.name
        name = f"{stem}.{counts[stem]}" if counts[stem] else stem
        counts[stem] += 1
        subprogram, body = _subprogram(eqn, cache, detail)
        if body is not None:
            bodies[index] = body
        operations.append(
            Operation(
                index=index,
                primitive=eqn.primitive.name,
                name=name,
                inputs=equation.inputs,
                outputs=tuple(o for o in equation.outputs if o >= 0),
                module=module,
                location=equation.location,
                flops=flops.of_equation(eqn) if detail is Detail.FULL else 0.0,
                signature=signature(eqn, cache) if detail is Detail.FULL else "",
                barrier=bool(eqn.effects) or _runs_once(eqn, cache) or _never_in_a_region(eqn),
                collective=eqn.primitive.name in COLLECTIVES,
                subprogram=subprogram,
            )
        )
    return operations, bodies


def _runs_once(eqn: Any, cache: dict[Any, Any]) -> bool:
    """Whether an equation has to run exactly as often as the program says although it has no effects.

    So does a pure callback, which a derivative rule, a branch or a loop may hide. Effects of what is inside of an equation are
    its own, except those that end there, as a kernel's on its buffers.
    """
    if eqn.primitive.name in _RUN_ONCE:
        return True
    for _, nested in flops.nested_jaxprs(eqn):
        key = ("runs once", nested.jaxpr)
        if key not in cache:
            cache[key] = any(_runs_once(inner, cache) for inner in nested.jaxpr.eqns)
        if cache[key]:
            return True
    return False


def _never_in_a_region(eqn: Any) -> bool:
    """Whether JAX's new remat cannot have the operation in a region: it differentiates everything there (0.10.2)."""
    floats = any(jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact) for v in eqn.outvars if hasattr(v.aval, "dtype"))
    return eqn.primitive.name == "while" and floats and _jax_private.new_remat()


def _subprogram(eqn: Any, cache: dict[Any, Any], detail: Detail) -> tuple[Subprogram | None, Traced | None]:
    nested = [j for _, j in flops.nested_jaxprs(eqn)]
    if not nested:
        return None, None
    kind = NESTINGS.get(eqn.primitive.name, Nesting.OPAQUE if region_body(eqn) is None else Nesting.REGION)
    # The programs themselves, which stay alive in the cache: some are wrapped anew for each equation, and the id of one that
    # is gone is soon another's.
    key = ("body", *(j.jaxpr for j in nested), *(id(c) for j in nested for c in j.consts))
    if key not in cache:
        # whether a nested input is differentiated is decided by residuals.py, which knows what is active outside
        cache[key] = nested, trace_jaxpr(nested[0], differentiated=(), detail=detail)
    _, body = cache[key]
    if kind is not Nesting.LOOP:
        return Subprogram(kind, body.graph), None
    constants, carries = _jax_private.scan_sizes(eqn.params)
    length = eqn.params["length"]
    return Subprogram(kind, body.graph, length=length, constants=constants, carries=carries), body


_ADDRESS = re.compile(r"0x[0-9a-f]+")
# rules are compared by what they compute forward; their Python objects print with addresses
_RULES = frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "fwd", "bwd", "out_trees", "debug_info"})


def signature(eqn: Any, cache: dict[Any, Any]) -> str:
    """Text that is equal for equations that compute the same function, scalar literals apart."""
    distinct = list(dict.fromkeys(a for a in eqn.invars if not isinstance(a, jex.Literal)))
    # which operands are the same value belongs to the function: x * x is not x * y
    atoms = [f"literal {a.aval}" if isinstance(a, jex.Literal) else f"{distinct.index(a)}:{a.aval}" for a in eqn.invars]
    parts = []
    for key, value in sorted(eqn.params.items()):
        if key in _RULES or (callable(value) and not hasattr(value, "eqns")):
            continue
        if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
            memo = ("text", value)
            if memo not in cache:
                cache[memo] = hashlib.sha256(str(value).encode()).hexdigest()[:16]
            parts.append(f"{key}={cache[memo]}")
        else:
            parts.append(f"{key}={_ADDRESS.sub('0x', str(value))}")
    return f"{eqn.primitive.name}[{' '.join(parts)}]({', '.join(atoms)})"


def _fingerprint(operations: Sequence[Operation]) -> str:
    """Hash of structure: primitives, modules and wiring; not shapes, constants or versions."""
    number: dict[int, int] = {}
    text = []
    for op in operations:
        wires = [number.setdefault(v, len(number)) for v in (*op.inputs, *op.outputs)]
        inner = op.subprogram.graph.fingerprint if op.subprogram else ""
        text.append(f"{op.name}{wires}{inner}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a value, with its sharding where that is part of its type (explicit mesh axes)."""
    sharding = getattr(aval, "sharding", None)
    typed = sharding is not None and not sharding.mesh.empty and not sharding.mesh.are_all_axes_auto
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding if typed else None)


def nbytes(aval: Any) -> int:
    """Unpadded size of an array in bytes; 0 for tokens and other values without a shape."""
    if not hasattr(aval, "shape"):
        return 0
    size = 1
    for d in aval.shape:
        size *= int(d)
    return size * _jax_private.itemsize(aval.dtype)


def holds(graph: Graph, primitives: frozenset[str]) -> bool:
    """Whether one of these primitives is in a program, or in one nested in it."""
    return any(
        op.primitive in primitives or (op.subprogram is not None and holds(op.subprogram.graph, primitives))
        for op in graph.operations
    )


def with_names(traced: Traced, names: Sequence[str]) -> Traced:
    """The same program with readable names for its inputs."""
    values = [replace(v, name=names[v.id]) if v.id < len(names) else v for v in traced.graph.values]
    return replace(traced, graph=replace(traced.graph, values=tuple(values)))
