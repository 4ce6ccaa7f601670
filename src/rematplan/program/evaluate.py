"""Runs equations of a traced program again, on arrays or tracers.

Comes in: equations and an environment from value ids to arrays. Goes out: the environment with their results. Each
equation is evaluated by JAX's own interpreter, so its context, name stack and source line are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend import core as jex

if TYPE_CHECKING:
    from rematplan.program.trace import Equation, Traced


@functools.lru_cache(maxsize=65536)
def as_function(equation: Equation) -> Callable[..., list[Any]]:
    """The equation as a function of its distinct inputs; returns its outputs that are not dropped."""
    eqn = equation.eqn
    results = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
    inputs = equation.variables()
    # a jaxpr without it is deprecated (jax 0.10.2); the equation keeps its own source line
    debug_info = jex.DebugInfo("rematplan", eqn.primitive.name, ("",) * len(inputs), ("",) * len(results))
    jaxpr = jex.Jaxpr((), inputs, results, [eqn], eqn.effects, debug_info)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))


def run(equations: Sequence[Equation], env: dict[int, Any]) -> None:
    """Evaluates the equations in order, reading and writing `env`."""
    for equation in equations:
        results = as_function(equation)(*[env[i] for i in equation.inputs])
        env.update(zip((o for o in equation.outputs if o >= 0), results, strict=True))


def outputs(traced: Traced, env: dict[int, Any]) -> list[Any]:
    """The program's results from a filled environment."""
    return [o.val if isinstance(o, jex.Literal) else env[o] for o in traced.outputs]


def plain(traced: Traced) -> Callable[..., list[Any]]:
    """The traced program as a function of its flat inputs, unchanged."""

    def function(*leaves: Any) -> list[Any]:
        env = dict(zip(traced.graph.inputs, leaves, strict=True))
        env.update(traced.constants)
        run(traced.equations, env)
        return outputs(traced, env)

    return function
