"""What a terminal shows: the right figures, in units people read, each with its source."""

from __future__ import annotations

import pytest

from rematplan.records import Comparison, Row, Verification
from rematplan.report.chart import columns, timeline
from rematplan.report.document import html_document
from rematplan.report.figures import fits
from rematplan.report.run import Run
from rematplan.report.summary import what_was_won
from rematplan.report.terminal import render_text
from rematplan.target.measurement import Source
from tests.report.measurements import MIB, measurement
from tests.report.test_records import INSPECTION, RECORDS


def test_measurement_shows_figures_sources_and_the_buffer_at_the_peak():
    text = render_text("measure", measurement().to_json(), columns=110)
    assert "562 MiB" in text
    assert "593 MiB" in text
    assert "cycle estimates over the chip's clock" in text
    assert "blocks/0/mlp" in text
    assert "└ backward" in text


def test_a_roofline_says_that_it_is_one():
    text = render_text("measure", measurement(sources={"seconds": "roofline"}).to_json(), columns=110)
    assert "roofline" in text
    assert "cycle estimates" not in text


def test_comparison_says_which_rows_fit_and_how_fast_they_are():
    slower = measurement(peak_mib=300, required_mib=320, seconds=0.0227 * 1.25)
    record = Comparison("tpu-v5e", (Row("plain", measurement()), Row("per-block", slower)), budget_bytes=400 * MIB)
    lines = {line.split()[0]: line for line in str(record).splitlines() if line.strip()}
    assert " no " in lines["plain"]
    assert " yes " in lines["per-block"]
    assert "+25.0%" in lines["per-block"]
    assert "320 MiB" in lines["per-block"]


def test_columns_without_figures_are_left_out():
    row = Row("plain", measurement(cycles=None))
    assert "cycles" not in str(Comparison("gpu-h100", (row,))).splitlines()[1]


def test_inspection_shows_folded_layers_largest_first():
    lines = render_text("inspect", INSPECTION.to_json(), columns=120).splitlines()
    first = next(line for line in lines if "blocks/*" in line)
    assert first.split()[:3] == ["16.0", "MiB", "2"]
    assert any("whole-region" in line for line in lines)


def test_failed_verification_says_what_differs():
    record = Verification(False, 0.5, None, True, True, False, {"float32": 1e-5}, "full", ("an operation is missing",))
    assert "FAILED" in str(record)
    assert "an operation is missing" in str(record)
    assert "not computed" in str(record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.KIND)
@pytest.mark.parametrize("width", [60, 80, 160])
def test_lines_fit_the_width(record, width):
    assert max(len(line) for line in render_text(record.KIND, record.to_json(), columns=width).splitlines()) <= width


def test_notebook_display_is_escaped():
    finding_like = Verification(False, 0.0, 0.0, True, True, False, {}, "full", ("a < b",))
    assert "a &lt; b" in finding_like._repr_html_()
    assert "a < b" not in finding_like._repr_html_()


def test_text_made_in_a_notebook_is_not_shown_by_making_it(monkeypatch):
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *args: shown.append(args))
    assert str(INSPECTION)
    assert not shown


def test_html_report_is_one_page_with_the_command_and_its_versions():
    run = Run("measure", ("measure", "gpt"), {"jax": "0.10.2"}, "tpu-v5e", measurement().to_json())
    page = html_document(run)
    assert page.startswith("<!doctype html>")
    assert "rematplan measure gpt" in page
    assert "jax 0.10.2" in page


def test_a_timeline_keeps_its_peak_in_the_right_column():
    assert columns((0, 50, 60, 100), (1, 9, 3, 2), width=10) == [1, 1, 1, 1, 1, 9, 3, 3, 3, 3]
    assert columns((), (), width=10) == []


def test_few_instructions_fill_a_wide_chart_without_gaps():
    assert columns((0, 1, 2, 3), (5, 7, 6, 4), width=9) == [5, 5, 5, 7, 7, 7, 6, 6, 6]


def test_a_peak_of_one_instruction_is_not_thinned_away():
    position = tuple(range(1000))
    live = tuple(500 if p == 777 else 10 for p in position)
    bars = columns(position, live, width=20)
    assert max(bars) == bars[777 * 20 // 999] == 500


def test_chart_is_as_high_as_the_peak_and_marks_the_backward_pass():
    lines = timeline((0, 50, 60, 100), (100, 800, 300, 100), backward_starts=50, width=40, height=4)
    assert lines[0].startswith("800 B ┤")
    assert "█" in lines[0]
    assert lines[0].count("█") < lines[3].count("█")
    assert lines[-1].index("└") == lines[0].index("┤") + 1 + 20


def test_fitting_is_the_compilers_word_where_it_was_asked():
    asked = {"required_bytes": 700, "limit_bytes": 600, "fits_limit": True}
    assert fits(asked, 600)
    assert not fits(asked, 650)
    assert not fits({"required_bytes": 700}, 600)


def test_times_of_different_sources_are_not_compared():
    probed = measurement(seconds=0.010, sources={"seconds": "roofline"}, source=Source.PROBED)
    record = Comparison(
        "tpu-v5e", (Row("plain", measurement(seconds=0.020)), Row("dots", probed), Row("whole", probed))
    )
    lines = {line.split()[0]: line for line in str(record).splitlines() if line.strip()}
    assert "+0.0%" in lines["plain"]
    assert "%" not in lines["dots"] + lines["whole"]
    rows = [row.to_json() for row in record.rows]
    sentence = what_was_won(measurement(seconds=0.019).to_json(), rows, budget_bytes=600 * MIB)
    assert "5.0% less time" in sentence
    assert "dots" not in sentence


def test_the_sentence_compares_with_plain_and_with_the_best_that_fits():
    def row(name: str, mib: int, seconds: float) -> dict:
        return {"name": name, "required_bytes": mib * MIB, "seconds": seconds}

    rows = [row("plain", 1000, 1.0), row("per-block", 500, 1.3), row("dots", 590, 1.25), row("whole", 2000, 1.1)]
    sentence = what_was_won(row("plan", 500, 1.0), rows, budget_bytes=600 * MIB)
    assert "as fast and 50% of the memory beside no checkpointing" in sentence
    assert (
        "20.0% less time and 85% of the memory beside the fastest hand-written checkpointing that fits (dots)"
        in sentence
    )
    nothing_fits = what_was_won(row("plan", 100, 1.5), rows, budget_bytes=200 * MIB)
    assert "50.0% more time" in nothing_fits
    assert "no hand-written checkpointing fits" in nothing_fits
