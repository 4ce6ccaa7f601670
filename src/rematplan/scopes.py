"""Module paths in the names of operations: how they are written, and how they are read back.

A scope `~blocks/0/attn~` says where an operation stands. Code that several modules share cannot say it in full: there
`~./attn~` stands inside of what the scope around the shared code says. Names of traced equations and of compiled
instructions are read alike. Imports nothing.
"""

from __future__ import annotations

import re

# Opens and closes a path: einsum and jit add scopes of their own after it. Not "@": XLA drops what stands between two
# of those when it reads an operation's name (jaxlib 0.10.2), and no compiled program would know its modules.
MARK = "~"
_INSIDE = "./"
_INDEX = re.compile(r"(?<![^/])\d+(?![^/])")  # a path component that is a position in a list
_PATH = re.compile(f"{MARK}([^{MARK}]*){MARK}")


def module_scope(path: str) -> str:
    """The name of a scope that says the module's path."""
    return f"{MARK}{path}{MARK}"


def scope_inside(path: str) -> str:
    """The name of a scope that says a path relative to the module of the scope around it."""
    return module_scope(_INSIDE + path)


def is_scope(name: str) -> bool:
    """Whether a scope's name says a module's path."""
    return len(name) > 1 and name.startswith(MARK) and name.endswith(MARK)


def module_path(name: str) -> str:
    """The path of the innermost module in a name stack or HLO operation name; empty in the root and outside of it.

    >>> module_path("jit(step)/jvp(~blocks/0~)/~blocks/0/attn~/bqhd,bkhd->bhqk/dot_general")
    'blocks/0/attn'
    >>> module_path("jit(step)/jvp(~blocks/0~)/checkpoint/~./attn~/dot_general")
    'blocks/0/attn'
    """
    path = ""
    for found in _PATH.findall(name):
        if found.startswith(_INSIDE):
            path = "/".join(part for part in (path, found.removeprefix(_INSIDE)) if part)
        else:
            path = found
    return path


def without_indices(path: str) -> str:
    """A path with `*` for positions in lists, so that repeated layers have one.

    >>> without_indices("blocks/11/attn")
    'blocks/*/attn'
    """
    return _INDEX.sub("*", path)


def indices(path: str) -> list[str]:
    """The positions in lists that a path holds.

    >>> indices("stages/0/blocks/11/attn")
    ['0', '11']
    """
    return _INDEX.findall(path)
