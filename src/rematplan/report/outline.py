"""The model's tree as a table for the terminal: modules indented, repeated ones folded.

Comes in: a record's model and the configuration that it is shown under. Goes out: a table with the texts of the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rematplan.report.choices import Choice, Choices
from rematplan.report.figures import FittedTable
from rematplan.report.tree import Branch, cells, tree

_DEEPEST = 4  # levels of modules; what is deeper counts in its parent, as everywhere


def outline(found: Choices, choice: Choice, *, name: str) -> FittedTable | None:
    """What a configuration keeps and recomputes by module; None where the record does not say."""
    if found.model is None:
        return None
    root = tree(found.model, name=name)
    decided = cells(found.model, root, choice)
    if decided is None:
        return None
    lines = [(branch, depth, decided.modules[branch.index]) for branch, depth in _walk(root, 0)]
    return FittedTable(
        f"The model under {choice.name}",
        {
            "module": [_label(branch, depth) for branch, depth, _ in lines],
            "parameters": [branch.parameter_bytes for branch, _, _ in lines],
            "kept": [of.kept for _, _, of in lines],
            "recomputed": [of.recomputed for _, _, of in lines],
            "recompute time": [of.seconds for _, _, of in lines],
        },
        left=("module",),
        least_important=("parameters", "recomputed", "recompute time"),
    )


def _label(branch: Branch, depth: int) -> str:
    return "  " * depth + branch.name + (f" x{branch.count}" if branch.count > 1 else "")


def _walk(branch: Branch, depth: int) -> Iterator[tuple[Branch, int]]:
    yield branch, depth
    if depth < _DEEPEST:
        for child in branch.children:
            yield from _walk(child, depth + 1)


def subject(choices: Choices) -> str:
    """What the root of the tree is called: the workload, where a plan says it."""
    plan: Any = next((c.plan for c in choices.items if c.plan is not None), None) or {}
    return str(plan.get("workload") or "the function")
