"""Every verb prints one JSON document that is valid under its schema, and nothing else on standard output."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rematplan.report.schemas import schema

SMALL = ("mlp", "blocks=3", "batch=64", "features=32")
CPU = ("--target", "cpu")


def document(result, verb: str) -> dict:
    """The one JSON document on standard output, checked against its schema."""
    assert result.code == 0, result.err
    parsed = json.loads(result.out)
    jsonschema.validate(parsed, schema(verb))
    return parsed


def test_measure(cli):
    plain = document(cli("measure", *SMALL, *CPU, "--json"), "measure")
    whole = document(cli("measure", *SMALL, *CPU, "--policy", "whole", "--json"), "measure")
    parameters = 3 * (32 * 32 + 32) * 4
    assert plain["argument_bytes"] == parameters + 64 * 32 * 4
    assert whole["flops"] > plain["flops"]
    assert plain["source"] == "compiled"


@pytest.mark.parametrize(("budget", "fits"), [("1GiB", True), ("10KiB", False)])
def test_a_measurement_under_a_budget_says_whether_it_fits(cli, budget, fits):
    measured = document(cli("measure", *SMALL, *CPU, "--budget", budget, "--json"), "measure")
    assert measured["fits_limit"] is fits and measured["limit_bytes"] == {"1GiB": 1 << 30, "10KiB": 10 << 10}[budget]
    shown = cli("measure", *SMALL, *CPU, "--budget", budget)
    assert shown.code == 0 and ("\nfits" if fits else "does not fit") + " under a limit of" in shown.out


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_with_no_batch_dims_saveable"])
def test_a_policy_of_jax_goes_around_the_whole_function(cli, policy):
    measured = document(cli("measure", *SMALL, *CPU, "--policy", policy, "--json"), "measure")
    plain = document(cli("measure", *SMALL, *CPU, "--json"), "measure")
    recomputes_products = policy == "nothing_saveable"
    product = 2 * 64 * 32 * 32
    assert (measured["flops"] - plain["flops"] > product) == recomputes_products


def test_compare(cli):
    compared = document(cli("compare", *SMALL, *CPU, "--budget", "1MiB", "--json"), "compare")
    rows = {row["name"]: row for row in compared["rows"]}
    assert next(iter(rows)) == "plain"
    assert {"whole", "per-block", "every-2", "all-but-last", "dots", "whole-dots"} <= set(rows)
    assert [item["name"] for item in compared["refused"]] == ["compiler"]  # XLA:CPU has no rematerialization of its own
    assert compared["budget_bytes"] == 1 << 20
    assert rows["whole"]["flops"] > rows["plain"]["flops"]


def test_targets(cli):
    names = [target["name"] for target in document(cli("targets", "--json"), "targets")["targets"]]
    assert {"tpu-v5e", "gpu-h100", "cpu", "local"} <= set(names)
    assert "tpu-v5e" in cli("targets").out


def test_what_the_users_code_prints_stays_out_of_the_document(cli, factory_file):
    path = factory_file("""
        import os, rematplan.workloads
        def make():
            print("from Python")
            os.write(1, b"from compiled code\\n")
            return rematplan.workloads.mlp(blocks=2, batch=32, features=16)
    """)
    result = cli("measure", f"{path}:make", *CPU, "--json")
    document(result, "measure")
    assert "from Python" in result.err
    assert "from compiled code" in result.err


def test_a_run_record_can_be_shown_and_reported(cli, tmp_path):
    run, page = tmp_path / "run.json", tmp_path / "report.html"
    measured = document(cli("measure", *SMALL, *CPU, "--json", "--run", str(run)), "measure")
    recorded = json.loads(run.read_text())
    jsonschema.validate(recorded, schema("run"))
    assert recorded["record"] == measured
    assert recorded["command"][:2] == ["measure", "mlp"]
    assert recorded["versions"]["jax"]
    shown = cli("show", str(run))
    assert shown.code == 0
    assert "rematplan measure mlp" in shown.out
    assert "live at the peak" in shown.out
    assert json.loads(cli("show", str(run), "--json").out) == recorded
    assert cli("report", str(run)).out == shown.out
    assert cli("report", str(run), "-o", str(page)).code == 0
    assert "live at the peak" in page.read_text()
    assert cli("report", str(run), "-o", str(page)).code == 2


def test_what_is_kept_under_a_plan_can_be_inspected(cli, tmp_path):
    plan = tmp_path / "plan.json"
    words = ("mlp", "blocks=4", "batch=8192", "features=128")
    whole = json.loads(cli("inspect", *words, "--json").out)["total_bytes"]
    assert cli("plan", *words, "--budget", "24MiB", "--target", "cpu", "-o", str(plan)).code == 0
    planned = json.loads(cli("inspect", *words, "--plan", str(plan), "--json").out)
    assert planned["configuration"].startswith("plan")
    assert planned["total_bytes"] < whole
    assert cli("inspect", *words, "--plan", str(plan), "--policy", "plain").code == 2


def test_progress_is_for_terminals_only(cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli("inspect", "mlp", "blocks=1", "features=16", "batch=8", "--json").err == ""
