"""Whether two programs are the same operation by operation, checkpointing apart.

Comes in: two closed jaxprs. Goes out: what differs, as sentences. Both are flattened the same way: calls and checkpoint
regions are opened, names and the wrappers that put names into derivative rules are removed, dead equations are left out.
What remains must have the same primitives, parameters, constants and wiring. Rules of custom derivatives are Python
functions that cannot be compared: gradients are compared by numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from rematplan import _jax_private
from rematplan.program.flops import nested_jaxprs
from rematplan.program.trace import CALLBACKS, INLINED

_REGIONS = frozenset({"remat", "remat2", "checkpoint"})
# Parameters that do not change what is computed forward, or are functions.
_IGNORED = frozenset(
    "name debug_info jvp_jaxpr_fun jvp_jaxpr_thunk fwd_jaxpr_thunk fwd bwd out_trees symbolic_zeros inline keep_unused "
    "compiler_options_kvs donated_invars".split()
)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SHOWN = 3  # differences in a report


@dataclass(frozen=True)
class _Scalar:
    """A literal in the program's text, as bytes of its dtype."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True)
class _Step:
    """One equation of a flattened program: operands are value numbers or scalars."""

    eqn: Any
    operands: tuple[Any, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class _Flat:
    inputs: tuple[int, ...]
    steps: tuple[_Step, ...]
    outputs: tuple[Any, ...]
    constants: dict[int, Any]


def differences(one: Any, two: Any) -> tuple[str, ...]:
    """What differs between two closed jaxprs, none if they are the same program."""
    return tuple(_compare(_flatten(one), _flatten(two)))[:_SHOWN]


def _flatten(closed: Any) -> _Flat:
    steps: list[_Step] = []
    constants: dict[int, Any] = {}
    count = [0]

    def new() -> int:
        count[0] += 1
        return count[0] - 1

    def walk(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, array in zip(jaxpr.constvars, consts, strict=True):
            env[variable] = new()
            constants[env[variable]] = array
        read: Callable[[Any], Any] = lambda atom: _scalar(atom) if isinstance(atom, jex.Literal) else env[atom]
        for eqn in jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            body = _opened(eqn)
            converted = _converted(eqn, operands)
            if eqn.primitive.name == "name" or _jax_private.checkpointing(eqn)[0] == "name":
                results: list[Any] = operands
            elif converted is not None:
                results = [converted]
            elif body is not None:
                results = walk(body.jaxpr, body.consts, operands)
            else:
                results = [new() for _ in eqn.outvars]
                steps.append(_Step(eqn, tuple(operands), tuple(results)))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    inputs = tuple(new() for _ in closed.jaxpr.invars)
    outputs = tuple(walk(closed.jaxpr, closed.consts, inputs))
    return _Flat(inputs, _live(steps, outputs), outputs, constants)


def _scalar(literal: Any) -> _Scalar:
    array = np.asarray(literal.val).astype(literal.aval.dtype)
    return _Scalar(str(array.dtype), array.shape, array.tobytes())


def _converted(eqn: Any, operands: Sequence[Any]) -> Any:
    """The result of a conversion that JAX folds away when it sees its operand, which depends on what was inlined."""
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return None
    new = eqn.params["new_dtype"]
    if eqn.invars[0].aval.dtype == new:
        return operands[0]  # only weak types differ
    known = operands[0]
    if isinstance(known, _Scalar):
        array = np.frombuffer(known.content, jnp.dtype(known.dtype)).reshape(known.shape).astype(new)
        return _Scalar(str(array.dtype), array.shape, array.tobytes())
    return None


def _opened(eqn: Any) -> Any:
    """The program of an equation that only groups others, None for equations that compute."""
    bodies = [body for _, body in nested_jaxprs(eqn)]
    name = eqn.primitive.name
    if name in INLINED:
        shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
        return bodies[0] if all(map(_jax_private.is_unspecified, shardings)) else None
    if name in _REGIONS or _jax_private.checkpointing(eqn)[0] == "region":
        return bodies[0]
    # the wrapper that `apply` puts around an operation whose derivative reads its own output hands on its first operands
    if name == "custom_jvp_call" and not bodies[0].jaxpr.eqns:
        return bodies[0]
    return None


def _live(steps: Sequence[_Step], outputs: Sequence[Any]) -> tuple[_Step, ...]:
    live = {o for o in outputs if isinstance(o, int)}
    kept = []
    for step in reversed(steps):
        if step.eqn.effects or step.eqn.primitive.name in CALLBACKS or live.intersection(step.results):
            kept.append(step)
            live.update(o for o in step.operands if isinstance(o, int))
    return tuple(reversed(kept))


def _compare(one: _Flat, two: _Flat) -> list[str]:
    if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
        return [
            f"{len(one.inputs)} inputs and {len(one.outputs)} outputs became {len(two.inputs)} and {len(two.outputs)}"
        ]
    match = dict(zip(one.inputs, two.inputs, strict=True))

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, _Scalar) or isinstance(b, _Scalar):
            return a == b
        if a in one.constants and b in two.constants and a not in match:
            if not _equal_arrays(one.constants[a], two.constants[b]):
                return False
            match[a] = b
        return match.get(a) == b

    found = []
    for index, (a, b) in enumerate(zip(one.steps, two.steps, strict=False)):
        why = _difference(a, b, same)
        if why:
            return [f"operation {index}, {_place(a)}: {why}"]  # everything after it is shifted
        match.update(zip(a.results, b.results, strict=True))
    if len(one.steps) != len(two.steps):
        rest = one.steps[len(two.steps) :] or two.steps[len(one.steps) :]
        found.append(
            f"{len(one.steps)} operations became {len(two.steps)}, the first of the others is {_place(rest[0])}"
        )
    for index, (a, b) in enumerate(zip(one.outputs, two.outputs, strict=True)):
        if not same(a, b):
            found.append(f"output {index} is another value")
    return found


def _difference(a: _Step, b: _Step, same: Callable[[Any, Any], bool]) -> str:
    if a.eqn.primitive.name != b.eqn.primitive.name:
        return f"became {b.eqn.primitive.name}"
    if len(a.operands) != len(b.operands) or not all(map(same, a.operands, b.operands)):
        return "reads other values"
    one, two = ([_type(v.aval) for v in step.eqn.outvars] for step in (a, b))
    if one != two:
        return f"results {one} became {two}"
    for key in sorted(a.eqn.params.keys() | b.eqn.params.keys()):
        if key not in _IGNORED:
            why = _parameter(a.eqn.params.get(key), b.eqn.params.get(key))
            if why:
                return f"parameter {key}: {why}"
    return ""


def _parameter(a: Any, b: Any) -> str:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return next((why for why in map(_parameter, a, b) if why), "")
    closed = [jex.ClosedJaxpr(p, ()) if isinstance(p, jex.Jaxpr) else p for p in (a, b)]
    if all(isinstance(p, jex.ClosedJaxpr) for p in closed):
        return "; ".join(differences(*closed))
    if a is b or (callable(a) and callable(b)):
        return ""
    texts = [_ADDRESS.sub("0x", str(p)) for p in (a, b)]
    return "" if texts[0] == texts[1] else f"{texts[0][:80]} became {texts[1][:80]}"


def _equal_arrays(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if hasattr(a, "aval") and hasattr(b, "aval") and jnp.issubdtype(a.aval.dtype, jax.dtypes.extended):
        return False  # random keys, the same object or not at all
    one, two = np.asarray(a), np.asarray(b)
    return one.shape == two.shape and one.dtype == two.dtype and one.tobytes() == two.tobytes()


def _type(aval: Any) -> str:
    """Shape and dtype; weak types only matter for promotion, which has happened."""
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', '')}"


def _place(step: _Step) -> str:
    location = _jax_private.user_location(step.eqn.source_info)
    return step.eqn.primitive.name + (f" ({location})" if location else "")
