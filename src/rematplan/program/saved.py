"""What differentiation really saves: a function of flat arrays -> the values its backward pass holds on to.

Comes in: the loss as flat leaves -> flat outputs, under whatever checkpointing. Goes out: one `Saved` for each array that
`jax.vjp` closes over, with the equation that made it: found by walking back through calls, checkpoint regions, custom
rules and the bodies of loops. Nothing is assumed about policies: this reads the program that JAX made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from rematplan import _jax_private
from rematplan.program.flops import nested_jaxprs
from rematplan.program.parameters import of_parameters
from rematplan.program.stamps import Path, path_of
from rematplan.program.trace import nbytes
from rematplan.scopes import module_path


class Origin(Enum):
    """Where a saved value comes from."""

    COMPUTED = "computed"
    ARGUMENT = "argument"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Saved:
    """One array that the backward pass reads.

    Attributes:
      argument: position among the function's leaves, -1 for others.
      shape, dtype, bytes: of the whole array; what a loop saves is stacked over its steps.
      primitive: of the equation that made it; empty for arguments and constants.
      module, location: of that equation, or of the call that it stands in.
      operation: marks of that equation, see `stamps.py`.
      output: which output of that equation it is.
      primal: the equation computes the function itself; False for what only a derivative rule computes.
      stacked: it is a loop's output, one slice a step.
    """

    origin: Origin
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    argument: int = -1
    primitive: str = ""
    module: str = ""
    location: str = ""
    operation: Path = ()
    output: int = 0
    primal: bool = False
    stacked: bool = False


def forward_program(
    function: Callable[..., Sequence[Any]], leaves: Sequence[Any], differentiated: Sequence[int]
) -> Any:
    """The forward pass as a closed jaxpr whose outputs are the residuals.

    Args:
      function: flat leaves -> flat outputs, the scalar loss first.
      leaves: arrays or `jax.ShapeDtypeStruct`.
    """

    def forward(*values: Any) -> list[Any]:
        loss, parameters = of_parameters(function, values, differentiated)
        _, transpose, _ = jax.vjp(loss, parameters, has_aux=True)
        return [leaf for leaf in jax.tree.leaves(transpose) if hasattr(leaf, "dtype")]

    return jax.make_jaxpr(forward)(*leaves)


def residuals(
    function: Callable[..., Sequence[Any]], leaves: Sequence[Any], differentiated: Sequence[int]
) -> tuple[Saved, ...]:
    """Every array that the backward pass holds, each once: computed ones in program order, then arguments, constants."""
    closed = forward_program(function, leaves, differentiated)
    frame = _Frame(closed.jaxpr, ())
    found: dict[Any, Saved] = {}
    order: dict[Any, tuple[int, ...]] = {}
    for atom in closed.jaxpr.outvars:
        if isinstance(atom, jex.Literal):
            continue  # part of the program's text
        key, saved, position = _origin(frame, atom)
        if key not in found:
            found[key], order[key] = saved, position
    return tuple(found[key] for key in sorted(found, key=lambda k: order[k]))


class _Frame:
    """A jaxpr that is being read, with where it stands."""

    def __init__(self, jaxpr: Any, outer: Path, *, module: str = "", location: str = "", key: tuple[int, ...] = ()):
        self.jaxpr = jaxpr
        self.outer, self.module, self.location, self.key = outer, module, location, key
        self.producer = {v: (i, k) for i, e in enumerate(jaxpr.eqns) for k, v in enumerate(e.outvars)}
        self.inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        self._seen: dict[tuple[Path, str], int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self._seen.setdefault((path_of(eqn.source_info.name_stack, outer), eqn.primitive.name), i)

    def first_of_its_operation(self, index: int) -> bool:
        """Derivative rules compute the primal value first; a later equation of the same primitive is the rule's own."""
        eqn = self.jaxpr.eqns[index]
        return self._seen[path_of(eqn.source_info.name_stack, self.outer), eqn.primitive.name] == index


def _origin(frame: _Frame, atom: Any) -> tuple[Any, Saved, tuple[int, ...]]:
    """Identity of a value of the outermost program, what it is, and its position in the program."""
    aval = atom.aval
    place, path = _follow(frame, atom)
    whole = partial(Saved, shape=tuple(aval.shape), dtype=str(aval.dtype), bytes=nbytes(aval))
    if isinstance(place, int):
        return ("argument", place), whole(origin=Origin.ARGUMENT, argument=place), (1 << 60, place)
    if place is None:
        return ("constant", id(atom)), whole(origin=Origin.CONSTANT), (1 << 61, len(frame.producer))
    inner, index, output, stacked = place
    eqn = inner.jaxpr.eqns[index]
    saved = whole(
        origin=Origin.COMPUTED,
        primitive=eqn.primitive.name,
        module=module_path(str(eqn.source_info.name_stack)) or inner.module,
        location=_jax_private.user_location(eqn.source_info) or inner.location,
        operation=path_of(eqn.source_info.name_stack, inner.outer),
        output=output,
        primal=inner.first_of_its_operation(index),
        stacked=stacked,
    )
    position = (*inner.key, index, output)
    # what a loop saves is one array for each of its outputs, whatever its body made it from
    return (path if stacked else position), saved, position


def _follow(frame: _Frame, atom: Any) -> tuple[Any, tuple[int, ...]]:
    """Walks back to the equation that made a value.

    Returns:
      (frame, equation, output, stacked), or the position of an input of the frame, or None for constants and literals;
      and the outermost stacking loop's output as a path.
    """
    if isinstance(atom, jex.Literal):
        return None, ()
    if atom in frame.inputs:
        return frame.inputs[atom], ()
    if atom not in frame.producer:
        return None, ()
    index, output = frame.producer[atom]
    eqn = frame.jaxpr.eqns[index]
    here = (*frame.key, index, output)
    if _is_identity(eqn):
        return _follow(frame, eqn.invars[output])
    bodies = [b.jaxpr for _, b in nested_jaxprs(eqn) if len(b.jaxpr.outvars) == len(eqn.outvars)]
    made: list[Any] = []
    for branch, body in enumerate(bodies):
        inner = _Frame(
            body,
            path_of(eqn.source_info.name_stack, frame.outer),
            module=module_path(str(eqn.source_info.name_stack)) or frame.module,
            location=_jax_private.user_location(eqn.source_info) or frame.location,
            key=(*frame.key, index, branch),
        )
        loop = eqn.primitive.name in ("scan", "while")
        place, _ = _in_body(eqn, inner, output)
        if isinstance(place, tuple):
            made_in, at, k, stacked = place
            made.append((made_in, at, k, stacked or loop))
        elif isinstance(place, int) and not loop and len(body.invars) == len(eqn.invars):
            return _follow(frame, eqn.invars[place])  # the call hands its operand on: it is the same array
    if made:
        return next((place for place in made if not _is_filler(place)), made[0]), here
    return (frame, index, output, False), here


def _in_body(eqn: Any, inner: _Frame, output: int) -> tuple[Any, tuple[int, ...]]:
    """The equation in a nested program that makes one of its outputs; a carry's old value is made by the step before."""
    tried: set[int] = set()
    while output not in tried:
        tried.add(output)
        place, path = _follow(inner, inner.jaxpr.outvars[output])
        if eqn.primitive.name != "scan" or not isinstance(place, int):
            return place, path
        constants, carries = _jax_private.scan_sizes(eqn.params)
        carry = place - constants
        if not 0 <= carry < carries:
            return place, path
        output = carry
    return None, ()


def _is_filler(place: Any) -> bool:
    """Whether this depends on nothing: it fills in a residual that only another branch of a cond has."""
    frame, index, *_ = place
    pending = list(frame.jaxpr.eqns[index].invars)
    while pending:
        atom = pending.pop()
        if isinstance(atom, jex.Literal):
            continue
        if atom not in frame.producer:
            return False
        pending.extend(frame.jaxpr.eqns[frame.producer[atom][0]].invars)
    return True


def _is_identity(eqn: Any) -> bool:
    """Whether each output is the input of the same position: names and barriers, and roundings that change nothing."""
    if eqn.primitive.name == "reduce_precision":  # JAX puts one on each saved value of a checkpoint region (0.10.2)
        kind = jnp.finfo(eqn.invars[0].aval.dtype)
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)
    if _jax_private.checkpointing(eqn)[0] == "name":
        return True
    return eqn.primitive.name in ("name", "optimization_barrier", "copy_p")
