"""Regions of the same operations, so that one piece of code can stand for all of them.

Comes in: a traced program and its regions. Goes out: for a region a `Shared`: the region whose code it can run, and which
of its values is which. JAX differentiates and transposes a checkpointed function once, however often it is called, so
that a model of equal blocks is traced as quickly as one of them. Only what is provably the same is shared: primitives,
parameters, literals, wiring, what is saved, and where in its module every operation stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core as jex

from rematplan import scopes
from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import Equation, Traced


@dataclass(frozen=True)
class Shared:
    """How a region runs the code of another, or of itself.

    Attributes:
      original: the region whose code is run.
      values: value ids of this region by those of the original; None if it is the original.
      module: the path that all operations of this region have in common.
      alone: no other region runs the same code.
    """

    original: Region
    values: Mapping[int, int] | None
    module: str
    alone: bool = False


def shared(traced: Traced, configuration: Configuration) -> dict[Region, Shared]:
    """For every region, those inside regions included, whose code it runs.

    Inner regions of a region that runs another's code are not looked up.
    """
    last_use = traced.graph.last_use()
    found: dict[Region, Shared] = {}
    originals: dict[tuple[int, int], list[Region]] = {}
    for region in configuration.all_regions():
        module = common_module(traced, region)
        size = (region.stop - region.start, len(region.saved))
        for original in originals.setdefault(size, []):
            values = _correspondence(traced, configuration, original, region, last_use)
            if values is not None:
                found[region] = Shared(original, values, module)
                found[original] = replace(found[original], alone=False)
                break
        else:
            originals[size].append(region)
            found[region] = Shared(region, None, module, alone=True)
    return found


def common_module(traced: Traced, region: Region) -> str:
    """The longest module path that all operations of a region share."""
    common: list[str] | None = None
    for op in traced.graph.operations[region.start : region.stop]:
        parts = op.module.split("/") if op.module else []
        if common is None:
            common = parts
            continue
        same = 0
        while same < min(len(common), len(parts)) and common[same] == parts[same]:
            same += 1
        common = common[:same]
    return "/".join(common or [])


def inside_of(module: str, path: str) -> str:
    """What of a module's path is left below another one: `blocks/0/attn` inside of `blocks/0` is `attn`."""
    return path.removeprefix(module).removeprefix("/") if module else path


def in_module(equation: Equation, module: str, path: str) -> Equation:
    """The equation with its place said relative to a module.

    Args:
      path: of its own module, which lies in `module`.
    """
    source = equation.eqn.source_info
    relative = inside_of(module, path)
    name_stack = _said(source.name_stack, scopes.scope_inside(relative) if relative else None)
    return replace(equation, eqn=equation.eqn.replace(source_info=source.replace(name_stack=name_stack)))


def _said(name_stack: Any, scope: str | None) -> Any:
    """A name stack with its last module path replaced, and without the others."""
    kept: list[Any] = []
    marked = [i for i, element in enumerate(name_stack.stack) if scopes.is_scope(element.name)]
    for i, element in enumerate(name_stack.stack):
        if i not in marked:
            kept.append(element)
        elif i == marked[-1] and scope is not None:
            kept.append(type(element)(scope))
    return type(name_stack)(tuple(kept))


def _correspondence(
    traced: Traced, configuration: Configuration, one: Region, two: Region, last_use: Sequence[int]
) -> dict[int, int] | None:
    """Values of the second region by those of the first; None if they are not the same program."""
    values: dict[int, int] = {}
    modules = common_module(traced, one), common_module(traced, two)
    if any(configuration.loop(i) is not None for r in (one, two) for i in range(r.start, r.stop)):
        return None
    for i, j in zip(range(one.start, one.stop), range(two.start, two.stop), strict=True):
        a, b = traced.equations[i], traced.equations[j]
        if not _same_equation(a, b) or not _same_place(traced, (i, j), modules):
            return None
        for x, y in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
            if (x < 0) != (y < 0) or values.setdefault(x, y) != y:
                return None
            if x >= 0 and traced.avals[x] != traced.avals[y]:
                return None
    made = [{o for e in traced.equations[r.start : r.stop] for o in e.outputs} for r in (one, two)]
    if any((x in made[0]) != (y in made[1]) for x, y in values.items()):
        return None  # one reads from outside what the other makes itself
    if _read_later(traced, two, last_use) != [values[v] for v in _read_later(traced, one, last_use)]:
        return None
    return values if _same_region(one, two, values) else None


def _read_later(traced: Traced, region: Region, last_use: Sequence[int]) -> list[int]:
    equations = traced.equations[region.start : region.stop]
    return [o for e in equations for o in e.outputs if o >= 0 and last_use[o] >= region.stop]


def _same_region(one: Region, two: Region, values: Mapping[int, int]) -> bool:
    shift = two.start - one.start
    return (
        one.stop + shift == two.stop
        and frozenset(values[v] for v in one.saved) == two.saved
        and frozenset(values[v] for v in one.offloaded) == two.offloaded
        and (one.policy, one.prevent_cse) == (two.policy, two.prevent_cse)
        and len(one.inner) == len(two.inner)
        and all(a.start + shift == b.start for a, b in zip(one.inner, two.inner, strict=True))
        and all(_same_region(a, b, values) for a, b in zip(one.inner, two.inner, strict=True))
    )


def _same_equation(a: Equation, b: Equation) -> bool:
    one, two = a.eqn, b.eqn
    if one.primitive is not two.primitive or len(one.invars) != len(two.invars) or len(a.outputs) != len(b.outputs):
        return False
    if one.effects or two.effects or one.ctx != two.ctx:
        return False
    order_a, order_b = ({v: n for n, v in enumerate(e.variables())} for e in (a, b))
    for x, y in zip(one.invars, two.invars, strict=True):
        if isinstance(x, jex.Literal) or isinstance(y, jex.Literal):
            if not (isinstance(x, jex.Literal) and isinstance(y, jex.Literal) and _same_literal(x, y)):
                return False
        elif order_a[x] != order_b[y]:
            return False
    return one.params.keys() == two.params.keys() and all(_equal(v, two.params[k]) for k, v in one.params.items())


def _same_literal(a: Any, b: Any) -> bool:
    return a.aval == b.aval and np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()


def _equal(a: Any, b: Any) -> bool:
    """Whether two parameters are known to be equal: programs and rules only if they are the same object."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (jex.Jaxpr, jex.ClosedJaxpr, np.ndarray)) or hasattr(a, "aval"):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _same_place(traced: Traced, positions: tuple[int, int], modules: tuple[str, str]) -> bool:
    """Whether two equations are named alike in their modules."""
    paths = [traced.graph.operations[i].module for i in positions]
    if inside_of(modules[0], paths[0]) != inside_of(modules[1], paths[1]):
        return False
    stacks = [traced.equations[i].eqn.source_info.name_stack for i in positions]
    one, two = (_without_paths(stack) for stack in stacks)
    return one == two


def _without_paths(name_stack: Any) -> tuple[Any, ...]:
    return tuple(element for element in name_stack.stack if not scopes.is_scope(element.name))
