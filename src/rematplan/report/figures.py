"""Measurements as tables: bytes, operations, time, each with its source. Reads JSON records only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
# readable on light and dark backgrounds alike, which yellow is not
WARNING = "magenta"
_CHART_MARGIN = 14  # label and axis
_BUFFERS_SHOWN = 12
_FOLDED_COLUMN, _COLUMN_GAP = 16, 2


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


def figure_rows(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured of one configuration: figure, value, and where it comes from."""
    sources = record.get("sources", {})
    overall = str(record.get("source", ""))
    rows: list[tuple[str, str, str]] = []
    for label, key, meaning in _MEMORY:
        if record.get(key):
            described = f"{label}, {meaning}" if meaning else label
            rows.append((described, format_bytes(record[key]), str(sources.get(key, overall))))
    for label, key in (("operations (FLOP)", "flops"), ("bytes accessed", "bytes_accessed"), ("cycles", "cycles")):
        if record.get(key) is not None:
            shown = format_bytes(record[key]) if key == "bytes_accessed" else format_count(record[key])
            rows.append((label, shown, str(sources.get(key, overall))))
    if record.get("host_bytes"):
        rows.append(
            ("copied to the host and back", format_bytes(record["host_bytes"]), str(sources.get("seconds", overall)))
        )
    rows += _communication_rows(record)
    if record.get("seconds") is not None:
        rows.append(("time of one step", format_seconds(record["seconds"]), seconds_source(record)))
    return rows


def _communication_rows(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What devices send each other in a step, by kind and pass, and how long that is waited for."""
    if record.get("devices", 1) < 2:
        return []
    rows = [("devices, each", str(record["devices"]), "")]
    for use in record.get("collectives", ()):
        again = ", made again by a region" if use["step_pass"] == "recompute" else ""
        label = f"{use['kind']} in the {use['step_pass']} pass{again}"
        rows.append((label, f"{use['count']} x, {format_bytes(use['bytes'])}", "counted in the scheduled program"))
    waited = format_seconds(record.get("waiting_seconds", 0.0))
    rows.append(("waiting for communication", waited, "a ring over the chip's links, beside the computation"))
    return rows


def measurement(record: Mapping[str, Any]) -> RenderableType:
    """One measurement: figures with sources, the timeline, the largest buffers at the peak."""
    name = record.get("name") or record.get("configuration") or ""
    title = f"{name or 'program'} on {record['target']} ({record.get('source', '')})"
    figures = table(title, "figure", "value", "source", left=("figure", "source"))
    for row in figure_rows(record):
        figures.add_row(*row)
    parts: list[RenderableType] = [figures]
    limit = record.get("limit_bytes")
    if limit is not None and record.get("fits_limit") is not None:
        verdict = "fits" if record["fits_limit"] else "does not fit"
        parts.append(Text(f"{verdict} under a limit of {format_bytes(limit)}"))
    shape = record.get("timeline") or {}
    if shape.get("position"):
        parts += [Text(), Text("Live bytes along the schedule", style="bold"), TimelineChart(shape)]
    if shape.get("at_peak"):
        parts += [Text(), _buffers(shape["at_peak"])]
    parts += [Text(f"warning: {warning}", style=WARNING) for warning in record.get("warnings", ())]
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


class TimelineChart:
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


class ScatterChart:
    """Time against memory of rows, as wide as the console allows."""

    def __init__(self, marks: Sequence[chart.Mark], budget_bytes: int | None):
        self._marks, self._budget = marks, budget_bytes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, min(options.max_width, 100) - _CHART_MARGIN)
        for line in chart.scatter(self._marks, budget_bytes=self._budget, width=width):
            yield Text(line, no_wrap=True, overflow="crop")


def rows(
    records: Sequence[Mapping[str, Any]], *, title: str, budget_bytes: int | None = None, highlight: str = ""
) -> RenderableType:
    """Configurations under each other. Figures that no row has get no column; a caption names the sources.

    Times are compared with the first row's, where they come from the same source. Where the console is too narrow for all
    columns, the least important ones are left out rather than letters broken off.

    Args:
      records: rows: `name` and the keys of a measurement.
      budget_bytes: if given, a column says which rows need no more.
      highlight: name of the row to set off.
    """
    cells: dict[str, list[str]] = {"configuration": [str(r["name"]) for r in records]}
    cells["peak"] = [bytes_or_dash(r.get("peak_bytes")) for r in records]
    cells["required"] = [bytes_or_dash(r.get("required_bytes")) for r in records]
    if budget_bytes is not None:
        cells["fits"] = ["yes" if fits(r, budget_bytes) else "no" for r in records]
    cells["FLOP"] = [count_or_dash(r.get("flops")) for r in records]
    if any(r.get("cycles") is not None for r in records):
        cells["cycles"] = [count_or_dash(r.get("cycles")) for r in records]
    cells["time"] = [time_or_dash(r.get("seconds")) for r in records]
    against = [
        f"{r['seconds'] / records[0]['seconds'] - 1:+.1%}" if same_clock(r, records[0]) else "-" for r in records
    ]
    cells["vs first"] = against
    cells["source"] = [str(r.get("source", "")) for r in records]
    if any(r.get("note") for r in records):
        cells["note"] = [str(r.get("note", "")) for r in records]
    styles = ["bold" if r["name"] == highlight else "" for r in records]
    times = dict.fromkeys(seconds_source(record) for record in records if record.get("seconds") is not None)
    caption = f"time: {'; '.join(times)}" if times else "time: this compiler gives none"
    shown = FittedTable(
        title,
        cells,
        left=("configuration", "source", "note"),
        least_important=("note", "cycles", "FLOP", "source", "peak", "vs first", "fits"),
        styles=styles,
        folded=("note",),
    )
    return Group(shown, Text(caption, style="dim"))


class FittedTable:
    """A table with as many columns as the console has room for.

    Args:
      cells: by title of the column.
      left: columns of words, which are folded where they are long.
      least_important: which columns go first.
      folded: columns that may be as narrow as `_FOLDED_COLUMN`.
    """

    def __init__(
        self,
        title: str,
        cells: Mapping[str, Sequence[str]],
        *,
        left: Sequence[str],
        least_important: Sequence[str],
        styles: Sequence[str] = (),
        folded: Collection[str] = (),
    ):
        self._title, self._cells, self._styles, self._left = title, cells, styles, left
        self._least_important, self._folded = least_important, folded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(self._cells)
        for dropped in ("", *self._least_important):
            columns = [c for c in columns if c != dropped]
            if sum(map(self._width, columns)) <= options.max_width:
                break
        shown = table(self._title, *columns, left=self._left)
        for number in range(len(next(iter(self._cells.values())))):
            style = self._styles[number] if self._styles else ""
            shown.add_row(*(Text(self._cells[c][number]) for c in columns), style=style)
        yield shown

    def _width(self, column: str) -> int:
        widest = max(map(len, (column, *self._cells[column]))) + _COLUMN_GAP
        return min(widest, _FOLDED_COLUMN) if column in self._folded else widest


def same_clock(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two times may be compared: a roofline and a compiler's cycles are different clocks."""
    return bool(record.get("seconds") and other.get("seconds") and seconds_source(record) == seconds_source(other))


def fits(record: Mapping[str, Any], budget_bytes: int | None) -> bool:
    """Whether a measured configuration fits: by the compiler's word where it was asked, else by what it requires.

    Args:
      budget_bytes: None where no limit is known; then everything fits that the compiler did not refuse.
    """
    limit, said = record.get("limit_bytes"), record.get("fits_limit")
    if said is not None and limit == budget_bytes:
        return bool(said)
    # what was refused under a limit is refused under a smaller one; without one, the limit was all that the chip has
    if said is False and (limit is None or budget_bytes is None or limit >= budget_bytes):
        return False
    return budget_bytes is None or record["required_bytes"] <= budget_bytes


def at_stake(finding: Mapping[str, Any]) -> list[str]:
    """Bytes and FLOPs that a finding is about, as words."""
    found = []
    if finding.get("bytes"):
        found.append(f"{format_bytes(finding['bytes'])} at stake")
    if finding.get("flops"):
        found.append(f"{format_count(finding['flops'])}FLOP at stake")
    return found
