"""The model as a folding tree of modules: what does not depend on the configuration, and what does.

Comes in: the JSON of a `records.Model` and a choice. Goes out: `Branch`, nested as the modules are, once; and for each
choice the texts of its cells, in the same order. Numbers become text here, so that every renderer shows the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.report.choices import Choice
from rematplan.units import format_bytes, format_count, format_seconds

Record = Mapping[str, Any]
NOTHING = "-"


@dataclass(frozen=True)
class Leaf:
    """A value; `index` is its position among the model's values."""

    index: int
    name: str
    operation: str
    shape: str
    each: str
    count: int
    location: str


@dataclass(frozen=True)
class Branch:
    """A module; `index` is its position in `branches`."""

    index: int
    name: str
    count: int
    parameters: str
    parameter_bytes: str
    values: tuple[Leaf, ...]
    children: tuple[Branch, ...]

    def walk(self) -> Iterator[Branch]:
        """This module and those in it, in the order of `index`."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class ModuleCells:
    """What a configuration does in a module and those in it: bytes kept (and where), recomputed, seconds of recomputing."""

    kept: str
    recomputed: str
    seconds: str


@dataclass(frozen=True)
class Cells:
    """Texts that depend on the configuration: by `Branch.index` and by `Leaf.index`."""

    modules: tuple[ModuleCells, ...]
    values: tuple[str, ...]


def tree(model: Record, *, name: str) -> Branch:
    """The model's modules, nested; sums of parameters hold what is inside.

    Args:
      name: of the root, which has no path.
    """
    modules = {m["module"]: m for m in model["modules"]}
    inside: dict[str, list[str]] = defaultdict(list)
    for path in sorted(filter(None, modules)):
        inside[_parent(path)].append(path)
    values: dict[str, list[Leaf]] = defaultdict(list)
    for number, value in enumerate(model["values"]):
        values[value["module"]].append(_leaf(number, value))
    counter = iter(range(len(modules)))

    def branch(path: str, title: str) -> tuple[Branch, int, int]:
        index, of = next(counter), modules[path]
        children, parameters, size = [], of["parameters"], of["parameter_bytes"]
        for inner in inside[path]:
            child, more, larger = branch(inner, inner.rpartition("/")[2])
            children.append(child)
            parameters, size = parameters + more, size + larger
        shown = format_count(parameters) if parameters else NOTHING, format_bytes(size) if size else NOTHING
        return Branch(index, title, of["count"], *shown, tuple(values[path]), tuple(children)), parameters, size

    return branch("", name)[0]


def _leaf(number: int, value: Record) -> Leaf:
    array = f"{value['dtype']}[{','.join(map(str, value['shape']))}]"
    each = format_bytes(value["bytes"])
    return Leaf(number, value["name"], value["operation"], array, each, value["count"], value["location"])


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


@dataclass
class _Sums:
    """Of one module: bytes kept on the device and on the host, bytes recomputed, seconds of that."""

    kept: int = 0
    on_host: int = 0
    recomputed: int = 0
    seconds: float = 0.0

    def add(self, other: _Sums) -> None:
        self.kept += other.kept
        self.on_host += other.on_host
        self.recomputed += other.recomputed
        self.seconds += other.seconds


def cells(model: Record, root: Branch, choice: Choice) -> Cells | None:
    """What one configuration does; None if the model does not say."""
    decided = model["decisions"].get(choice.decisions)
    if decided is None:
        return None
    times = choice.figures.get("modules") or ()
    sums = {m["module"]: _Sums() for m in model["modules"]}
    for value, of in zip(model["values"], decided, strict=True):
        size = value["bytes"]
        sums[value["module"]].add(_Sums(size * of["saved"], size * of["offloaded"], size * of["recomputed"]))
    for time in times:
        if time["step_pass"] == "recompute":
            module = time["module"]
            while module not in sums:  # what the model does not know counts in what is around it
                module = _parent(module)
            sums[module].add(_Sums(seconds=time["seconds"]))
    paths = _paths(root)
    for path in reversed(paths):  # outer modules come first
        if path:
            sums[_parent(path)].add(sums[path])
    return Cells(
        modules=tuple(_module(sums[path], has_times=bool(times)) for path in paths),
        values=tuple(decision_text(d) for d in decided),
    )


def decision_text(decided: Record) -> str:
    """`saved`, `recomputed`, or both with where."""
    present = [word for word in ("saved", "offloaded", "recomputed") if decided[word]]
    if decided["where"]:
        return str(decided["where"])
    return ", ".join(present) or NOTHING


def _module(sums: _Sums, *, has_times: bool) -> ModuleCells:
    kept = [format_bytes(sums.kept)] * bool(sums.kept) + [f"{format_bytes(sums.on_host)} on the host"] * bool(
        sums.on_host
    )
    return ModuleCells(
        " + ".join(kept) or NOTHING,
        format_bytes(sums.recomputed) if sums.recomputed else NOTHING,
        format_seconds(sums.seconds) if sums.seconds else NOTHING if has_times else "not known",
    )


def _paths(root: Branch) -> list[str]:
    """The path of each branch, in the order of `Branch.index`; the root's is empty."""
    found: list[str] = []

    def walk(branch: Branch, path: str) -> None:
        found.append(path)
        for child in branch.children:
            walk(child, f"{path}/{child.name}" if path else child.name)

    walk(root, "")
    return found
