"""The HTML report as text: one file, nothing outside it, the record's numbers, and nothing of a model's that could run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape

import altair as alt
import jsonschema
import pytest

from rematplan.errors import InputError
from rematplan.report import charts
from rematplan.report.choices import ChoiceKind, choices
from rematplan.report.document import html_document, picture
from rematplan.report.figures import fits
from rematplan.report.notebook import html_fragment
from rematplan.report.page import embedded
from rematplan.report.run import with_comparison
from rematplan.report.terminal import render_text
from rematplan.report.tree import cells, tree
from rematplan.report.verdict import verdict
from rematplan.units import format_bytes, format_seconds
from tests.report import runs

KINDS = {"plan": runs.plan, "compare": runs.comparison, "frontier": runs.frontier}
LIMIT = 2_000_000  # bytes of a page


def visible(page: str) -> str:
    """The text that a reader sees before any script runs."""
    body = page[page.index("<body>") :]
    body = re.sub(r"<script.*?</script>", " ", body, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


@pytest.mark.parametrize("kind", KINDS)
def test_page_notebook_and_terminal_show_the_records_numbers(kind):
    run = KINDS[kind]()
    page, fragment = visible(html_document(run)), unescape(html_fragment(kind, run.record))
    terminal = render_text(kind, run.record, columns=200)
    found = choices(kind, run.record)
    assert found is not None
    for choice in found.items:
        needs, time = format_bytes(choice.figures["required_bytes"]), format_seconds(choice.figures["seconds"])
        for text in (page, fragment, terminal):
            assert needs in text
            assert time in text
    said = verdict(run.record, found)
    for text in (page, fragment):
        assert said.sentence in text
        assert all(line.answer in text and line.source in text for line in said.lines)


@pytest.mark.parametrize("kind", KINDS)
def test_page_needs_nothing_from_outside(kind):
    page = html_document(KINDS[kind]())
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", outside)
    assert "@import" not in outside
    assert "url(" not in outside
    assert len(page.encode()) < LIMIT


def test_plan_says_what_was_asked_in_order():
    run = runs.plan()
    page = visible(html_document(run))
    order = ["fits on tpu-v5e", "Does it fit?", "Time against memory", "Chosen: plan", "Alive at the peak"]
    order += ["The model under plan", "By hand it would be", "Findings", "Reproduce"]
    places = [page.index(word) for word in order]
    assert places == sorted(places)
    assert "rematplan plan gpt blocks=2" in page[places[-1] :]
    assert "proved by the search's prices" in page
    assert "the plan is 1.1% above it" in page
    assert "5.00 MiB at stake" in page
    assert "jax 0.10.2" in page


def test_every_configuration_can_be_chosen_and_its_texts_are_there():
    run = runs.frontier(points=3)
    page = html_document(run)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    found = choices("frontier", run.record)
    assert [f["name"] for f in data["follows"]] == [c.name for c in found.items]
    assert page.count('<input type="radio" name="shown"') == len(found.items)
    for follow, choice in zip(data["follows"], found.items, strict=True):
        needs = format_bytes(choice.figures["required_bytes"])
        assert needs in [value for _, value, _ in follow["figures"]]
        assert len(follow["timeline"]) == runs.POINTS
        assert (follow["modules"] is None) == (choice.name == "compiler")
        assert bool(follow["code"]) == (choice.plan is not None)
    peaks = [max(mib for _, mib in f["timeline"]) for f in data["follows"]]
    assert peaks == pytest.approx([c.figures["peak_bytes"] / 2**20 for c in found.items], rel=0.01)


def test_what_a_model_is_called_stays_text():
    page = html_document(runs.hostile())
    assert runs.HOSTILE not in page
    assert "<script>alert" not in page
    assert runs.HOSTILE in visible(page)
    # the document's own scripts are the only ones, and none ends early
    assert len(re.findall(r"<script\b", page)) == 3
    assert page.count("</script>") == 3
    fragment = html_fragment("plan", runs.hostile().record)
    assert "<script" not in fragment
    assert runs.HOSTILE in unescape(fragment)
    for text in (re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL), fragment):
        assert "<img" not in text
        assert runs.QUOTED in unescape(text)


def test_embedded_data_cannot_end_its_script():
    text = str(embedded({"a": "</script><!--", "b": "\u2028&"}))
    assert "<" not in text
    assert ">" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": "\u2028&"}


@pytest.mark.parametrize(("verb", "record"), [("targets", {"targets": []})])
def test_records_without_configurations_are_shown_as_text(verb, record):
    page = html_document(runs.run(verb, record))
    assert "Targets" in visible(page)
    assert 'id="data"' not in page


def test_pictures_are_of_the_frontier_and_the_timeline():
    run = runs.plan()
    svg = picture(run, "svg").decode()
    assert svg.startswith("<svg")
    for word in ("budget 700 MiB", "backward", "plan (solid), plain (dashed)", "time of one step (ms)"):
        assert word in svg
    png = picture(run, "png")
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_a_page_of_a_deep_model_is_small():
    """Figures of twenty configurations, timelines of full length, 48 blocks folded into one."""
    page = html_document(runs.frontier(48, points=9))
    assert len(page.encode()) < LIMIT
    assert "\u00d748" in page


def test_a_comparison_stands_beside_a_plan_in_place_of_estimated_rows():
    plan, compared = runs.plan(), runs.comparison()
    both = with_comparison(plan, compared)
    found = choices("plan", both.record)
    assert [c.name for c in found.items] == ["plan", *(row["name"] for row in compared.record["rows"])]
    assert any(c.kind is ChoiceKind.COMPILER for c in found.items)
    assert all(c.has_timeline for c in found.items)
    assert "the compiler's own" in visible(html_document(both))
    assert [row["name"] for row in plan.record["baselines"]] == ["plain", "dots"]  # the run itself is left as it was


def test_only_a_comparison_of_the_same_workload_stands_beside():
    plan, compared = runs.plan(), runs.comparison()
    with pytest.raises(InputError, match="give the run of a plan or a frontier"):
        with_comparison(compared, plan)
    with pytest.raises(InputError, match="other models or sizes"):
        with_comparison(plan, runs.comparison(3))
    with pytest.raises(InputError, match="gpu-h100"):
        with_comparison(plan, replace(compared, target="gpu-h100"))
    with pytest.raises(InputError, match="other versions"):
        with_comparison(plan, replace(compared, versions={"jax": "0.12.0"}))
    with pytest.raises(InputError, match="does not say what its model is"):
        with_comparison(plan, replace(compared, record={**compared.record, "model": None}))


def test_a_comparison_of_another_batch_is_of_another_model():
    compared = runs.comparison()
    model = compared.record["model"]
    values = [{**v, "shape": [4, *v["shape"][1:]]} if v["shape"][:1] == [2] else v for v in model["values"]]
    other = replace(compared, record={**compared.record, "model": {**model, "values": values}})
    with pytest.raises(InputError, match="differs"):
        with_comparison(runs.plan(), other)


def test_decisions_of_both_runs_are_there():
    plan, compared = runs.plan(), runs.comparison()
    model = with_comparison(plan, compared).record["model"]
    assert set(model["decisions"]) == {"plan", *compared.record["model"]["decisions"]}
    assert {len(decided) for decided in model["decisions"].values()} == {len(model["values"])}
    kept = {
        v["module"] + "/" + v["name"]
        for v, d in zip(model["values"], model["decisions"]["dots"], strict=True)
        if d["saved"]
    }
    alone = compared.record["model"]
    before = {
        v["module"] + "/" + v["name"]
        for v, d in zip(alone["values"], alone["decisions"]["dots"], strict=True)
        if d["saved"]
    }
    assert kept == before != set()


def test_the_compilers_own_rematerialization_is_nobodys_handwriting():
    both = with_comparison(runs.plan(), runs.comparison(budget_mib=900))
    rows = [{**row, "seconds": 0.001} if row["name"] == "compiler" else row for row in both.record["baselines"]]
    found = choices("plan", {**both.record, "baselines": rows})
    said = verdict(both.record, found)
    assert "(compiler)" not in said.sentence
    assert not any("compiler:" in line.answer for line in said.lines)


def test_without_times_what_fits_is_shown_and_else_the_smallest():
    run = runs.comparison()
    untimed = [{**row, "seconds": None} for row in run.record["rows"]]
    found = choices("compare", {**run.record, "rows": untimed})
    assert fits(found.items[found.default].figures, run.record["budget_bytes"])
    assert not found.timed
    assert "Nothing fits" not in verdict(run.record, found).sentence
    tight = choices("compare", {**run.record, "budget_bytes": 1 << 20})
    smallest = min(run.record["rows"], key=lambda row: row["required_bytes"])
    assert tight.items[tight.default].name == smallest["name"]
    assert "Nothing fits 1.00 MiB" in verdict(run.record, tight).sentence
    assert "Nothing fits" in html_document(replace(run, record={**run.record, "budget_bytes": 1 << 20}))


REFUSED = {"limit_bytes": None, "fits_limit": False, "required_bytes": 40 << 30, "source": "probed"}
ROOFLINE = {"sources": {"seconds": "roofline"}}


@pytest.mark.parametrize(
    ("changes", "best", "said"),
    [
        # refused by the chip's compiler, and faster by another clock
        ({"plain": {**REFUSED, **ROOFLINE, "seconds": 0.5}}, "dots", "that fits tpu-v5e is dots"),
        # the same by the compiler's own clock, and where a compiler refuses nothing and the chip has no such memory
        ({"plain": {**REFUSED, "seconds": 0.5}}, "dots", "that fits tpu-v5e is dots"),
        ({"plain": {"required_bytes": 40 << 30, "seconds": 0.5}}, "dots", "that fits tpu-v5e is dots"),
        # it fits, but its time comes from elsewhere: all other times are of one clock
        ({"plain": {**ROOFLINE, "seconds": 0.5}}, "dots", "is dots"),
        ({"plain": {"seconds": 0.5}}, "plain", "The fastest configuration is plain"),
        ({"plain": REFUSED, "dots": REFUSED, "whole": REFUSED}, "", "Nothing fits tpu-v5e: "),
        (
            {"plain": {"seconds": None}, "dots": {"seconds": None}, "whole": {"seconds": None}},
            "",
            "The smallest config",
        ),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_without_a_budget_the_fastest_is_one_that_the_chip_can_run_and_of_one_clock(changes, best, said, reverse):
    record = dict(runs.comparison().record)
    made = {"plain": 1.5, "dots": 0.9, "whole": 1.2}
    rows = [{**row, "seconds": made[row["name"]]} for row in record["rows"] if row["name"] in made]
    rows = [{**row, **changes.get(row["name"], {})} for row in (reversed(rows) if reverse else rows)]
    found = choices("compare", {**record, "rows": rows, "budget_bytes": None})
    shown = found.items[found.default]
    assert shown.name == best or not best
    answers = verdict({**record, "rows": rows}, found)
    assert said in answers.sentence
    by_hand = found.best_by_hand()
    assert by_hand is None or fits(by_hand.figures, 15 << 30)
    assert ("not compared with times" in answers.sentence) == ("seconds" in changes["plain"] and said == "is dots")


def test_what_the_compiler_refused_fits_no_smaller_budget_either():
    refused = {"required_bytes": 600, "fits_limit": False}
    assert not fits({**refused, "limit_bytes": None}, 700)
    assert not fits({**refused, "limit_bytes": 800}, 700)
    assert fits({**refused, "limit_bytes": 500}, 700)
    assert not fits({**refused, "limit_bytes": None}, None)
    assert fits({"required_bytes": 600}, None)


def test_a_measurement_that_the_chip_refused_says_so():
    refused = {**runs.figures(3).to_json(), **REFUSED}
    for limit, name in ((None, "tpu-v5e"), (1 << 30, "1.00 GiB")):
        record = {**refused, "limit_bytes": limit}
        assert verdict(record, choices("measure", record)).sentence.endswith(f"does not fit {name}.")


def test_what_was_measured_under_a_plan_is_not_called_hand_written():
    run = runs.run("measure", runs.figures(3).to_json())
    page = visible(html_document(run))
    assert "hand-written" not in page
    assert format_bytes(run.record["required_bytes"]) in page


@pytest.mark.parametrize("kind", KINDS)
def test_charts_are_valid_vega_lite(kind):
    found = choices(kind, KINDS[kind]().record)
    shown = found.items[found.default]
    drawn = [charts.frontier(found), charts.timeline(shown, found.items[-1], legend=True), charts.alive(shown)]
    for chart in drawn:
        themed = charts.themed(chart, charts.DARK)
        assert chart.to_dict(validate=True)["$schema"] == themed["$schema"]
        jsonschema.validate(themed, alt.load_schema())  # the configuration too


def test_a_module_sums_up_what_is_inside_and_what_the_model_does_not_know():
    run = runs.plan()
    model = run.record["model"]
    found = choices("plan", run.record)
    plan = found.items[0]
    root = tree(model, name="gpt")
    decided = cells(model, root, plan)
    kept = sum(v["bytes"] * d["saved"] for v, d in zip(model["values"], model["decisions"]["plan"], strict=True))
    assert decided.modules[0].kept == format_bytes(kept)
    names = [branch.name for branch in root.walk()]
    inside = decided.modules[names.index("blocks")]
    assert inside.kept == decided.modules[names.index("*")].kept  # nothing else is in the list
    assert decided.modules[0].seconds == format_seconds(0.006001)
    far = {**plan.figures, "modules": [{"module": "blocks/*/attn/x/y", "step_pass": "recompute", "seconds": 0.25}]}
    moved = cells(model, root, replace(plan, figures=far))
    assert [c.seconds for c in moved.modules if c.seconds != "-"] == ["250 ms"] * 4  # function, blocks, *, attn
    offloaded = {**model, "decisions": {"plan": [{**d, "offloaded": 1} for d in model["decisions"]["plan"]]}}
    assert "on the host" in cells(offloaded, root, plan).modules[0].kept
