"""NNX objects that a function reaches without being passed them: through its closure, defaults or globals.

Such an object is a constant of every trace: it has no gradient, and what happens to it later (an update of its
parameters, train() or eval()) does not reach a traced function. Comes in: a callable. Goes out: the names of what it
captures.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from rematplan.opened import is_node


def captured(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names in `function` that hold NNX modules or Variables, alone or in a list or dict; sorted, each once.

    Arguments that a `functools.partial` binds and the module of a bound method are not captured: they are arguments.
    """
    names: set[str] = set()
    while isinstance(function, (functools.partial, types.MethodType)):
        if isinstance(function, functools.partial):
            function = function.func
        else:
            names.update(f"self.{name}" for name in held(function.__self__))
            function = function.__func__
    if isinstance(function, nnx.Module):
        function = type(function).__call__
    while True:
        if isinstance(function, types.FunctionType):
            names.update(name for name, value in _reached(function) if _holds_node(value))
        # a decorated function: what matters is the user's own beneath
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return tuple(sorted(names))
        function = inner


def explain(function: Callable[..., Any], names: tuple[str, ...]) -> str:
    """One paragraph for the user: what is captured, what that means, what to do."""
    name = getattr(function, "__name__", "the function")
    listed = " and ".join(repr(n) for n in names)
    return (
        f"{name} uses {listed} from outside instead of taking it as an argument. What a function captures is a "
        "constant of its trace: nothing differentiates it, its state cannot be written, and a trace that is kept does "
        "not see later changes (an optimizer's update, train() or eval()). Pass it as an argument: "
        f"{name}({', '.join(names)}, ...). Only the first module argument of a loss is differentiated, so a frozen "
        "model can be a later one."
    )


def held(value: Any) -> tuple[str, ...]:
    """Attributes that hold NNX objects, of an object that is none itself and that JAX cannot look into."""
    if is_node(value) or isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return ()
    return tuple(name for name, inner in vars(value).items() if _holds_node(inner))


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the enclosing function has not assigned it yet
            continue
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _global_names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Globals that the code reads; `co_names` would list attributes too."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return frozenset(names)


def _holds_node(value: Any) -> bool:
    if is_node(value):
        return True
    if not isinstance(value, (list, tuple, dict)):
        return False
    return any(map(is_node, jax.tree.leaves(value, is_leaf=is_node)))
