"""The verbs around plans on a small model and the CPU's compiler: plan, verify, inspect, frontier."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from rematplan.report.schemas import schema

MODEL = ("mlp", "blocks=4", "batch=4096", "features=64")
CPU = ("--target", "cpu")
BUDGET = "6MiB"


@pytest.fixture
def planned(cli, tmp_path):
    """The record of the verb `plan` and its plan file."""
    path = tmp_path / "plan.json"
    result = cli("plan", *MODEL, *CPU, "--budget", BUDGET, "-o", str(path), "--json")
    assert result.code == 0, result.err
    return json.loads(result.out), path


def test_plan(planned):
    record, path = planned
    jsonschema.validate(record, schema("plan"))
    written = json.loads(path.read_text())
    jsonschema.validate(written, schema("plan-file") | {"$defs": schema("plan")["$defs"]})
    assert written == record["plan"]
    assert record["measured"]["required_bytes"] <= 6 << 20
    plain = next(row for row in record["baselines"] if row["name"] == "plain")
    assert plain["required_bytes"] > 6 << 20  # else there was nothing to plan
    assert record["measured"]["flops"] > plain["flops"]
    assert record["measured"]["timeline"]["position"]


def test_plans_stay_readable_files(planned):
    assert "timeline" not in planned[1].read_text()


def test_show_a_plan_with_its_figures(cli, planned):
    shown = cli("show", str(planned[1]))
    assert shown.code == 0, shown.err
    assert "Plan for cpu within 6.00 MiB" in shown.out
    assert "The plan needs" in shown.out
    assert "Regions" in shown.out


def test_verify(cli, planned):
    result = cli("verify", *MODEL, "--plan", str(planned[1]), "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    jsonschema.validate(record, schema("verify"))
    assert record["passed"]
    assert record["structure_equal"]
    assert record["saved_as_planned"]
    assert record["gradients_max_error"] <= max(record["tolerances"].values())


def test_verify_refuses_a_plan_for_another_function(cli, planned):
    result = cli("verify", "mlp", "blocks=5", "batch=4096", "features=64", "--plan", str(planned[1]))
    assert result.code == 4
    assert result.out == ""


def test_a_failed_verification_prints_its_record_and_ends_with_five(cli, planned, monkeypatch):
    """Numbers are made to differ behind the verb's back, by a referee that allows no error at all and sees one."""
    from rematplan import agreement

    honest = agreement.compare

    def strict(*args, **keywords):
        return honest(*args, **{**keywords, "tolerance": -1.0})

    monkeypatch.setattr(agreement, "compare", strict)
    result = cli("verify", *MODEL, "--plan", str(planned[1]), "--json")
    assert result.code == 5
    assert json.loads(result.out)["passed"] is False
    assert "does not compute the same" in result.err


def test_a_budget_below_the_minimum_names_one_that_suffices(cli):
    refused = cli("plan", *MODEL, *CPU, "--budget", "1MiB")
    assert refused.code == 3
    assert "arguments" in refused.err
    assert "Traceback" not in refused.err
    least = re.search(r"needs (\d+ [KMG]iB)", refused.err)
    assert least is not None, refused.err
    assert cli("plan", *MODEL, *CPU, "--budget", least[1]).code == 0


def test_an_existing_plan_file_is_kept_and_noticed_before_the_work(cli, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("mine")
    result = cli("plan", "absent:make", *CPU, "--budget", BUDGET, "-o", str(path))
    assert result.code == 2
    assert "--force" in result.err
    assert path.read_text() == "mine"


def test_result_and_run_record_need_two_names(cli, tmp_path):
    path = str(tmp_path / "one.json")
    result = cli("plan", *MODEL, *CPU, "--budget", BUDGET, "-o", path, "--run", path)
    assert result.code == 2
    assert "two names" in result.err


def test_inspect(cli):
    plain = cli("inspect", *MODEL, "--json")
    assert plain.code == 0, plain.err
    record = json.loads(plain.out)
    jsonschema.validate(record, schema("inspect"))
    assert record["total_bytes"] == sum(r["bytes"] for r in record["residuals"]) > 4 * 4096 * 64 * 4
    whole = json.loads(cli("inspect", *MODEL, "--policy", "whole", "--json").out)
    assert whole["total_bytes"] < record["total_bytes"]
    assert all(r["location"] for r in record["residuals"])


def test_frontier(cli):
    result = cli("frontier", *MODEL, *CPU, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    jsonschema.validate(record, schema("frontier"))
    budgets = [point["budget"] for point in record["points"]]
    seconds = [point["seconds"] for point in record["points"]]
    assert budgets == sorted(budgets)
    assert seconds == sorted(seconds, reverse=True)
    assert all(point["required_bytes"] <= point["budget"] for point in record["points"])
