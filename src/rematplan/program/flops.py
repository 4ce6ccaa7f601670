"""Floating-point operations of one equation, loops multiplied by their trip count.

Comes in: a jaxpr equation. Goes out: a number. Matrix products and convolutions are counted exactly (two per
multiply-add), reductions by their input, everything else one per output element; data movement costs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex

from rematplan import _jax_private

_MOVES = frozenset(
    "reshape broadcast_in_dim convert_element_type squeeze stop_gradient iota split slice transpose expand_dims copy "
    "copy_p concatenate pad gather dynamic_slice dynamic_update_slice name optimization_barrier rev sharding_constraint "
    "random_wrap random_unwrap device_put".split()
)


def of_equation(eqn: Any) -> float:
    """FLOPs of one execution of the equation."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
        return 2.0 * depth * _elements(eqn.outvars)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _elements(eqn.outvars) * math.prod(kernel) / max(out_features, 1)
    if name == "scan":
        return eqn.params["length"] * of_jaxpr(eqn.params["jaxpr"])
    nested = [of_jaxpr(jaxpr) for _, jaxpr in nested_jaxprs(eqn)]
    if nested:
        # cond runs one branch; while has no known trip count, so one iteration is counted
        return max(nested)
    if name in _MOVES:
        return 0.0
    if name.startswith(("reduce", "arg", "cum", "sort")):
        return float(_elements(a for a in eqn.invars))
    return float(_elements(eqn.outvars))


def of_jaxpr(jaxpr: Any) -> float:
    """FLOPs of one execution of all equations."""
    return sum(of_equation(e) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def nested_jaxprs(eqn: Any) -> Iterator[tuple[str, Any]]:
    """The programs in an equation's parameters, as closed jaxprs, the main one first."""
    for key in ("jaxpr", "call_jaxpr", "body_jaxpr", "branches", "cond_jaxpr"):
        value = eqn.params.get(key)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield key, item
            elif isinstance(item, jex.Jaxpr):
                yield key, jex.ClosedJaxpr(item, ())
    kind, body = _jax_private.checkpointing(eqn)
    if kind == "region":
        yield "jaxpr", body


def _elements(atoms: Any) -> int:
    return sum(math.prod(a.aval.shape) for a in atoms if hasattr(a.aval, "shape"))
