"""The charts of a record as pictures: SVG and PNG, without a browser.

Comes in: `Choices`. Goes out: the text of an SVG, or the bytes of a PNG. vl-convert draws what the page's Vega draws.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rematplan.report import charts
from rematplan.report.charts import Theme
from rematplan.report.choices import Choices

if TYPE_CHECKING:
    import altair as alt

_PNG_SCALE = 2.0


def frontier_and_timeline(found: Choices) -> alt.TopLevelMixin | None:
    """Both charts, one under the other; one alone where the record has no other, None where it has neither."""
    import altair as alt

    above, below = frontier(found), timeline(found)
    if above is None or below is None:
        return above if below is None else below
    return alt.vconcat(above, below)


def frontier(found: Choices) -> alt.LayerChart | None:
    """The frontier, None where there are not two configurations with times."""
    return charts.frontier(found) if found.timed else None


def timeline(found: Choices) -> alt.LayerChart | None:
    """The timeline of what is shown first over that of what it is compared with, None where the schedule is not known."""
    shown = found.items[found.default]
    compared = found.items[found.compared] if found.compared is not None else None
    return charts.timeline(shown, compared, legend=True) if shown.has_timeline else None


def svg(chart: alt.TopLevelMixin, *, theme: Theme = charts.LIGHT) -> str:
    """The chart as SVG."""
    import vl_convert

    return vl_convert.vegalite_to_svg(json.dumps(charts.themed(chart, theme)))


def png(chart: alt.TopLevelMixin, *, theme: Theme = charts.LIGHT) -> bytes:
    """The chart as PNG, two pixels for each of the SVG's."""
    import vl_convert

    return vl_convert.vegalite_to_png(json.dumps(charts.themed(chart, theme)), scale=_PNG_SCALE)
