"""Charts of a report, as Vega-Lite specifications made with Altair.

Comes in: `Choices`. Goes out: charts: the frontier (time against memory), the memory timeline of one or two programs, and
what is alive at the peak. Data that a reader's choice replaces has a name, under which the page finds it. Kinds differ in
shape and lightness, not in hue alone. Altair is loaded when a chart is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rematplan.report.choices import Choice, ChoiceKind, Choices
from rematplan.report.figures import seconds_source, time_or_dash
from rematplan.units import format_bytes

if TYPE_CHECKING:
    import altair as alt

WIDTH, HEIGHT = 660, 280
# Names of the data that a page replaces when another configuration is chosen.
SHOWN, COMPARED, SHADES, ALIVE, CHOSEN = "shown", "compared", "shades", "alive", "chosen"
# Okabe and Ito's colours, in an order in which lightness differs too.
KIND_COLORS = {
    ChoiceKind.PLAN: "#0072B2",
    ChoiceKind.HAND_WRITTEN: "#D55E00",
    ChoiceKind.COMPILER: "#009E73",
    ChoiceKind.MEASURED: "#0072B2",
}
KIND_SHAPES = {
    ChoiceKind.PLAN: "circle",
    ChoiceKind.HAND_WRITTEN: "square",
    ChoiceKind.COMPILER: "triangle-up",
    ChoiceKind.MEASURED: "diamond",
}
ROLE_COLORS = {
    "parameter": "#000000",
    "optimizer": "#6E6E6E",
    "input": "#B8B8B8",
    "saved": "#0072B2",
    "recomputed": "#E69F00",
    "offloaded": "#CC79A7",
    "gradient": "#009E73",
    "other": "#F0E442",
}
_MIB = 1 << 20
_MODULES_SHOWN = 14
_NEAR = 0.02  # of an axis: names of points this close would lie on each other


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is no data."""

    text: str
    lines: str
    background: str
    parameter: str


LIGHT = Theme(text="#1b1b1b", lines="#d9d9d9", background="#ffffff", parameter="#000000")
DARK = Theme(text="#ececec", lines="#444444", background="#16181c", parameter="#ffffff")


def frontier(found: Choices, *, width: int = WIDTH) -> alt.LayerChart:
    """Time against memory of every configuration; the budget as a line, plans joined, the chosen one ringed."""
    import altair as alt

    rows = frontier_rows(found)
    data = alt.Data(values=rows[::-1])  # what comes first is drawn last, over what lies at the same place
    kinds = [kind for kind in ChoiceKind if any(row["kind"] == kind.value for row in rows)]
    x = alt.X("mib:Q", title="memory that one step needs (MiB)", scale=alt.Scale(zero=False, nice=True))
    y = alt.Y("ms:Q", title="time of one step (ms)", scale=alt.Scale(zero=False, nice=True))
    domain = [kind.value for kind in kinds]
    color = alt.Color(
        "kind:N", title=None, scale=alt.Scale(domain=domain, range=[KIND_COLORS[k] for k in kinds]), legend=_legend()
    )
    shape = alt.Shape(
        "kind:N", title=None, scale=alt.Scale(domain=domain, range=[KIND_SHAPES[k] for k in kinds]), legend=_legend()
    )
    tooltip = [alt.Tooltip(f"{field}:N", title=title) for field, title in _TOOLTIP]
    base = alt.Chart(data)
    line = (
        base.transform_filter(alt.datum.kind == ChoiceKind.PLAN.value)
        .mark_line(interpolate="step-after", strokeWidth=1, opacity=0.6, color=KIND_COLORS[ChoiceKind.PLAN])
        .encode(x=x, y=y, order=alt.Order("mib:Q"))
    )
    points = base.mark_point(filled=True, size=90, opacity=1, cursor="pointer").encode(
        x=x, y=y, color=color, shape=shape, tooltip=tooltip
    )
    names = base.mark_text(align="left", dx=8, dy=-6, fontSize=10, limit=130).encode(x=x, y=y, text="label:N")
    ring = (
        alt.Chart(alt.Data(name=CHOSEN, values=[row for row in rows if row["index"] == found.default]))
        .mark_point(size=320, strokeWidth=2.5, shape="circle", color="#CC79A7", filled=False)
        .encode(x=x, y=y)
    )
    layers: list[Any] = [line, points, names, ring]
    if found.budget_bytes is not None:
        mark = alt.Data(
            values=[{"mib": found.budget_bytes / _MIB, "label": f"budget {format_bytes(found.budget_bytes)}"}]
        )
        rule = alt.Chart(mark).mark_rule(strokeDash=[6, 4], strokeWidth=1.5, color="#CC79A7").encode(x="mib:Q")
        middle = (min(row["mib"] for row in rows) + max(row["mib"] for row in rows)) / 2
        side = (
            ("left", 4) if found.budget_bytes / _MIB < middle else ("right", -4)
        )  # the words stay inside of the chart
        said = (
            alt.Chart(mark)
            .mark_text(align=side[0], dx=side[1], dy=10, fontSize=10, baseline="top")
            .encode(x="mib:Q", y=alt.value(0), text="label:N")
        )
        layers += [rule, said]
    return alt.LayerChart(layer=layers).properties(
        width=width, height=HEIGHT, description="Time of one step against the memory that it needs, by configuration."
    )


_TOOLTIP = (("name", "configuration"), ("needs", "needs"), ("time", "time"), ("source", "source"))


def _point(number: int, choice: Choice) -> dict[str, Any]:
    figures = choice.figures
    return {
        "index": number,
        "name": choice.name,
        "label": "" if choice.kind is ChoiceKind.PLAN else choice.name,
        "kind": choice.kind.value,
        "mib": figures["required_bytes"] / _MIB,
        "ms": figures["seconds"] * 1e3,
        "needs": format_bytes(figures["required_bytes"]),
        "time": time_or_dash(figures["seconds"]),
        "source": f"{figures.get('source', '')}; time: {seconds_source(figures)}",
    }


def frontier_rows(found: Choices) -> list[dict[str, Any]]:
    """The frontier's data, one row a configuration that has a time; of points that lie on each other one has all names."""
    rows = [_point(number, c) for number, c in enumerate(found.items) if c.figures.get("seconds") is not None]
    wide, high = (max((r[k] for r in rows), default=0) - min((r[k] for r in rows), default=0) for k in ("mib", "ms"))
    named: list[dict[str, Any]] = []
    for row in (row for row in rows if row["label"]):
        other = next((o for o in named if _near(o, row, wide, high)), None)
        if other is None:
            named.append(row)
        else:
            other["label"] += f", {row['label']}"
            row["label"] = ""
    return rows


def _near(one: dict[str, Any], other: dict[str, Any], wide: float, high: float) -> bool:
    return abs(one["mib"] - other["mib"]) <= _NEAR * wide and abs(one["ms"] - other["ms"]) <= _NEAR * high


def timeline(shown: Choice, compared: Choice | None, *, width: int = WIDTH, legend: bool = False) -> alt.LayerChart:
    """Live bytes along the schedule of one program, another one's over it; the backward pass shaded, the peak marked.

    Args:
      legend: say in the picture which line is whose, where nothing around it does.
    """
    import altair as alt

    shades = alt.Chart(alt.Data(name=SHADES, values=timeline_shades(shown)))
    domain = alt.Scale(domain=[0, 100], nice=False)
    x = alt.X("percent:Q", title="the schedule (% of its instructions)", scale=domain)
    y = alt.Y("mib:Q", title="live bytes (MiB)", scale=alt.Scale(zero=True))
    own = alt.Data(name=SHOWN, values=timeline_rows(shown))
    other = alt.Data(name=COMPARED, values=timeline_rows(compared) if compared is not None else [])
    area = (
        alt.Chart(own)
        .mark_area(interpolate="step-after", opacity=0.28, color=KIND_COLORS[ChoiceKind.PLAN])
        .encode(x=x, y=y)
    )
    line = (
        alt.Chart(own)
        .mark_line(interpolate="step-after", strokeWidth=1.6, color=KIND_COLORS[ChoiceKind.PLAN])
        .encode(x=x, y=y, tooltip=[alt.Tooltip("percent:Q", format=".1f"), alt.Tooltip("mib:Q", format=",.0f")])
    )
    second = (
        alt.Chart(other)
        .mark_line(
            interpolate="step-after", strokeWidth=1.4, strokeDash=[5, 3], color=KIND_COLORS[ChoiceKind.HAND_WRITTEN]
        )
        .encode(x=x, y=y)
    )
    peak = alt.Chart(own).transform_window(rank="rank()", sort=[alt.SortField("mib", order="descending")])
    peak = peak.transform_filter(alt.datum.rank == 1).transform_aggregate(percent="min(percent)", mib="max(mib)")
    dot = peak.mark_point(filled=True, size=70, shape="diamond", color="#CC79A7", opacity=1).encode(x=x, y=y)
    said = (
        peak.transform_calculate(label="'peak ' + format(datum.mib, ',.0f') + ' MiB'")
        .mark_text(align="center", dy=-10, fontSize=11, fontWeight="bold")
        .encode(x=x, y=y, text="label:N")
    )
    shade = shades.mark_rect(opacity=0.13, color="#8a8a8a").encode(
        x=alt.X("start:Q", scale=domain), x2="stop:Q", y=alt.value(0), y2=alt.value(HEIGHT)
    )
    words = shades.mark_text(align="left", baseline="bottom", dx=4, dy=-4, fontSize=11).encode(
        x=alt.X("start:Q", scale=domain), y=alt.value(HEIGHT), text="word:N"
    )
    chart = alt.LayerChart(layer=[shade, words, area, line, second, dot, said]).properties(
        width=width, height=HEIGHT, description="Live bytes along the scheduled program."
    )
    if not legend:
        return chart
    title = f"{shown.name} (solid)" + (f", {compared.name} (dashed)" if compared is not None else "")
    return chart.properties(title=alt.TitleParams(title, anchor="start", fontWeight="normal", fontSize=12))


def timeline_rows(choice: Choice) -> list[dict[str, float]]:
    """Live bytes at points of the schedule, in percent of its length; none where the schedule is not known."""
    timeline = choice.figures.get("timeline") or {}
    position = timeline.get("position") or ()
    end = max(position[-1], 1) if position else 1
    return [
        {"percent": round(100 * at / end, 3), "mib": round(live / _MIB, 3)}
        for at, live in zip(position, timeline.get("live_bytes") or (), strict=True)
    ]


def timeline_shades(choice: Choice) -> list[dict[str, Any]]:
    """Where the backward pass lies, in percent of the schedule."""
    timeline = choice.figures.get("timeline") or {}
    position, starts = timeline.get("position") or (), timeline.get("backward_starts")
    if not position or starts is None:
        return []
    return [{"start": round(100 * starts / max(position[-1], 1), 3), "stop": 100, "word": "backward"}]


def alive(choice: Choice, *, theme: Theme = LIGHT, width: int = WIDTH) -> alt.Chart:
    """Bytes alive at the peak by module, coloured by what they are for."""
    import altair as alt

    colors = {**ROLE_COLORS, "parameter": theme.parameter}
    return (
        alt.Chart(alt.Data(name=ALIVE, values=alive_rows(choice)))
        .mark_bar(stroke=theme.background, strokeWidth=0.7)
        .encode(
            x=alt.X("sum(mib):Q", title="bytes alive at the peak (MiB)", stack="zero"),
            y=alt.Y("module:N", title=None, sort=alt.EncodingSortField("order", op="min")),
            color=alt.Color(
                "role:N",
                title=None,
                scale=alt.Scale(domain=list(colors), range=list(colors.values())),
                legend=_legend(columns=4),
            ),
            order=alt.Order("rank:Q"),
            tooltip=[alt.Tooltip(f"{field}:N") for field in ("module", "role", "count", "bytes")],
        )
        .properties(width=width, description="Bytes alive at the peak, by module and by what they are for.")
    )


def alive_rows(choice: Choice) -> list[dict[str, Any]]:
    """Groups of bytes alive at the peak, the modules with most bytes first; small modules together."""
    groups: Sequence[Any] = (choice.figures.get("timeline") or {}).get("alive") or ()
    totals: dict[str, int] = {}
    for group in groups:
        totals[group["module"]] = totals.get(group["module"], 0) + group["bytes"]
    ordered = sorted(totals, key=lambda module: -totals[module])
    shown = {module: number for number, module in enumerate(ordered[:_MODULES_SHOWN])}
    ranks = {role: number for number, role in enumerate(ROLE_COLORS)}
    rest = f"{len(ordered) - len(shown)} more"
    return [
        {
            "module": (group["module"] or "(function)") if group["module"] in shown else rest,
            "role": group["role"],
            "count": group["count"],
            "bytes": format_bytes(group["bytes"]),
            "mib": round(group["bytes"] / _MIB, 4),
            "order": shown.get(group["module"], len(ordered)),
            "rank": ranks.get(group["role"], len(ranks)),
        }
        for group in groups
    ]


def themed(chart: alt.TopLevelMixin, theme: Theme) -> dict[str, Any]:
    """A chart's specification with the theme's colours."""
    import altair as alt

    # data stay where they are written: they have names, and nothing is larger than some hundred rows
    with alt.data_transformers.enable("default", consolidate_datasets=False, max_rows=None):
        # checking against Vega-Lite's schema takes most of the time of a page; the tests do it
        specification = chart.to_dict(validate=False)
    return {**specification, "config": config(theme)}


def config(theme: Theme) -> dict[str, Any]:
    """Vega-Lite's configuration for a theme."""
    axis = {
        "labelColor": theme.text,
        "titleColor": theme.text,
        "gridColor": theme.lines,
        "domainColor": theme.lines,
        "tickColor": theme.lines,
        "titleFontWeight": "normal",
    }
    return {
        "background": theme.background,
        "font": "system-ui, sans-serif",
        "axis": axis,
        "legend": {"labelColor": theme.text, "titleColor": theme.text},
        "text": {"color": theme.text},
        "title": {"color": theme.text},
        "view": {"stroke": theme.lines},
    }


def _legend(*, columns: int = 3) -> alt.Legend:
    import altair as alt

    return alt.Legend(orient="top", direction="horizontal", columns=columns, symbolOpacity=1)
