"""What a plan wins over what people write by hand, in one sentence. Reads JSON records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rematplan.report.figures import fits, same_clock
from rematplan.units import format_bytes

# Rows of a comparison in which nobody wrote checkpointing: none at all, and the compiler's own rematerialization.
NOT_CHECKPOINTING = ("plain", "compiler")
_SAME = 0.005  # differences below half a percent are "as fast as"


def what_was_won(
    plan: Mapping[str, Any],
    baselines: Sequence[Mapping[str, Any]],
    *,
    budget_bytes: int,
    name: str = "The plan",
    was_asked: bool = True,
) -> str:
    """One sentence: the plan beside `plain`, and beside the fastest hand-written configuration that fits the budget.

    Args:
      was_asked: whether somebody asked for that budget; else it is what the plan needs.
    """
    clauses: list[str] = []
    by_name = {row["name"]: row for row in baselines}
    if "plain" in by_name:
        clauses.append(_beside(plan, by_name["plain"], called="no checkpointing (plain)"))
    fitting = [row for row in baselines if row["name"] not in NOT_CHECKPOINTING and fits(row, budget_bytes)]
    timed = [row for row in fitting if same_clock(row, plan)]
    if timed:
        best = min(timed, key=lambda row: row["seconds"])
        clauses.append(_beside(plan, best, called=f"the fastest hand-written checkpointing that fits ({best['name']})"))
    elif baselines and not fitting:
        clauses.append(f"no hand-written checkpointing {'fits this budget' if was_asked else 'needs as little'}")
    if not clauses:
        return f"{name} needs {format_bytes(plan['required_bytes'])} of {format_bytes(budget_bytes)}."
    return f"{name} needs {format_bytes(plan['required_bytes'])}: {'; '.join(clauses)}."


def _beside(plan: Mapping[str, Any], other: Mapping[str, Any], *, called: str) -> str:
    memory = f"{plan['required_bytes'] / other['required_bytes']:.0%} of the memory"
    if not same_clock(plan, other):
        return f"{memory} of {called}"
    ratio = plan["seconds"] / other["seconds"]
    if abs(ratio - 1) < _SAME:
        pace = "as fast"
    elif ratio < 1:
        pace = f"{1 - ratio:.1%} less time"
    else:
        pace = f"{ratio - 1:.1%} more time"
    return f"{pace} and {memory} beside {called}"
