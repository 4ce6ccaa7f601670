"""What `fit` found, as a table of targets with a sentence for each. Reads JSON records only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rematplan.report.figures import SECONDS_SOURCE, WARNING, FittedTable, bytes_or_dash, time_or_dash
from rematplan.units import format_bytes, format_seconds

Record = Mapping[str, Any]
_LEAST_IMPORTANT = ("memory", "time", "needs", "budget", "vs plain")


def fitted(record: Record) -> RenderableType:
    """The rendering of a record of the verb `fit`."""
    vary, rows = record["vary"], record["rows"]
    allowed = f", at most {record['slowdown']:g} times the time of no checkpointing" if record["slowdown"] else ""
    title = f"The largest {vary} of {record['workload']} that fits{allowed}"
    cells: dict[str, list[str]] = {
        "target": [row["target"] for row in rows],
        "memory": [bytes_or_dash(row["memory_bytes"]) for row in rows],
        "budget": [format_bytes(row["budget_bytes"]) for row in rows],
        "plain": [_value(row["plain"]) for row in rows],
        "planned": [_value(row["best"]) for row in rows],
        "needs": [bytes_or_dash(_of(row["best"], "required_bytes")) for row in rows],
        "time": [time_or_dash(_of(row["best"], "seconds")) for row in rows],
        "vs plain": [_slowdown(row["best"]) for row in rows],
        f"{vary}/s": [_number(row["throughput"]) for row in rows],
    }
    if any(row["price_per_hour"] is not None for row in rows):
        cells["cost/million"] = [_number(row["cost_per_million"]) for row in rows]
    table = FittedTable("", cells, left=("target",), least_important=_LEAST_IMPORTANT)
    return Group(
        Text(title, style="bold"), table, Text(), *(Text(line) for line in _sentences(record)), *_notes(record)
    )


def _sentences(record: Record) -> Iterator[str]:
    vary = record["vary"]
    for row in record["rows"]:
        best, above, name = row["best"], row["above"], row["target"]
        if best is None:
            yield f"{name}: {vary}={above['value']} does not fit: {above['reason']} ({above['source']})."
            continue
        line = f"{name}: {vary}={best['value']} needs {format_bytes(best['required_bytes'])} ({best['source']})"
        if above is None:
            yield f"{line}; no greater value in the range is valid."
        else:
            yield f"{line}; {vary}={above['value']} does not fit: {above['reason']} ({above['source']})."
    if len(record["rows"]) > 1:
        yield f"The smallest target that trains {vary}={record['low']}: {record['smallest']}."
    if record["cheapest"] is not None:
        row = next(row for row in record["rows"] if row["target"] == record["cheapest"])
        yield f"The cheapest: {row['target']}, {_number(row['cost_per_million'])} for a million of {vary}."


def _notes(record: Record) -> Iterator[RenderableType]:
    clocks = dict.fromkeys(str(row["best"]["clock"]) for row in record["rows"] if row["best"] is not None)
    if any(clocks):
        yield Text(f"time: {'; '.join(SECONDS_SOURCE.get(clock) or clock for clock in clocks)}", style="dim")
    if len(clocks) > 1:
        yield Text(
            "times of different sources stand here beside each other: between them they only rank", style=WARNING
        )
    predicted = [row["target"] for row in record["rows"] if _of(row["best"], "plain_source") == "predicted"]
    if predicted:
        yield Text(f"predicted, for want of room: time without checkpointing on {', '.join(predicted)}", style="dim")
    for row in record["rows"]:
        spent = f"{row['probes']} probes and {row['compiles']} compiles in {format_seconds(row['search_seconds'])}"
        yield Text(f"{row['target']}: {spent}", style="dim")
    skipped = record["skipped"]
    if skipped:
        said = (
            f"refused by the model: {len(skipped)} of the values, first {skipped[0]['value']}: {skipped[0]['reason']}"
        )
        yield Text(said, style="dim")


def _of(point: Record | None, key: str) -> Any:
    return None if point is None else point[key]


def _value(point: Record | None) -> str:
    return "none" if point is None else str(point["value"])


def _slowdown(point: Record | None) -> str:
    slowdown = _of(point, "slowdown")
    return "-" if slowdown is None else f"{slowdown - 1:+.1%}"


def _number(value: float | None) -> str:
    """Three digits, without an exponent."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
