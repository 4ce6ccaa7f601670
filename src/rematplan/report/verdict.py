"""The first thing that a reader wants to know, as lines of a question, an answer and where its figures come from.

Comes in: a record and its choices. Goes out: `Verdict`. Every number says its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.report.choices import Choice, ChoiceKind, Choices
from rematplan.report.figures import fits, same_clock, seconds_source, time_or_dash
from rematplan.report.summary import what_was_won
from rematplan.units import format_bytes, format_seconds

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One question with its answer; `source` says where the figures come from."""

    question: str
    answer: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """A sentence, and what it rests on.

    Attributes:
      fits: whether the budget is kept; None where there was none.
    """

    sentence: str
    fits: bool | None
    lines: tuple[Line, ...]


def verdict(record: Record, found: Choices) -> Verdict:
    """The verdict on what a record shows first."""
    shown = found.items[found.default]
    limit = found.budget_bytes
    does_fit = None if limit is None else fits(shown.figures, limit)
    return Verdict(_sentence(found, shown), does_fit, tuple(_lines(record, found, shown)))


def _sentence(found: Choices, shown: Choice) -> str:
    if shown.kind is ChoiceKind.PLAN:
        limit = found.budget_bytes or shown.figures["required_bytes"]
        rows = [{**c.figures, "name": c.name} for c in found.items if c.kind is not ChoiceKind.PLAN]
        was_asked = found.budget_bytes is not None
        name = "The plan" if was_asked else "The smallest plan"
        return what_was_won(shown.figures, rows, budget_bytes=limit, name=name, was_asked=was_asked)
    needs, time = format_bytes(shown.figures["required_bytes"]), shown.figures.get("seconds")
    fitting = found.fitting()
    limit = found.target if found.budget_bytes is None else format_bytes(found.budget_bytes)
    if shown.kind is ChoiceKind.MEASURED:
        return f"One step needs {needs} and {_takes(time) if shown in fitting else f'does not fit {limit}'}."
    if shown not in fitting:
        return f"Nothing fits {limit}: {shown.name} needs {needs}."
    if len(found.items) == 1:
        return f"One step needs {needs} and {_takes(time)}."
    which = "fastest" if time is not None else "smallest"
    within = f" within {limit}" if found.budget_bytes is not None else ""
    within = f" that fits {limit}" if not within and len(fitting) < len(found.items) else within
    apart = dict.fromkeys(
        seconds_source(c.figures)
        for c in fitting
        if c.figures.get("seconds") is not None and not same_clock(c.figures, shown.figures)
    )
    not_compared = f" It is not compared with times from {' or '.join(apart)}." if apart else ""
    return f"The {which} configuration{within} is {shown.name}: it needs {needs}.{not_compared}"


def _takes(seconds: float | None) -> str:
    return f"takes {time_or_dash(seconds)}"


def _lines(record: Record, found: Choices, shown: Choice) -> Iterator[Line]:
    figures, plain = shown.figures, found.plain
    sources = figures.get("sources", {})
    if found.budget_bytes is not None:
        answer = "yes" if fits(figures, found.budget_bytes) else "no"
        asked = figures.get("limit_bytes") == found.budget_bytes and figures.get("fits_limit") is not None
        how = (
            "the compiler, with the budget as its limit"
            if asked and _is_tpu(found.target)
            else _source(figures, "required_bytes")
        )
        needs = format_bytes(figures["required_bytes"])
        yield Line("Does it fit?", f"{answer}: it needs {needs} of {format_bytes(found.budget_bytes)}", how)
    if plain is not None and plain is not shown:
        before, after = plain.figures, figures
        yield Line(
            "Memory, without checkpointing and with it",
            f"{format_bytes(before['required_bytes'])} to {format_bytes(after['required_bytes'])} "
            f"({after['required_bytes'] / before['required_bytes'] - 1:+.1%})",
            f"{_source(before, 'required_bytes')}; {_source(after, 'required_bytes')}",
        )
        if same_clock(before, after):
            yield Line(
                "Time of one step, without and with",
                f"{format_seconds(before['seconds'])} to {format_seconds(after['seconds'])} "
                f"({after['seconds'] / before['seconds'] - 1:+.1%})",
                seconds_source(after),
            )
        elif after.get("seconds") is not None:
            other = f" (that of no checkpointing, {time_or_dash(before.get('seconds'))}, comes from another source)"
            known = before.get("seconds") is not None
            yield Line(
                "Time of one step",
                f"{format_seconds(after['seconds'])}{other if known else ''}",
                seconds_source(after) + (f"; without: {seconds_source(before)}" if known else ""),
            )
    elif figures.get("seconds") is not None:
        yield Line("Time of one step", format_seconds(figures["seconds"]), seconds_source(figures))
    yield from _fastest(found, shown)
    yield from _predicted(record, figures)
    best = found.best_by_hand()
    if best is not None and best is not shown:
        yield Line(
            "Against the best hand-written checkpointing" + (" that fits" if found.budget_bytes is not None else ""),
            f"{best.name}: {format_bytes(best.figures['required_bytes'])}, {format_seconds(best.figures['seconds'])}; "
            f"here {figures['seconds'] / best.figures['seconds'] - 1:+.1%} time",
            f"{_source(best.figures, 'required_bytes')}; {seconds_source(best.figures)}",
        )
    yield from _bound(shown)
    if sources.get("peak_bytes"):
        yield Line("Live at the peak", format_bytes(figures["peak_bytes"]), _source(figures, "peak_bytes"))


def _fastest(found: Choices, shown: Choice) -> Iterator[Line]:
    """The other end of a frontier."""
    timed = [c for c in found.items if c.kind is ChoiceKind.PLAN and same_clock(c.figures, shown.figures)]
    fastest = min(timed, key=lambda c: c.figures["seconds"], default=shown)
    if fastest is not shown:
        figures = fastest.figures
        yield Line(
            "The fastest plan found",
            f"{format_bytes(figures['required_bytes'])}, {format_seconds(figures['seconds'])} "
            f"({figures['seconds'] / shown.figures['seconds'] - 1:+.1%} time)",
            f"{_source(figures, 'required_bytes')}; {seconds_source(figures)}",
        )


def _predicted(record: Record, figures: Record) -> Iterator[Line]:
    said = record.get("predicted") or {}
    parts: list[str] = []
    for key, word, show in (("required_bytes", "needs", format_bytes), ("seconds", "takes", format_seconds)):
        if said.get(key) and figures.get(key):
            parts.append(f"{word} {show(said[key])} ({said[key] / figures[key] - 1:+.1%} of measured)")
    if parts:
        yield Line("Predicted before it was compiled", "; ".join(parts), str(said.get("source", "predicted")))


def _bound(shown: Choice) -> Iterator[Line]:
    bound = (shown.plan or {}).get("bound") or {}
    if bound.get("seconds") is not None:
        gap = f"; the plan is {bound['gap']:.1%} above it" if bound.get("gap") is not None else ""
        yield Line(
            "Lower bound on time",
            f"{format_seconds(bound['seconds'])}{gap}",
            "proved by the search's prices (predicted)",
        )


def _source(figures: Record, key: str) -> str:
    return str(figures.get("sources", {}).get(key) or figures.get("source", ""))


def _is_tpu(target: str) -> bool:
    return target.startswith("tpu")
