"""Policies as the values that they save.

Comes in: a configuration in whose regions policies of `jax.checkpoint_policies` decide. Goes out: the same with the values
that they save, where values say it all. JAX asks a policy about every equation of a region, and also about those inside of
an operation: in loops, branches, regions of the user's and derivative rules. What is computed there has no name in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from rematplan import _jax_private
from rematplan.errors import InputError, PlanMismatch
from rematplan.program.configuration import Configuration, Region
from rematplan.program.evaluate import as_function
from rematplan.program.flops import nested_jaxprs
from rematplan.program.residuals import is_inexact
from rematplan.program.trace import Equation, Traced, shape_of

_CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def by_name(traced: Traced, configuration: Configuration) -> Configuration:
    """The same configuration with every policy replaced by those values that it saves and that have names.

    What it saves inside of an operation is left out, and so are complex numbers.
    """
    return _with_policies(traced, configuration, _named)


def as_planned(traced: Traced, configuration: Configuration) -> Configuration:
    """The same configuration as a plan says it: every policy replaced that saves nothing inside of an operation.

    Raises:
      PlanMismatch: a policy saves complex numbers, which JAX cannot, and inside of an operation too.
    """

    def said(program: Traced, region: Region) -> Region:
        where = _saves_inside(program, region)
        if where:
            _refuse_complex(program, region, where)
        return region if where else _named(program, region)

    return _with_policies(traced, configuration, said)


def honoured(traced: Traced, configuration: Configuration) -> Configuration:
    """The same configuration, with values in place of policies that JAX would not follow.

    The new remat drops some without a word; and neither saves complex numbers (0.10.2): those are left out.

    Raises:
      InputError: the new remat would drop a policy that saves something inside of an operation.
      PlanMismatch: a policy saves complex numbers, and inside of an operation too.
    """

    def followed(program: Traced, region: Region) -> Region:
        dropped = _jax_private.new_remat() and not _jax_private.kept_by_new_remat(_policy(region))
        if not dropped and not _holds_complex(program, region):
            return region
        where = _saves_inside(program, region)
        if where:
            _refuse_complex(program, region, where)
        if where and dropped:
            raise InputError(
                f"JAX's new remat (jax_remat3) drops the policy {region.policy} without a word, and what that saves inside of "
                f"{where} has no name by which it could be kept. Set JAX_REMAT3=0, or take another policy."
            )
        return region if where else _named(program, region)

    return _with_policies(traced, configuration, followed)


def inside_loops(traced: Traced, configuration: Configuration) -> dict[tuple[int, ...], frozenset[int]]:
    """What policies of regions around loops save in each iteration: ids of a body's values, by the loops around it.

    What `by_name` leaves out, as far as it has names at all.
    """
    found: dict[tuple[int, ...], frozenset[int]] = {}

    def of_body(body: Traced, region: Region, place: tuple[int, ...]) -> None:
        found[place] = frozenset(_saved(body, replace(region, start=0, stop=len(body.equations))))
        for index, nested in body.bodies.items():
            of_body(nested, region, (*place, index))

    for region in configuration.regions:
        for index, body in traced.bodies.items():
            if region.policy is not None and region.start <= index < region.stop:
                of_body(body, region, (index,))
    for index, loop in configuration.loops:
        for variant in loop.variants():
            nested = inside_loops(traced.bodies[index], variant)
            found |= {(index, *place): values for place, values in nested.items()}
    return found


def is_complex(traced: Traced, value: int) -> bool:
    """Whether a value is of complex numbers, which `checkpoint_name` takes and no region can save (jax 0.10.2)."""
    return traced.graph.values[value].dtype.startswith("complex")


def _with_policies(
    traced: Traced, configuration: Configuration, change: Callable[[Traced, Region], Region]
) -> Configuration:
    """The same configuration with regions that have a policy changed, those in the bodies of loops too."""
    inside = configuration.with_bodies(lambda index, body: _with_policies(traced.bodies[index], body, change))
    regions = (r if r.policy is None else change(traced, r) for r in configuration.regions)
    return replace(inside, regions=tuple(regions))


def _named(traced: Traced, region: Region) -> Region:
    saved = frozenset(v for v in _saved(traced, region) if not is_complex(traced, v))
    return replace(region, policy=None, saved=saved)


def _saved(traced: Traced, region: Region) -> Iterator[int]:
    """What the policy says of the operations themselves."""
    policy = _policy(region)
    for equation in traced.equations[region.start : region.stop]:
        if _jax_private.answer_of(policy, equation.eqn) == "save":
            yield from (o for o in equation.outputs if o >= 0)


def _policy(region: Region) -> Any:
    assert region.policy is not None
    return getattr(jax.checkpoint_policies, region.policy)


def _saves_inside(traced: Traced, region: Region) -> str:
    """The name of the first operation inside of which the policy saves something; empty if there is none."""
    policy = _policy(region)
    for index in range(region.start, region.stop):
        operation = traced.graph.operations[index]
        if operation.subprogram is not None and any(_asked(policy, traced.equations[index])):
            return operation.name
    return ""


def _refuse_complex(traced: Traced, region: Region, where: str) -> None:
    """Raises PlanMismatch where neither the policy nor names would do."""
    policy = _policy(region)
    nested = (traced.equations[op.index] for op in traced.graph.operations[region.start : region.stop] if op.subprogram)
    inside = (eqn for equation in nested for eqn in _asked(policy, equation))
    if any(is_complex(traced, v) for v in _saved(traced, region)) or any(map(_makes_complex, inside)):
        raise PlanMismatch(
            f"the policy {region.policy} saves complex numbers, which JAX cannot (0.10.2), and it saves values inside of "
            f"{where}, which have no names by which the others could be kept without them; take another policy"
        )


def _asked(policy: Any, equation: Equation) -> Iterator[Any]:
    """The equations inside of an operation that the policy would save.

    What only a tangent needs is asked about too, though JAX does not: then a policy stays that need not.
    """
    programs = [body.jaxpr for _, body in nested_jaxprs(equation.eqn)]
    if any(eqn.primitive.name in _CUSTOM_RULES for eqn in _with_nested(equation.eqn)):
        programs.append(_differentiated(equation))
    for eqn in (eqn for program in programs for outer in program.eqns for eqn in _with_nested(outer)):
        if _jax_private.answer_of(policy, eqn) == "save":
            yield eqn


def _with_nested(eqn: Any) -> Iterator[Any]:
    """An equation and all equations of the programs inside of it."""
    yield eqn
    for _, body in nested_jaxprs(eqn):
        for inner in body.jaxpr.eqns:
            yield from _with_nested(inner)


def _differentiated(equation: Equation) -> Any:
    """The program of an operation and its tangents, custom rules in place of what they are rules of."""
    function = as_function(equation)
    shapes = [shape_of(v.aval) for v in equation.variables()]
    inexact = [i for i, v in enumerate(equation.variables()) if is_inexact(v.aval)]

    def tangents(*inputs: Any) -> Any:
        def primal(*differentiated: Any) -> list[Any]:
            full = list(inputs)
            for position, x in zip(inexact, differentiated, strict=True):
                full[position] = x
            return function(*full)

        return jax.jvp(primal, [inputs[i] for i in inexact], [inputs[i] for i in inexact])

    try:
        return jax.make_jaxpr(tangents)(*shapes).jaxpr
    except (NotImplementedError, TypeError, ValueError):  # no derivative: no rule is ever asked for
        return jax.make_jaxpr(function)(*shapes).jaxpr


def _holds_complex(traced: Traced, region: Region) -> bool:
    """Whether complex numbers are computed in a region, inside of operations included."""
    equations = traced.equations[region.start : region.stop]
    return any(_makes_complex(eqn) for equation in equations for eqn in _with_nested(equation.eqn))


def _makes_complex(eqn: Any) -> bool:
    return any(str(getattr(v.aval, "dtype", "")).startswith("complex") for v in eqn.outvars)
