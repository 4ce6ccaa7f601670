"""`inspect`: a workload under one configuration -> what its backward pass saves, by module and value.

Traces the loss, checkpoints it as a policy or plan says, differentiates that on shapes alone and reads the residuals
back. Compiles nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan import apply, findings, policies
from rematplan._plan import Plan
from rematplan.errors import InputError
from rematplan.naming import resolve
from rematplan.program import saved
from rematplan.program.configuration import PLAIN, Configuration
from rematplan.program.graph import Graph, Nesting, Operation, ValueKind
from rematplan.program.loss import traced_loss
from rematplan.program.recomputed import PRODUCTS
from rematplan.program.saved import Origin, Saved
from rematplan.program.stamps import Path as OperationPath
from rematplan.program.stamps import stamped, with_all_loops
from rematplan.program.trace import Traced, shape_of
from rematplan.records import Finding, Inspection, Residual

if TYPE_CHECKING:
    from rematplan.workload import Workload


def inspect(work: Workload, *, policy: str | None = None, plan: Plan | str | Path | None = None) -> Inspection:
    """Lists the arrays that the backward pass holds, and what a user should know about them.

    Read from the differentiated program, on shapes; nothing is compiled or run.

    Args:
      work: what is trained; the step around the loss plays no part.
      policy: a hand-written configuration ("plain", "per-block", ...) or the name of a policy in
        `jax.checkpoint_policies` that needs no argument; default plain.
      plan: instead of a policy, a plan or the path of one.

    Returns:
      Residuals with shape, dtype, bytes (unpadded, one device), module, operation and source line; apart from them the
      arguments that the backward pass reads, and findings.

    Raises:
      InputError: an unknown policy, a loss that cannot be differentiated, or both a policy and a plan.
      PlanMismatch: the plan is not for this function.
    """
    if policy is not None and plan is not None:
        raise InputError("both a policy and a plan were given; an inspection is of one of them.")
    loaded = None if plan is None else Plan.load(plan)
    traced = traced_loss(work) if loaded is None else traced_loss(work, own_regions=loaded.own_regions)
    if loaded is not None:
        configuration = resolve(loaded, traced.graph, {i: body.graph for i, body in traced.bodies.items()})
        label = f"plan {loaded.name}".strip()
    else:
        configuration = policies.by_name(traced.graph, policy or "plain").configuration
        label = policy or "plain"
    found = residuals_of(traced, configuration)
    computed = tuple(_residual(traced, s) for s in found if s.origin is Origin.COMPUTED)
    stacked = tuple(_residual(traced, s) for s in found if s.origin is Origin.COMPUTED and _from_state(traced.graph, s))
    arguments = tuple(_residual(traced, s) for s in found if s.origin is not Origin.COMPUTED)
    return Inspection(
        residuals=computed,
        arguments=arguments,
        findings=(
            *_findings(traced, configuration, found),
            *findings.of_residuals(computed, stretches=_stretches(traced.graph, found), from_state=stacked),
        ),
        configuration=label,
    )


def residuals_of(traced: Traced, configuration: Configuration) -> tuple[Saved, ...]:
    """What the backward pass of a configured program holds; the bytes are those of one device."""
    marked = stamped(traced)
    function = apply.configured(marked, with_all_loops(marked, configuration))
    leaves = [shape_of(traced.avals[i]) for i in traced.graph.inputs]
    whole = saved.residuals(function, leaves, traced.differentiated)
    return tuple(replace(s, bytes=math.ceil(s.bytes / _parts(traced.graph, s))) for s in whole)


def _findings(traced: Traced, configuration: Configuration, found: tuple[Saved, ...]) -> tuple[Finding, ...]:
    here = (*findings.of_program(traced), *findings.of_regions(traced.graph, configuration))
    if configuration == PLAIN:
        return here
    recomputing = findings.without_policies(configuration)
    compared = findings.of_saving(
        configuration,
        computed_bytes(found),
        plain_bytes=computed_bytes(residuals_of(traced, PLAIN)),
        # what is left if no policy saves anything
        least_bytes=computed_bytes(residuals_of(traced, recomputing)) if recomputing != configuration else None,
    )
    return (*here, *compared)


def computed_bytes(found: tuple[Saved, ...]) -> int:
    """Bytes of what the function computed, without its arguments and constants; on one device, as `residuals_of` says."""
    return sum(s.bytes for s in found if s.origin is Origin.COMPUTED)


def _residual(traced: Traced, saved: Saved) -> Residual:
    if saved.origin is not Origin.COMPUTED:
        is_argument = saved.origin is Origin.ARGUMENT
        argument = traced.graph.values[traced.graph.inputs[saved.argument]] if is_argument else None
        name = argument.name if argument is not None else ""
        module = name.rpartition("/")[0]
        return Residual(saved.bytes, saved.shape, saved.dtype, module, saved.origin.value, "", name)
    graph, operation = _find(traced.graph, saved.operation)
    return Residual(
        bytes=saved.bytes,
        shape=saved.shape,
        dtype=saved.dtype,
        module=saved.module or (operation.module if operation else ""),
        operation=saved.primitive,
        location=saved.location or (operation.location if operation else ""),
        name=_name(graph, operation, saved),
    )


def _parts(graph: Graph, saved: Saved) -> int:
    """Into how many parts devices split an array: what an operation computed as its result of that shape, or its first."""
    if saved.origin is Origin.ARGUMENT:
        return graph.values[graph.inputs[saved.argument]].parts
    if saved.origin is Origin.CONSTANT:
        return 1
    graph, operation = _find(graph, saved.operation)
    results = [graph.values[v] for v in operation.outputs] if operation is not None else []
    of_shape = [v for v in results if v.shape == saved.shape] or results[:1]
    return of_shape[0].parts if of_shape else 1


def _find(graph: Graph, path: OperationPath) -> tuple[Graph, Operation | None]:
    """The operation at the end of a path, and the program that it stands in."""
    operation = None
    for index in path:
        if operation is not None:
            if operation.subprogram is None:
                break
            graph = operation.subprogram.graph
        operation = graph.operations[index]
    return graph, operation


def _stretches(graph: Graph, found: tuple[Saved, ...]) -> list[tuple[int, ...]]:
    """For each computed residual the stretch of program between two products that it stands in."""
    places = []
    products: dict[OperationPath, list[int]] = {}  # of each program, how many stand before each operation
    for s in found:
        if s.origin is Origin.COMPUTED:
            body, operation = _find(graph, s.operation)
            outer = s.operation[:-1]
            if outer not in products:
                products[outer] = [0, *accumulate(op.primitive in PRODUCTS for op in body.operations)]
            places.append((*outer, products[outer][operation.index] if operation is not None else 0))
    return places


def _from_state(graph: Graph, saved: Saved) -> bool:
    """Whether the body of a loop computes a value from parameters alone."""
    body, operation = _find(graph, saved.operation)
    loop = _find(graph, saved.operation[:-1])[1]
    is_in_loop = loop is not None and loop.subprogram is not None and loop.subprogram.kind is Nesting.LOOP
    if operation is None or not is_in_loop or not saved.primal:
        return False
    pending, seen, kinds = list(operation.inputs), set[int](), set[ValueKind]()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if body.producer[value] < 0:
            kinds.add(body.values[value].kind)
        else:
            pending += body.operations[body.producer[value]].inputs
    return ValueKind.PARAMETER in kinds and kinds <= {ValueKind.PARAMETER, ValueKind.CONSTANT}


def _name(graph: Graph, operation: Operation | None, saved: Saved) -> str:
    """The name of the value in a plan; empty for what only a derivative rule computes."""
    if operation is None or not saved.primal or saved.primitive != operation.primitive:
        return ""
    if saved.output >= len(operation.outputs):
        return ""
    return graph.values[operation.outputs[saved.output]].name
