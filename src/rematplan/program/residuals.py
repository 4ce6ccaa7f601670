"""What differentiation needs of each operation.

Comes in: a traced program. Goes out: the same program with `Operation.needed` filled in: the values that the backward
pass of that operation reads. Each equation's own derivative rule is traced once and asked; nothing is assumed about
primitives. Residuals that are neither input nor output of their equation are walked back to inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from rematplan.program.evaluate import as_function
from rematplan.program.graph import Nesting, Operation, ValueKind
from rematplan.program.trace import Equation, Traced, shape_of, signature, trace_jaxpr


@dataclass(frozen=True)
class Rule:
    """The derivative of one equation, by position in `Equation.inputs` and in its kept outputs.

    Attributes:
      flows: active inputs whose cotangent really depends on an output's cotangent.
      inputs, outputs: what the transposed rule reads.
    """

    flows: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


def is_inexact(aval: Any) -> bool:
    """Whether values of this type carry derivatives."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def with_residuals(traced: Traced, active_inputs: frozenset[int] | None = None) -> Traced:
    """Fills `Operation.needed` here and in the bodies of loops.

    Args:
      active_inputs: positions of differentiated inputs; by default `traced.differentiated`.
    """
    sources = frozenset(traced.differentiated) if active_inputs is None else active_inputs
    active = _forward_activity(traced, sources)
    rules: dict[Any, Rule] = {}
    needed, reached = _backward(traced, active, rules)
    operations: list[Operation] = []
    bodies: dict[int, Traced] = {}
    for op in traced.graph.operations:
        if op.index in traced.bodies:
            body = _body(traced, op, active if op.index in reached else frozenset())
            bodies[op.index] = body
            assert op.subprogram is not None
            op = replace(op, subprogram=replace(op.subprogram, graph=body.graph))
        operations.append(replace(op, needed=tuple(sorted(needed.get(op.index, ())))))
    return replace(traced, graph=replace(traced.graph, operations=tuple(operations)), bodies=bodies)


def _forward_activity(traced: Traced, sources: frozenset[int]) -> frozenset[int]:
    """Value ids that depend on a differentiated input and carry derivatives."""
    active = {traced.graph.inputs[i] for i in sources if is_inexact(traced.avals[traced.graph.inputs[i]])}
    for equation in traced.equations:
        if active.intersection(equation.inputs) and equation.eqn.primitive.name != "stop_gradient":
            active.update(o for o in equation.outputs if o >= 0 and is_inexact(traced.avals[o]))
    return frozenset(active)


def _backward(traced: Traced, active: frozenset[int], rules: dict[Any, Rule]) -> tuple[dict[int, set[int]], set[int]]:
    """Walks the program backwards along cotangents; returns needed values by operation, and the operations reached."""
    carries_cotangent = {o for o in traced.graph.outputs if o in active}
    needed: dict[int, set[int]] = {}
    reached: set[int] = set()
    for op in reversed(traced.graph.operations):
        if not carries_cotangent.intersection(op.outputs):
            continue
        equation = traced.equations[op.index]
        positions = tuple(i for i, v in enumerate(equation.inputs) if v in active)
        flows = rule(op, equation, positions, rules).flows
        if not flows:
            continue
        reached.add(op.index)
        carries_cotangent.update(equation.inputs[i] for i in flows)
        exact = rule(op, equation, flows, rules)
        kept = [o for o in equation.outputs if o >= 0]
        needed[op.index] = {equation.inputs[i] for i in exact.inputs} | {kept[i] for i in exact.outputs}
    return needed, reached


def with_named_residuals(traced: Traced, values: Collection[int]) -> Traced:
    """Fills `Operation.needed` of the operations that define `values` only, as if every inexact input were differentiated.

    That is all that applying a plan has to know, and much less work than `with_residuals`.
    """
    rules: dict[Any, Rule] = {}
    operations = list(traced.graph.operations)
    for index in {traced.graph.producer[v] for v in values}:
        equation = traced.equations[index]
        active = tuple(i for i, v in enumerate(equation.variables()) if is_inexact(v.aval))
        kept = [o for o in equation.outputs if o >= 0]
        found = rule(operations[index], equation, active, rules)
        needed = {equation.inputs[i] for i in found.inputs} | {kept[i] for i in found.outputs}
        operations[index] = replace(operations[index], needed=tuple(sorted(needed)))
    return replace(traced, graph=replace(traced.graph, operations=tuple(operations)))


def rule(op: Operation, equation: Equation, active: tuple[int, ...], cache: dict[Any, Rule]) -> Rule:
    """Traces the derivative of one equation with respect to the inputs at `active`."""
    if not active:
        return Rule()
    literals = tuple(str(a.val) for a in equation.eqn.invars if isinstance(a, jex.Literal))
    repeated = tuple(equation.eqn.invars.index(v) for v in equation.variables())
    functions = tuple(id(v) for v in equation.eqn.params.values() if callable(v))
    key = (op.signature or signature(equation.eqn, {}), literals, repeated, functions, active)
    if key not in cache:
        try:
            cache[key] = _trace_rule(equation, active)
        except (NotImplementedError, TypeError, ValueError):
            # A `while`, a callback: no derivative with respect to these. A function that can be differentiated at all does
            # not ask for it: what the operation reads was stopped, or is not differentiated.
            cache[key] = Rule()
    return cache[key]


def _trace_rule(equation: Equation, active: tuple[int, ...]) -> Rule:
    function = as_function(equation)
    avals = [v.aval for v in equation.variables()]
    results = [v.aval for v in equation.eqn.outvars if not isinstance(v, jex.DropVar)]
    inexact = [i for i, a in enumerate(results) if is_inexact(a)]
    if not inexact:
        return Rule()
    linear = {}

    def derivative(cotangents: list[Any], *inputs: Any) -> tuple[list[Any], list[Any], list[Any]]:
        def primal(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            full = list(inputs)
            for position, x in zip(active, differentiated, strict=True):
                full[position] = x
            out = function(*full)
            return [out[i] for i in inexact], out

        _, transpose, out = jax.vjp(primal, *[inputs[i] for i in active], has_aux=True)
        residuals = [r for r in jax.tree.leaves(transpose) if hasattr(r, "dtype")]
        linear["residuals"] = len(residuals)
        return out, residuals, list(transpose(cotangents))

    closed = jax.make_jaxpr(derivative)([shape_of(results[i]) for i in inexact], *map(shape_of, avals))
    return _read_rule(trace_jaxpr(closed, differentiated=()), len(inexact), len(results), linear["residuals"], active)


def _read_rule(traced: Traced, cotangents: int, results: int, residuals: int, active: tuple[int, ...]) -> Rule:
    inputs = {v: i for i, v in enumerate(traced.graph.inputs[cotangents:])}
    primal = {o: i for i, o in reversed(list(enumerate(traced.outputs[:results]))) if not isinstance(o, jex.Literal)}
    needed_inputs: set[int] = set()
    needed_outputs: set[int] = set()
    stack = [r for r in traced.outputs[results : results + residuals] if not isinstance(r, jex.Literal)]
    seen = set()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in inputs:
            needed_inputs.add(inputs[value])
        elif value in primal:
            needed_outputs.add(primal[value])
        elif traced.graph.producer[value] >= 0:
            stack.extend(traced.equations[traced.graph.producer[value]].inputs)
    dependent = set(traced.graph.inputs[:cotangents])
    for equation in traced.equations:
        if dependent.intersection(equation.inputs):
            dependent.update(equation.outputs)
    gradients = traced.outputs[results + residuals :]
    flows = tuple(
        i for i, g in zip(active, gradients, strict=True) if not isinstance(g, jex.Literal) and g in dependent
    )
    return Rule(flows, tuple(sorted(needed_inputs)), tuple(sorted(needed_outputs)))


def _body(traced: Traced, op: Operation, active: frozenset[int]) -> Traced:
    """The body of a loop with its own residuals; a carry is active as soon as any active value can reach it."""
    body = traced.bodies[op.index]
    sub = op.subprogram
    assert sub is not None and sub.kind is Nesting.LOOP
    atoms = traced.equations[op.index].eqn.invars
    ids = dict(zip(traced.equations[op.index].variables(), traced.equations[op.index].inputs, strict=True))
    sources = {i for i, a in enumerate(atoms) if not isinstance(a, jex.Literal) and ids[a] in active}
    for _ in range(sub.carries + 1):
        reached = _forward_activity(body, frozenset(sources))
        carried = {sub.constants + i for i, o in enumerate(body.outputs[: sub.carries]) if o in reached}
        if carried <= sources:
            break
        sources |= carried
    values = tuple(
        replace(v, kind=ValueKind.PARAMETER)
        if v.kind is ValueKind.INPUT and v.id in sources and not sub.constants <= v.id < sub.constants + sub.carries
        else v
        for v in body.graph.values
    )
    body = replace(body, graph=replace(body.graph, values=values), differentiated=tuple(sorted(sources)))
    return with_residuals(body, frozenset(sources))
