"""The model as a folding tree of modules: what does not depend on the configuration, and what does.

Comes in: the JSON of a `records.Model` and a choice. Goes out: `Branch`, nested as the modules are, once; and for each
choice the texts of its cells, in the same order. Numbers become text here, so that every renderer shows the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    counter = iter(range(len(modules) + 1))

    def branch(path: str, title: str) -> Branch:
        index = next(counter)
        prefix = f"{path}/" if path else ""
        inside = [m for p, m in modules.items() if p == path or p.startswith(prefix)]
        names = sorted(p for p in modules if p and p != path and p.startswith(prefix) and "/" not in p[len(prefix) :])
        parameters = sum(m["parameters"] for m in inside)
        size = sum(m["parameter_bytes"] for m in inside)
        values = tuple(
            Leaf(
                number,
                v["name"],
                v["operation"],
                f"{v['dtype']}[{','.join(map(str, v['shape']))}]",
                format_bytes(v["bytes"]),
                v["count"],
                v["location"],
            )
            for number, v in enumerate(model["values"])
            if v["module"] == path
        )
        children = tuple(branch(p, p[len(prefix) :]) for p in names)
        return Branch(
            index,
            title,
            modules[path]["count"],
            format_count(parameters) if parameters else NOTHING,
            format_bytes(size) if size else NOTHING,
            values,
            children,
        )

    return branch("", name)


def cells(model: Record, root: Branch, choice: Choice) -> Cells | None:
    """What one configuration does; None if the model does not say."""
    decided = model["decisions"].get(choice.decisions)
    if decided is None:
        return None
    times = choice.figures.get("modules") or ()
    paths = _paths(root)
    return Cells(
        modules=tuple(_module(model, path, decided, times) for path in paths),
        values=tuple(decision_text(d) for d in decided),
    )


def decision_text(decided: Record) -> str:
    """`saved`, `recomputed`, or both with where."""
    present = [word for word in ("saved", "offloaded", "recomputed") if decided[word]]
    if decided["where"]:
        return str(decided["where"])
    return ", ".join(present) or NOTHING


def _module(model: Record, path: str, decided: Sequence[Record], times: Sequence[Record]) -> ModuleCells:
    inside = lambda module: not path or module == path or module.startswith(f"{path}/")  # noqa: E731
    pairs = [(v, d) for v, d in zip(model["values"], decided, strict=True) if inside(v["module"])]
    kept = sum(v["bytes"] * d["saved"] for v, d in pairs)
    on_host = sum(v["bytes"] * d["offloaded"] for v, d in pairs)
    recomputed = sum(v["bytes"] * d["recomputed"] for v, d in pairs)
    seconds = sum(t["seconds"] for t in times if t["step_pass"] == "recompute" and inside(t["module"]))
    return ModuleCells(
        " + ".join([format_bytes(kept)] * bool(kept) + [f"{format_bytes(on_host)} on the host"] * bool(on_host))
        or NOTHING,
        format_bytes(recomputed) if recomputed else NOTHING,
        format_seconds(seconds) if seconds else NOTHING if times else "not known",
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
