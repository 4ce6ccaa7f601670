"""A run as one self-contained HTML page.

Comes in: a `Run`. Goes out: the page's text: charts (Vega, inlined), tables and the model's tree. Every number on it is
text that was made here from the record; the script in the page only puts other texts in their place when a reader
chooses another configuration. Everything that came from a model goes through the template's escaping.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from rematplan.report import charts
from rematplan.report.choices import Choice, ChoiceKind, Choices, choices, row_texts
from rematplan.report.code import code_of, region_lines
from rematplan.report.figures import at_stake, figure_rows, seconds_source
from rematplan.report.outline import subject
from rematplan.report.run import Run
from rematplan.report.terminal import render_text
from rematplan.report.tree import Branch, cells, tree
from rematplan.report.verdict import verdict
from rematplan.units import format_bytes

_TEXT_COLUMNS = 120
_ENTRY = "window.vegaEmbed = vegaEmbed;"  # what the page's script calls
_BUFFERS_SHOWN = 20
NO_TIMELINE = (
    "No timeline is in the record where figures are not of a compile of the very program: they are extrapolated from "
    "programs with repeated blocks cut out, or the record was written without"
)
_UNDECIDED = {
    True: "What is kept here is not known value by value: the compiler decides, after JAX.",
    False: "What is kept here is not known value by value: the record does not say it of this configuration.",
}


def html_page(run: Run) -> str:
    """The run as one HTML page without anything outside it."""
    found = choices(run.verb, run.record)
    has_charts = found is not None
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=f"rematplan {shlex.join(run.command)}",
            command=f"rematplan {shlex.join(run.command)}",
            run=run,
            style=_file("page.css"),
            script=_file("page.js") if has_charts else "",
            library=_library() if has_charts else "",
            found=found,
            no_timeline=f"{NO_TIMELINE}.",
            **(_parts(run, found) if found is not None else _text(run)),
        )
    )


def _text(run: Run) -> dict[str, Any]:
    """A record without configurations, as the terminal shows it."""
    return {"text": render_text(run.verb, run.record, columns=_TEXT_COLUMNS), "findings": ()}  # the text has them


def _parts(run: Run, found: Choices) -> dict[str, Any]:
    root = tree(found.model, name=subject(found)) if found.model is not None else None
    follows = [_following(run, found, choice, root) for choice in found.items]
    return {
        "verdict": verdict(run.record, found),
        "rows": [row_texts(found, c) for c in found.items],
        "tree": root,
        "follows": follows,
        "first": follows[found.default],
        "data": _data(found, follows),
        "assumptions": _assumptions(run.record, found),
        "findings": _findings(run.record),
        "refused": run.record.get("refused", ()),
    }


def _data(found: Choices, follows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page's script needs: specifications of charts, and by configuration what replaces what."""
    shown = found.items[found.default]
    compared = found.items[found.compared] if found.compared is not None else None
    themes = {"light": charts.LIGHT, "dark": charts.DARK}
    drawn: dict[str, Any] = {
        "timeline": lambda theme: charts.timeline(shown, compared),
        "alive": lambda theme: charts.alive(shown, theme=theme),
    }
    if found.timed:
        drawn["frontier"] = lambda theme: charts.frontier(found)
    return {
        "charts": {
            name: {theme: charts.themed(draw(colors), colors) for theme, colors in themes.items()}
            for name, draw in drawn.items()
        },
        "points": charts.frontier_rows(found) if found.timed else [],
        "follows": follows,
        "shown": found.default,
        "compared": found.compared,
    }


def _following(run: Run, found: Choices, choice: Choice, root: Branch | None) -> dict[str, Any]:
    """Everything on the page that depends on the configuration, as text and as data of charts."""
    decided = cells(found.model, root, choice) if found.model is not None and root is not None else None
    at_peak = (choice.figures.get("timeline") or {}).get("at_peak") or ()
    return {
        "name": choice.name,
        "timeline": [[r["percent"], r["mib"]] for r in charts.timeline_rows(choice)],
        "shades": charts.timeline_shades(choice),
        "alive": charts.alive_rows(choice),
        "groups": [
            [g["module"] or "(function)", g["role"], str(g["count"]), g["bytes"]] for g in _whole_groups(choice)
        ],
        "buffers": [
            [
                format_bytes(b["bytes"]),
                b.get("role", ""),
                b["shape"],
                b["module"] or "(function)",
                b["operation"],
                b["location"],
            ]
            for b in at_peak[:_BUFFERS_SHOWN]
        ],
        "undecided": "" if decided is not None else _UNDECIDED[choice.kind is ChoiceKind.COMPILER],
        "modules": [[c.kept, c.recomputed, c.seconds] for c in decided.modules] if decided is not None else None,
        "values": list(decided.values) if decided is not None else None,
        "regions": list(region_lines(choice.plan)) if choice.plan is not None else [_by_hand(choice)],
        "code": code_of(choice.plan) if choice.plan is not None else "",
        "figures": _figures(choice),
    }


def _whole_groups(choice: Choice) -> list[dict[str, Any]]:
    groups = (choice.figures.get("timeline") or {}).get("alive") or ()
    return [{**group, "bytes": format_bytes(group["bytes"])} for group in groups]


def _by_hand(choice: Choice) -> str:
    if choice.name == "plain":
        return "no checkpointing: the model as it is"
    if choice.kind is ChoiceKind.COMPILER:
        return "the model as it is, with the compiler's own rematerialization"
    if choice.kind is ChoiceKind.MEASURED:
        return "as the command says"
    return f"hand-written: {choice.name}"


def _figures(choice: Choice) -> list[list[str]]:
    """What was measured of one configuration, and what is special about it."""
    rows = [list(row) for row in figure_rows(choice.figures)]
    return [*rows, ["note", str(choice.figures["note"]), ""]] if choice.figures.get("note") else rows


def _assumptions(record: Mapping[str, Any], found: Choices) -> list[str]:
    """What the figures rest on, one sentence each."""
    sources = (
        "predicted: said before any compile of that very program. probed: the compiler's schedule and buffers, no code "
        "generated. compiled: the compiler's full result. run: measured on the device."
    )
    said = ["Figures are of one training step on one device.", sources]
    clocks = dict.fromkeys(seconds_source(c.figures) for c in found.items if c.figures.get("seconds") is not None)
    said += [f"Time: {clock}." for clock in clocks if clock]
    bounds = [(c.plan or {}).get("bound") or {} for c in found.items]
    said += dict.fromkeys(f"The bound: {b['basis']}." for b in bounds if b.get("basis"))
    said += dict.fromkeys(f"The bound does not cover {b['not_covered']}." for b in bounds if b.get("not_covered"))
    said += [str(note) for note in record.get("notes", ())]
    said += dict.fromkeys(str(w) for c in found.items for w in c.figures.get("warnings", ()))
    if any(c.has_timeline for c in found.items):
        said.append(
            "Timelines and what is alive at the peak are live ranges of the compiler's schedule; what the compiler allots "
            "(peak_bytes, where it states it) may differ from their peak by a few percent."
        )
    if any(not c.has_timeline for c in found.items):
        said.append(f"{NO_TIMELINE}.")
    if found.model is not None:
        said.append(
            "Decisions are about values of the model: where a derivative rule keeps something of its own in a value's "
            "place (a sign, a square), the value stands for it; and the compiler may still fuse or drop what is saved."
        )
    origins = dict.fromkeys(seconds_source(c.figures) for c in found.items if c.figures.get("modules"))
    if origins:
        said.append(
            f"Recompute time by module is from {' or '.join(origins)}; a fused instruction counts for the module of what it "
            "computes last."
        )
    return said


def _findings(record: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "code": finding["code"],
            "message": finding["message"],
            "where": ", ".join(part for part in (finding.get("module"), finding.get("location")) if part),
            "stake": ", ".join(at_stake(finding)),
        }
        for finding in record.get("findings", ())
    ]


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rematplan.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["embedded"] = embedded
    return environment


def embedded(value: Any) -> Any:
    """JSON that may stand inside a script element: no character that could end it."""
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle(_ENTRY).replace("</script", "<\\/script")


def _file(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
