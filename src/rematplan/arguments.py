"""The arguments of a call, by name: which is static, which holds NNX modules, and what its paths start with.

Comes in: a callable as the user has it (function, bound method, `functools.partial`, module) and what it is called
with. Goes out: the plain function beneath and one `Given` for each argument, what the partial binds and the method's
module included, so that their state is the call's state too. Knows nothing of arrays.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from rematplan.opened import is_node


@dataclass(frozen=True)
class Given:
    """One argument of a call.

    Attributes:
      identity: position as the user counts, or the name of a keyword, of bound `self`, of what a partial binds.
      name: parameter name.
      keyword: passed by keyword.
      static: passed through as it is.
    """

    identity: int | str
    name: str
    keyword: bool
    static: bool
    value: Any


def given(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> tuple[Callable[..., Any], list[Given]]:
    """The function beneath `function`, and what it is to be called with: positional arguments first, in order."""
    function, bound, keywords = _beneath(function)
    keywords.update(kwargs)
    parameters = parameter_names(function)
    names = _positional_names(parameters, len(bound) + len(args))
    # Static by position and by name are the same thing, whichever way the caller passes the argument.
    first = len(bound)
    counted = [n for n in parameters[first:] if not n.startswith("*")]
    static_names = {*static_argnames, *(counted[n] for n in static_argnums if -len(counted) <= n < len(counted))}
    static_positions = {n % len(args) if n < 0 and args else n for n in static_argnums}
    found = [Given(n, n, False, n in static_names, value) for n, value in zip(names[:first], bound, strict=True)]
    for position, (name, value) in enumerate(zip(names[first:], args, strict=True)):
        found.append(Given(position, name, False, position in static_positions or name in static_names, value))
    order = {name: i for i, name in enumerate(parameters)}
    for name in sorted(keywords, key=lambda n: (order.get(n, len(order)), n)):
        found.append(Given(name, name, True, name in static_names, keywords[name]))
    return function, found


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters, `*args` and `**kwargs` with their stars; empty if Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(p.kind, "") + p.name for p in parameters]


def _beneath(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """A function that is no partial, bound method or module, and the arguments that those stood for."""
    bound: list[Any] = []
    keywords: dict[str, Any] = {}
    while True:
        if isinstance(function, functools.partial):
            bound[:0] = function.args
            keywords = {**function.keywords, **keywords}
            function = function.func
        elif isinstance(function, types.MethodType) and is_node(function.__self__):
            bound.insert(0, function.__self__)
            function = function.__func__
        elif isinstance(function, nnx.Module):
            bound.insert(0, function)
            function = type(function).__call__
        else:
            return function, bound, keywords


def _positional_names(parameters: Sequence[str], count: int) -> list[str]:
    """Parameter names of the first `count` positional arguments; `rest[0]`, `rest[1]`, ... for those in `*rest`."""
    plain = list(itertools.takewhile(lambda p: not p.startswith("*"), parameters))[:count]
    star = next((p[1:] for p in parameters if p.startswith("*") and not p.startswith("**")), "args")
    return [*plain, *(f"{star}[{n}]" for n in range(count - len(plain)))]
