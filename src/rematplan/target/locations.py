"""Source locations in StableHLO text: which frames are the user's own, and a text that does not depend on the caller.

Comes in: the text of a lowered program with its locations. Goes out: a text that is equal for equal programs whose
operations stand on the same lines of the model, from wherever the lowering was called. Of each stack only the frames
down to the first of the user's own are kept, which are those that reports show.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent.parent
_PACKAGES = (
    f"{_HERE}/",
    f"{_HERE.resolve()}/",
)  # frames have the path by which Python found the file, perhaps through a link
_BUILT_IN = tuple(f"{package}workloads/" for package in _PACKAGES)  # models like a user's
_SCOPES = tuple(
    f"{package}program/modules.py" for package in _PACKAGES
)  # between a module and the module that calls it
_LIBRARIES = re.compile(r"/(?:jax|jaxlib|flax)/")

_ALIAS = re.compile(r"^#loc(\d*) = loc\((.*)\)\n?", re.MULTILINE)
_USE = re.compile(r"loc\(#loc(\d*)\)")
_NAMED_USE = re.compile(r'loc\(("(?:[^"\\]|\\.)*"\(#loc\d*\))\)')  # of arguments of a block, written where they stand
_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":\d+')
_NAMED = re.compile(r'("(?:[^"\\]|\\.)*")\(#loc(\d*)\)')
_MADE_BY_LOWERING = re.compile(r'"(?:jit\([^/]*\)|[^/]*:)"')
_REGION = re.compile(r'"(?:[^"]*/)?(?:remat2?|checkpoint|reduce_precision|rematplan_layout/sharding_constraint)"')
_CALL = re.compile(r"callsite\(#loc(\d*) at #loc(\d*)\)")


def is_library(file: str) -> bool:
    """Whether a source file is of JAX, Flax or this package, built-in models left out."""
    return bool(_LIBRARIES.search(file)) or is_ours(file)


def is_ours(file: str) -> bool:
    """Whether a source file is of this package, built-in models left out."""
    return file.startswith(_PACKAGES) and not file.startswith(_BUILT_IN)


@dataclass(frozen=True)
class _Place:
    """A location without what lies outside of it.

    Attributes:
      closed: nothing further out counts.
      file: it is a line of a file, around which the name of its function stands.
      ours: of a file of this package, so that the name says nothing either.
    """

    text: str
    closed: bool
    file: bool = False
    ours: bool = False


def without_callers(stablehlo: str) -> str:
    """The text with every location as a short hash of its inner frames, and without the table of locations."""
    written = dict(_ALIAS.findall(stablehlo))
    places: dict[str, _Place] = {}

    def place(alias: str) -> _Place:
        if alias not in places:
            places[alias] = _read(written.get(alias, ""), place)
        return places[alias]

    hashes: dict[str, str] = {}

    def short(match: re.Match[str]) -> str:
        alias = match[1]
        if alias not in hashes:
            hashes[alias] = _hash(place(alias).text)
        return f"loc({hashes[alias]})"

    def short_named(match: re.Match[str]) -> str:
        return f"loc({_hash(_read(match[1], place).text)})"

    return _NAMED_USE.sub(short_named, _USE.sub(short, _ALIAS.sub("", stablehlo)))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read(text: str, place: Callable[[str], _Place]) -> _Place:
    call = _CALL.fullmatch(text)
    if call:
        inner = place(call[1])
        if inner.closed:
            return inner
        outer = place(call[2])
        return _Place(f"{inner.text} {outer.text}".strip(), outer.closed)
    named = _NAMED.fullmatch(text)
    if named:
        inner = place(named[2])
        if _REGION.fullmatch(named[1]):
            # what holds a region together and its saved values apart, or says where results lie: its line is of who asked
            return _Place(named[1], closed=True)
        if _MADE_BY_LOWERING.fullmatch(named[1]) and not inner.file:
            # no operation, but a constant or a function: its line is that of who asked for the lowering
            return _Place(named[1], closed=True)
        return _Place("", inner.closed) if inner.ours else _Place(f"{named[1]} {inner.text}".strip(), inner.closed)
    file = _FILE.match(text)
    if file and is_ours(file[1]):
        # outside of ours stands whoever called us
        return _Place("", closed=file[1] not in _SCOPES, file=True, ours=True)
    return _Place(text, closed=bool(file) and not is_library(file[1]), file=bool(file))
