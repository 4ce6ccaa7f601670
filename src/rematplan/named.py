"""An operation whose derivative reads its own result, with that result named.

Comes in: an equation and names for its outputs. Goes out: the same function, whose derivative reads the named values. A rule
that reads its output (exp, tanh, rsqrt, ...) would otherwise read the unnamed value, so that naming the result alone saves
it and recomputes it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from rematplan.program import evaluate
from rematplan.program.residuals import is_inexact
from rematplan.program.trace import Equation, Traced, trace_jaxpr


def named_in_derivative(equation: Equation, named: Mapping[int, str]) -> Callable[..., list[Any]]:
    """The equation as a function of its distinct inputs, with its outputs named where its own derivative reads them.

    The names stand outside of the custom rule: under JAX_REMAT3=1 names in a rule are dropped (0.10.2).
    """
    function = evaluate.as_function(equation)
    kept = [o for o in equation.outputs if o >= 0]
    results = [v.aval for v in equation.eqn.outvars if not isinstance(v, jex.DropVar)]
    inexact = [i for i, v in enumerate(equation.variables()) if is_inexact(v.aval)]
    inexact_results = [i for i, a in enumerate(results) if is_inexact(a)]

    def derivative(inputs: Sequence[Any], directions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def primal(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            full = list(inputs)
            for position, x in zip(inexact, differentiated, strict=True):
                full[position] = x
            out = function(*full)
            return [out[i] for i in inexact_results], out

        _, out_tangents, out = jax.jvp(primal, [inputs[i] for i in inexact], directions, has_aux=True)
        return out, out_tangents

    @jax.custom_jvp
    def attached(outputs: list[Any], inputs: list[Any]) -> list[Any]:
        """The outputs; differentiated, they are the equation's result at these inputs."""
        return outputs

    @attached.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:  # pyright: ignore[reportUnusedFunction]
        outputs, inputs = primals
        directions = [tangents[1][i] for i in inexact]
        flat = trace_jaxpr(jax.make_jaxpr(derivative)(inputs, directions), differentiated=())
        env = dict(zip(flat.graph.inputs, [*inputs, *directions], strict=True))
        env.update(flat.constants)
        given = _given(flat, equation, outputs)
        env = {**given, **env}
        for inner in _deriving(flat, len(kept), given):
            outs = evaluate.as_function(inner)(*[env[i] for i in inner.inputs])
            for o, x in zip((o for o in inner.outputs if o >= 0), outs, strict=True):
                env.setdefault(o, x)
        out_tangents = [o.val if isinstance(o, jex.Literal) else env[o] for o in flat.outputs[len(kept) :]]
        known = dict(zip(inexact_results, out_tangents, strict=True))
        zeros = [np.zeros(a.shape, jax.dtypes.float0) if i not in known else known[i] for i, a in enumerate(results)]
        return attached(outputs, inputs), zeros

    def wrapped(*inputs: Any) -> list[Any]:
        outputs = [
            checkpoint_name(x, named[o]) if o in named else x for o, x in zip(kept, function(*inputs), strict=True)
        ]
        return attached(outputs, list(inputs))

    return wrapped


def _given(flat: Traced, equation: Equation, outputs: Sequence[Any]) -> dict[int, Any]:
    """The values of a derivative's program that are known from the equation's outputs.

    Those that the same primitive makes there of the same inputs. A rule may work them over before it returns them: that of
    cholesky clears the upper triangle, in which the primitive leaves anything. Where it is not there, what the rule returns.
    """
    inputs = tuple(flat.graph.inputs[: len(equation.inputs)])
    places = {o: k for k, o in enumerate(o for o in equation.outputs if o >= 0)}
    for inner in flat.equations:
        if inner.eqn.primitive is equation.eqn.primitive and inner.inputs == inputs:
            pairs = zip(inner.outputs, equation.outputs, strict=True)
            return {made: outputs[places[own]] for made, own in pairs if made >= 0 and own >= 0}
    return {v: x for v, x in zip(flat.outputs, outputs, strict=False) if not isinstance(v, jex.Literal)}


def _deriving(flat: Traced, primal: int, given: Mapping[int, Any]) -> list[Equation]:
    """The equations that the outputs after the first `primal` take, where the values in `given` are known."""
    wanted = {o for o in flat.outputs[primal:] if not isinstance(o, jex.Literal) and o not in given}
    found: list[Equation] = []
    for equation in reversed(flat.equations):
        if wanted.intersection(equation.outputs):
            found.append(equation)
            wanted.update(i for i in equation.inputs if i not in given)
    return found[::-1]
