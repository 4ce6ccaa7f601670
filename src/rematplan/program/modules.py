"""Module paths on operations.

NNX puts no `jax.named_scope` on modules. For the length of one trace, `scoped` makes every method call of every module
enter one that holds the module's path (`scopes.py`), from which an operation's module is read back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from rematplan.scopes import module_scope

# The path is an attribute of the module, so it survives where modules are taken apart and built again: nnx.scan,
# nnx.vmap, nnx.jit, jax.jit. It is static, hence part of the key of every cache on the way: a module does not get
# a jaxpr that was traced under the path of another one, or under none.
STAMP = "rematplan_module_path"
_SCOPED = "__rematplan_scoped__"
# Their methods are about modules, not computations.
_BASES = (nnx.Module, nnx.Pytree, nnx.Object, nnx.List, nnx.Dict, object)
_lock = threading.RLock()  # classes belong to the whole process


@contextlib.contextmanager
def scoped(modules: Iterable[tuple[str, Any]]) -> Generator[None]:
    """Makes every method call of these modules, and of all modules in them, enter a scope with the module's path.

    Public methods defined by the module's classes count, whatever they are decorated with; properties, static and class
    methods are left alone. On leaving, also by an exception, classes and modules are as they were.

    Args:
      modules: (path, NNX object) pairs. Copies made for one trace: they are stamped.
    """
    paths = _paths(modules)
    with _lock:
        patched: list[tuple[type, str, Any]] = []
        try:
            for module, path in paths:
                vars(module)[STAMP] = path
                for cls, name, method in _methods(type(module)):
                    patched.append((cls, name, method))
                    setattr(cls, name, _with_scope(method))
            yield
        finally:
            for cls, name, method in reversed(patched):
                setattr(cls, name, method)
            for module, _ in paths:
                vars(module).pop(STAMP, None)


def _paths(modules: Iterable[tuple[str, Any]]) -> list[tuple[nnx.Module, str]]:
    """Every module once, with the first path that leads to it."""
    found: dict[int, tuple[nnx.Module, str]] = {}
    for prefix, root in modules:
        for path, node in nnx.iter_graph(root, graph=True):
            if isinstance(node, nnx.Module):
                parts = [text for part in (prefix, *path) if (text := str(part))]
                found.setdefault(id(node), (node, "/".join(parts)))
    return list(found.values())


def _methods(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Methods to wrap that are not wrapped yet: owning class, name and what stands there."""
    for owner in cls.__mro__:
        if owner in _BASES:
            continue
        for name, attribute in list(vars(owner).items()):
            if (name == "__call__" or not name.startswith("_")) and _is_method(attribute):
                yield owner, name, attribute


def _is_method(attribute: Any) -> bool:
    if isinstance(attribute, (type, staticmethod, classmethod, property)) or hasattr(attribute, _SCOPED):
        return False
    return callable(attribute) and hasattr(type(attribute), "__get__")


def _with_scope(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))  # jitted and otherwise decorated methods are descriptors too
        path = getattr(self, "__dict__", {}).get(STAMP)
        if not path:
            return bound(*args, **kwargs)
        with jax.named_scope(module_scope(path)):
            return bound(*args, **kwargs)

    setattr(in_scope, _SCOPED, True)
    return in_scope
