"""Measurements as tables: bytes, operations, time, each with its source. Reads JSON records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rematplan.report import chart
from rematplan.units import format_bytes, format_count, format_seconds

# `sources["seconds"]` in words.
SECONDS_SOURCE = {
    "cycles": "the compiler's cycle estimates over the chip's clock",
    "roofline": "a roofline over the scheduled program: a floor, not a measurement",
    "run": "measured on the device",
}
_MEMORY = (
    ("peak", "peak_bytes", "live at the peak"),
    ("required", "required_bytes", "what must be free to run"),
    ("arguments", "argument_bytes", ""),
    ("outputs", "output_bytes", ""),
    ("temporaries", "temporary_bytes", ""),
    ("aliased", "alias_bytes", "outputs that reuse arguments"),
    ("code", "code_bytes", ""),
)
_CHART_MARGIN = 14  # label and axis
_BUFFERS_SHOWN = 12


def bytes_or_dash(value: float | None) -> str:
    """A figure that may be missing."""
    return "-" if value is None else format_bytes(value)


def time_or_dash(value: float | None) -> str:
    """A figure that may be missing."""
    return "-" if value is None else format_seconds(value)


def count_or_dash(value: float | None) -> str:
    """A figure that may be missing."""
    return "-" if value is None else format_count(value)


def table(title: str, *columns: str, left: Sequence[str] = ()) -> Table:
    """An empty table: numbers right-aligned, the columns in `left` left-aligned and folded where they do not fit."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(
            column, justify="left" if column in left else "right", overflow="fold", no_wrap=column not in left
        )
    return made


def seconds_source(measurement: Mapping[str, Any]) -> str:
    """Where the time of a measurement comes from, in words."""
    source = measurement.get("sources", {}).get("seconds", "")
    return SECONDS_SOURCE.get(source, source or str(measurement.get("source", "")))


def measurement(record: Mapping[str, Any]) -> RenderableType:
    """One measurement: figures with sources, the timeline, the largest buffers at the peak."""
    sources = record.get("sources", {})
    overall = str(record.get("source", ""))
    name = record.get("name") or record.get("configuration") or ""
    title = f"{name or 'program'} on {record['target']} ({overall})"
    figures = table(title, "figure", "value", "source", left=("figure", "source"))
    for label, key, meaning in _MEMORY:
        if record.get(key):
            described = f"{label}, {meaning}" if meaning else label
            figures.add_row(described, format_bytes(record[key]), sources.get(key, overall))
    for label, key in (("operations (FLOP)", "flops"), ("bytes accessed", "bytes_accessed"), ("cycles", "cycles")):
        if record.get(key) is not None:
            shown = format_bytes(record[key]) if key == "bytes_accessed" else format_count(record[key])
            figures.add_row(label, shown, sources.get(key, overall))
    if record.get("seconds") is not None:
        figures.add_row("time of one step", format_seconds(record["seconds"]), seconds_source(record))
    parts: list[RenderableType] = [figures]
    limit = record.get("limit_bytes")
    if limit is not None and record.get("fits_limit") is not None:
        verdict = "compiles" if record["fits_limit"] else "does not compile"
        parts.append(Text(f"{verdict} under a limit of {format_bytes(limit)}"))
    shape = record.get("timeline") or {}
    if shape.get("position"):
        parts += [Text(), Text("Live bytes along the schedule", style="bold"), _Chart(shape)]
    if shape.get("at_peak"):
        parts += [Text(), _buffers(shape["at_peak"])]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in record.get("warnings", ())]
    return Group(*parts)


def _buffers(at_peak: Sequence[Mapping[str, Any]]) -> Table:
    shown = table(
        "Largest live buffers at the peak", "bytes", "kind", "shape", "module", "operation", "line",
        left=("kind", "shape", "module", "operation", "line"),
    )  # fmt: skip
    for buffer in at_peak[:_BUFFERS_SHOWN]:
        shown.add_row(
            format_bytes(buffer["bytes"]),
            *(str(buffer.get(key, "")) for key in ("kind", "shape", "module", "operation", "location")),
        )
    if len(at_peak) > _BUFFERS_SHOWN:
        rest = at_peak[_BUFFERS_SHOWN:]
        shown.add_row(format_bytes(sum(b["bytes"] for b in rest)), f"{len(rest)} more", "", "", "", "")
    return shown


class _Chart:
    """The timeline, as wide as the console allows."""

    def __init__(self, record: Mapping[str, Any]):
        self._record = record

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in chart.timeline(
            self._record["position"],
            self._record["live_bytes"],
            backward_starts=self._record.get("backward_starts"),
            width=max(10, min(options.max_width, 100) - _CHART_MARGIN),
        ):
            yield Text(line, no_wrap=True, overflow="crop")


def rows(
    records: Sequence[Mapping[str, Any]], *, title: str, budget_bytes: int | None = None, highlight: str = ""
) -> RenderableType:
    """Configurations under each other. Figures that no row has get no column; a caption names the sources.

    Times are compared with the first row's, where they come from the same source.

    Args:
      records: rows: `name` and the keys of a measurement.
      budget_bytes: if given, a column says which rows need no more.
      highlight: name of the row to set off.
    """
    has_cycles = any(record.get("cycles") is not None for record in records)
    has_notes = any(record.get("note") for record in records)
    columns = ["configuration", "peak", "required"]
    columns += ["fits"] if budget_bytes is not None else []
    columns += ["FLOP"] + (["cycles"] if has_cycles else []) + ["time", "vs first", "source"]
    columns += ["note"] if has_notes else []
    shown = table(title, *columns, left=("configuration", "source", "note"))
    for record in records:
        cells = [
            str(record["name"]),
            bytes_or_dash(record.get("peak_bytes")),
            bytes_or_dash(record.get("required_bytes")),
        ]
        if budget_bytes is not None:
            cells.append("yes" if fits(record, budget_bytes) else "no")
        cells.append(count_or_dash(record.get("flops")))
        cells += [count_or_dash(record.get("cycles"))] if has_cycles else []
        comparable = same_clock(record, records[0])
        cells += [time_or_dash(record.get("seconds"))]
        cells += [f"{record['seconds'] / records[0]['seconds'] - 1:+.1%}" if comparable else "-"]
        cells.append(str(record.get("source", "")))
        cells += [str(record.get("note", ""))] if has_notes else []
        shown.add_row(*cells, style="bold" if record["name"] == highlight else "")
    times = dict.fromkeys(seconds_source(record) for record in records if record.get("seconds") is not None)
    caption = f"time: {'; '.join(times)}" if times else "time: this compiler gives none"
    return Group(shown, Text(caption, style="dim"))


def same_clock(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two times may be compared: a roofline and a compiler's cycles are different clocks."""
    return bool(record.get("seconds") and other.get("seconds") and seconds_source(record) == seconds_source(other))


def fits(record: Mapping[str, Any], budget_bytes: int) -> bool:
    """Whether a measured configuration fits: by the compiler's word where it was asked, else by what it requires."""
    if record.get("limit_bytes") == budget_bytes and record.get("fits_limit") is not None:
        return bool(record["fits_limit"])
    return record["required_bytes"] <= budget_bytes


def at_stake(finding: Mapping[str, Any]) -> list[str]:
    """Bytes and FLOPs that a finding is about, as words."""
    found = []
    if finding.get("bytes"):
        found.append(f"{format_bytes(finding['bytes'])} at stake")
    if finding.get("flops"):
        found.append(f"{format_count(finding['flops'])}FLOP at stake")
    return found
