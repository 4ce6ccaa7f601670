"""A record's JSON -> what a terminal shows. One function for each kind of record; `render` chooses.

Reads plain data only, so that a record from a file and one that was just made look the same.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from rematplan.report import chart, figures, fitting
from rematplan.report.choices import ChoiceKind, choices
from rematplan.report.code import region_lines
from rematplan.report.outline import outline, subject
from rematplan.report.run import Run
from rematplan.report.summary import what_was_won
from rematplan.units import format_bytes, format_seconds

_GROUPS_SHOWN = 30
_SYMBOLS = {ChoiceKind.PLAN: "●", ChoiceKind.HAND_WRITTEN: "□", ChoiceKind.COMPILER: "△", ChoiceKind.MEASURED: "◇"}
Record = Mapping[str, Any]


def render(kind: str, record: Record) -> RenderableType:
    """The rich rendering of a record of the given kind (a verb of the command line)."""
    return _RENDERERS[kind](record)


def render_text(kind: str, record: Record, *, columns: int | None = None) -> str:
    """The rendering as plain text, by default as wide as the terminal."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, record=True, force_jupyter=False)
    console.print(render(kind, record))
    return console.export_text().rstrip("\n")


def render_run(run: Run) -> RenderableType:
    """A run with its heading: what was asked and with which versions."""
    versions = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    heading = Text.assemble(("rematplan " + " ".join(run.command), "bold"), "\n", (versions, "dim"), "\n")
    return Group(heading, render(run.verb, run.record))


def stdout() -> Console:
    """Where results go. A pipe gets lines that do not depend on the size of some terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=False)


def _inspection(record: Record) -> RenderableType:
    groups = record["groups"]
    title = (
        f"Saved for the backward pass ({record['configuration']}): {format_bytes(record['total_bytes'])} in "
        f"{len(record['residuals'])} residuals, beside {format_bytes(record['argument_bytes'])} of arguments"
    )
    shown = figures.table(
        title, "bytes", "count", "shape", "module", "operation", "line", left=("shape", "module", "operation", "line")
    )
    for group in groups[:_GROUPS_SHOWN]:
        shape = f"{group['dtype']}[{','.join(map(str, group['shape']))}]"
        shown.add_row(
            format_bytes(group["bytes"]),
            str(group["count"]),
            shape,
            group["module"],
            group["operation"],
            group["location"],
        )
    rest = groups[_GROUPS_SHOWN:]
    if rest:
        shown.add_row(
            format_bytes(sum(g["bytes"] for g in rest)),
            str(sum(g["count"] for g in rest)),
            "(smaller ones)",
            "",
            "",
            "",
        )
    note = "Saved bytes are not memory: the compiler may recompute or reuse; `rematplan measure` asks it."
    return Group(shown, Text(note, style="dim"), *_findings(record["findings"]))


def _findings(findings: Sequence[Record]) -> list[RenderableType]:
    lines: list[RenderableType] = [Text()] if findings else []
    for finding in findings:
        where = ", ".join(part for part in (finding.get("module"), finding.get("location")) if part)
        stake = ", ".join(figures.at_stake(finding))
        tail = "".join(f" ({part})" for part in (where, stake) if part)
        lines.append(Text.assemble((finding["code"], "bold"), f" {finding['message']}", (tail, "dim")))
    return lines


def _comparison(record: Record) -> RenderableType:
    budget = record.get("budget_bytes")
    title = f"Hand-written configurations on {record['target']}"
    title += f", budget {format_bytes(budget)}" if budget is not None else ""
    refused = [
        Text(f"{item['name']} was not measured: {item['reason']}", style=figures.WARNING) for item in record["refused"]
    ]
    shown = figures.rows(record["rows"], title=title, budget_bytes=budget)
    return Group(shown, *refused, *_charts("compare", record), *_findings(record["findings"]))


def _charts(kind: str, record: Record) -> list[RenderableType]:
    """Time against memory, the timeline of what is shown first, and the model under it."""
    found = choices(kind, record)
    if found is None:
        return []
    parts: list[RenderableType] = []
    marks = [
        chart.Mark(c.figures["required_bytes"], c.figures["seconds"], _SYMBOLS[c.kind]) for c in reversed(found.timed)
    ]
    if marks:
        present = dict.fromkeys(c.kind for c in found.timed)
        key = ", ".join(f"{_SYMBOLS[kind]} {kind.value}" for kind in present)
        limit = ", ┊ budget" if found.budget_bytes is not None else ""
        parts += [Text(), Text.assemble(("Time against memory", "bold"), f"  {key}{limit}")]
        parts.append(figures.ScatterChart(marks, found.budget_bytes))
    shown = found.items[found.default]
    if shown.has_timeline:
        parts += [Text(), Text(f"Live bytes along the schedule of {shown.name}", style="bold")]
        parts.append(figures.TimelineChart(shown.figures["timeline"]))
    modules = outline(found, shown, name=subject(found))
    return [*parts, Text(), modules] if modules is not None else parts


def _plan(record: Record) -> RenderableType:
    parts: list[RenderableType] = [*_plan_figures(record), Text("Regions", style="bold")]
    parts += [Text(f"- {line}") for line in region_lines(record["plan"])]
    parts += [Text(f"note: {note}", style="dim") for note in record["notes"]]
    return Group(*parts, *_charts("plan", record), *_findings(record["findings"]))


def _plan_figures(record: Record) -> list[RenderableType]:
    """Figures of a plan beside hand-written configurations; nothing for a plan that was never measured."""
    if not record["measured"] or record["budget_bytes"] is None:
        return []
    measured = {**record["measured"], "name": "plan"}
    budget = record["budget_bytes"]
    title = f"Plan for {measured['target']} within {format_bytes(budget)}"
    rows = figures.rows([*record["baselines"], measured], title=title, budget_bytes=budget, highlight="plan")
    predicted = record["predicted"]
    parts: list[RenderableType] = [rows, Text()]
    if predicted.get("peak_bytes") is not None:
        peak = measured["peak_bytes"]
        parts.append(
            Text(
                f"Predicted before it was compiled: peak {format_bytes(predicted['peak_bytes'])} "
                f"({predicted['peak_bytes'] / peak - 1:+.1%} of {measured['source']}), "
                f"time {figures.time_or_dash(predicted.get('seconds'))}."
            )
        )
    bound = record["bound"]
    if bound.get("seconds") is not None:
        gap = f", the plan is {bound['gap']:.1%} above it" if bound.get("gap") is not None else ""
        basis = f": {bound['basis']}" if bound.get("basis") else ""
        parts.append(Text(f"Bound: {format_seconds(bound['seconds'])}{gap}{basis}."))
    parts.append(Text(what_was_won(measured, record["baselines"], budget_bytes=budget), style="bold"))
    return [*parts, Text()]


def _frontier(record: Record) -> RenderableType:
    points = [{"name": format_bytes(point["budget"]), **point} for point in record["points"]]
    title = f"Plans for {record['target']}, smallest budget first"
    shown = figures.rows(points, title=title)
    if not record["baselines"]:
        return Group(shown, *_charts("frontier", record))
    by_hand = figures.rows(record["baselines"], title="Hand-written configurations")
    return Group(shown, Text(), by_hand, *_charts("frontier", record))


def _verification(record: Record) -> RenderableType:
    shown = figures.table("Verification", "check", "result", left=("check", "result"))
    yes = {True: "yes", False: "NO"}
    shown.add_row("same program without its remat and names", yes[record["structure_equal"]])
    tolerances = ", ".join(f"{dtype} {bound:g}" for dtype, bound in record["tolerances"].items())
    for label, key in (("largest error of outputs", "outputs_max_error"), ("of gradients", "gradients_max_error")):
        error = record[key]
        shown.add_row(label, "not computed" if error is None else f"{error:.2g} (allowed: {tolerances})")
    shown.add_row("same module state afterwards", yes[record["state_equal"]])
    shown.add_row("saved and recomputed as planned", yes[record["saved_as_planned"]])
    shown.add_row("size of the numerical check", record["size"])
    differences = [Text(f"- {difference}", style="red") for difference in record["differences"]]
    verdict = Text("passed", style="bold green") if record["passed"] else Text("FAILED", style="bold red")
    return Group(shown, *differences, verdict, *_findings(record["findings"]))


def _targets(record: Record) -> RenderableType:
    columns = ("name", "chip", "memory", "compiler sees", "compiler", "data sheet")
    shown = figures.table("Targets", *columns, left=("name", "chip", "compiler", "data sheet"))
    for target in record["targets"]:
        shown.add_row(
            target["name"],
            target["title"],
            figures.bytes_or_dash(target["memory_bytes"]),
            figures.bytes_or_dash(target["compiler_memory_bytes"]),
            "installed" if target["installed"] else target["install"],
            target["source"],
        )
    return shown


def _demo(record: Record) -> RenderableType:
    parts: list[RenderableType] = []
    for run in record["runs"]:
        rows = [*run["baselines"], *run["plans"]]
        parts += [figures.rows(rows, title=f"{run['workload']} on {run['target']}: {run['description']}")]
        parts += [Text(run["verified"]), Text(run["sentence"], style="bold"), Text()]
    return Group(*parts)


_RENDERERS: dict[str, Callable[[Record], RenderableType]] = {
    "compare": _comparison,
    "demo": _demo,
    "fit": fitting.fitted,
    "frontier": _frontier,
    "inspect": _inspection,
    "measure": figures.measurement,
    "plan": _plan,
    "targets": _targets,
    "verify": _verification,
}
