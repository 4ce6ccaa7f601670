"""A record as a notebook shows it: the page's verdict, table and charts, as one fragment without scripts.

Comes in: the kind and the JSON of a record. Goes out: HTML. Charts are SVG in the page's text colour, so that they are
readable on light and dark backgrounds, offline, and where a notebook is only looked at.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rematplan.report import charts, pictures
from rematplan.report.charts import Theme
from rematplan.report.choices import Choices, choices, row_texts
from rematplan.report.terminal import render_text
from rematplan.report.verdict import verdict

_COLUMNS = 110
_INHERITED = Theme(text="currentColor", lines="#88888855", background="transparent", parameter="currentColor")


def html_fragment(kind: str, record: Mapping[str, Any]) -> str:
    """The rendering of a record of the given kind."""
    found = choices(kind, record)
    if found is None:
        text = html.escape(render_text(kind, record, columns=_COLUMNS))
        return f'<pre style="line-height:1.2;white-space:pre">{text}</pre>'
    said = verdict(record, found)
    parts = [f"<p><b>{html.escape(said.sentence)}</b></p>"]
    parts.append(_table(("", "", "source"), [(line.question, line.answer, line.source) for line in said.lines]))
    drawn = [pictures.frontier(found), pictures.timeline(found)]
    parts += [pictures.svg(chart, theme=_INHERITED) for chart in drawn if chart is not None]
    parts.append(_rows(found))
    shown = found.items[found.default]
    if (shown.figures.get("timeline") or {}).get("alive"):
        parts.append(pictures.svg(charts.alive(shown, theme=_INHERITED), theme=_INHERITED))
    details = html.escape(render_text(kind, record, columns=_COLUMNS))
    parts.append(f'<details><summary>as text</summary><pre style="white-space:pre">{details}</pre></details>')
    return f"<div>{''.join(parts)}</div>"


def _rows(found: Choices) -> str:
    fitting = ("fits",) if found.budget_bytes is not None else ()
    rows = [row_texts(found, choice) for choice in found.items]
    keys = ("name", "needs", "peak", *fitting, "time", "source")
    return _table(("configuration", *keys[1:]), [[row[key] for key in keys] for row in rows])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cell = lambda tag, text: f'<{tag} style="text-align:left;padding:0 .6em">{html.escape(text)}</{tag}>'
    head = "".join(cell("th", column) for column in columns)
    body = "".join(f"<tr>{''.join(cell('td', text) for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
