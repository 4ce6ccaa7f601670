"""The demo on small models: every hand-written configuration beside plans that fit, verified, and one sentence."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rematplan import demo, workloads
from rematplan._plan import Plan
from rematplan.report.schemas import schema
from rematplan.target.target import resolve
from rematplan.units import format_bytes

SCENE = demo.Scene(
    "small",
    "a small perceptron",
    lambda: workloads.mlp(blocks=4, batch=8192, features=128),
    (0.1, 0.75, 1.0),
    ("mlp", "blocks=4", "batch=8192", "features=128"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The record of a demo of one small scene on the CPU's compiler, what it said, and its folder."""
    folder, said = tmp_path_factory.mktemp("demo") / "results", []
    record = demo.run_demo(folder, progress=said.append, scenes=[SCENE], target=resolve("cpu"))
    return record.to_json(), said, folder


def test_hand_written_configurations_stand_beside_plans_that_fit(results):
    run = results[0]["runs"][0]
    jsonschema.validate(results[0], schema("demo"))
    names = [row["name"] for row in run["baselines"]]
    assert names[0] == "plain"
    assert {"whole", "per-block", "every-2", "dots"} <= set(names)
    assert 2 <= len(run["plans"]) <= 3
    for plan in run["plans"]:
        assert plan["required_bytes"] <= plan["budget"]


def test_a_budget_that_cannot_be_met_becomes_the_smallest_that_can(results):
    run = results[0]["runs"][0]
    plain = run["baselines"][0]["required_bytes"]
    smallest = run["plans"][0]
    assert 0.1 * plain < smallest["budget"] < plain
    assert smallest["required_bytes"] == min(plan["required_bytes"] for plan in run["plans"])


def test_results_are_in_the_folder(results):
    record, said, folder = results
    plans = sorted(folder.glob("*.plan.json"))
    assert len(plans) == len(record["runs"][0]["plans"])
    assert {Plan.load(path).target for path in plans} == {"cpu"}
    run = json.loads((folder / "small.run.json").read_text())
    jsonschema.validate(run, schema("run"))
    page = (folder / "small.report.html").read_text()
    smallest = record["runs"][0]["plans"][0]
    assert f"--budget {smallest['budget']} --target cpu" in page
    assert format_bytes(smallest["required_bytes"]) in page
    text = (folder / "report.txt").read_text()
    assert record["runs"][0]["sentence"].split(":")[0] in " ".join(text.split())
    assert "Verified" in text
    assert any(message.startswith("small: ") for message in said)


def test_the_demo_does_not_fill_a_folder_that_holds_something(cli, tmp_path):
    (tmp_path / "mine").touch()
    result = cli("demo", "--out", str(tmp_path))
    assert result.code == 2
    assert "not empty" in result.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]
