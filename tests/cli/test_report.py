"""`rematplan report`: pages and pictures, all or none, never over what exists."""

from __future__ import annotations

import json

import pytest

from rematplan.report.run import to_text
from tests.report import runs


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "plan.run.json"
    path.write_text(to_text(runs.plan().to_json()), encoding="utf-8")
    return path


def test_page_and_pictures_in_one_call(cli, tmp_path, run_file):
    page, png, svg = tmp_path / "p.html", tmp_path / "p.png", tmp_path / "p.svg"
    result = cli("report", str(run_file), "-o", str(page), "--png", str(png), "--svg", str(svg))
    assert result.code == 0
    assert result.out == ""
    assert [line.split()[0] for line in result.err.splitlines()] == ["Wrote"] * 3
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text(encoding="utf-8").startswith("<svg")


def test_nothing_is_written_if_one_of_the_files_exists(cli, tmp_path, run_file):
    page, png = tmp_path / "p.html", tmp_path / "p.png"
    png.write_text("mine")
    result = cli("report", str(run_file), "-o", str(page), "--png", str(png))
    assert result.code == 2
    assert "was left as it is" in result.err
    assert png.read_text() == "mine"
    assert not page.exists()
    assert cli("report", str(run_file), "-o", str(page), "--png", str(png), "--force").code == 0


def test_two_results_of_one_name_are_refused(cli, tmp_path, run_file):
    result = cli("report", str(run_file), "-o", str(tmp_path / "x.svg"), "--svg", str(tmp_path / "x.svg"))
    assert result.code == 2
    assert "give each a name of its own" in result.err


def test_a_picture_of_what_has_no_charts_is_refused(cli, tmp_path):
    run = tmp_path / "targets.run.json"
    run.write_text(to_text(runs.run("targets", {"targets": []}).to_json()))
    result = cli("report", str(run), "-o", str(tmp_path / "t.txt"), "--png", str(tmp_path / "t.png"))
    assert result.code == 2
    assert "neither a frontier nor a timeline" in result.err
    assert not list(tmp_path.glob("t.*"))


def test_a_comparison_beside_a_plan(cli, tmp_path, run_file):
    beside = tmp_path / "compare.run.json"
    beside.write_text(to_text(runs.comparison().to_json()), encoding="utf-8")
    document = json.loads(cli("report", str(run_file), str(beside), "--json").out)
    names = [row["name"] for row in document["record"]["baselines"]]
    assert "compiler" in names
    assert len(names) == len(set(names)) == len(runs.comparison().record["rows"])
    result = cli("report", str(beside), str(run_file))
    assert result.code == 2
    assert "give the run of a plan or a frontier first" in " ".join(result.err.split())


@pytest.mark.parametrize("output", [(), ("-o", "page.html"), ("--json",)])
def test_the_run_that_is_shown_can_be_written(cli, tmp_path, run_file, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    beside, merged = tmp_path / "compare.run.json", tmp_path / "merged.run.json"
    beside.write_text(to_text(runs.comparison().to_json()), encoding="utf-8")
    words = ("report", str(run_file), str(beside), *output, "--run", str(merged))
    result = cli(*words)
    assert result.code == 0
    assert f"Wrote {merged}" in result.err
    assert bool(result.out) == (output != ("-o", "page.html"))
    assert json.loads(merged.read_text()) == json.loads(cli("report", str(run_file), str(beside), "--json").out)
    assert cli("show", str(merged)).code == 0
    (tmp_path / "page.html").unlink(missing_ok=True)
    refused = cli(*words)
    assert refused.code == 2 and "was left as it is" in refused.err
    assert not (tmp_path / "page.html").exists()
    again = cli("report", str(run_file), "-o", str(merged), "--run", str(merged), "--force")
    assert again.code == 2 and "give each a name of its own" in again.err


@pytest.mark.parametrize("damage", [lambda r: r["record"].pop("measured"), lambda r: r["record"]["plan"].clear()])
def test_a_run_that_was_edited_by_hand_is_refused_or_shown(cli, tmp_path, run_file, damage):
    document = json.loads(run_file.read_text())
    damage(document)
    run_file.write_text(json.dumps(document))
    result = cli("report", str(run_file), "-o", str(tmp_path / "p.html"))
    assert result.code in (0, 2)
    assert (tmp_path / "p.html").exists() == (result.code == 0)
