"""Plan files at the command line: measured, shown, and refused where they do not fit."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from rematplan._plan import Plan
from rematplan.cli.workloads import load_workload
from rematplan.naming import describe, module_fingerprints
from rematplan.policies import by_name
from rematplan.program.loss import traced_loss

SMALL = ("mlp", "blocks=3", "batch=64", "features=32")
CPU = ("--target", "cpu")


def write_plan(path: Path, policy: str, *, saved: str = "") -> Path:
    """Writes what a hand-written policy amounts to as a plan without figures; the second region saves `saved`."""
    traced = traced_loss(load_workload(SMALL[0], SMALL[1:]))
    bodies = {index: body.graph for index, body in traced.bodies.items()}
    regions, loops = describe(by_name(traced.graph, policy).configuration, traced.graph, bodies)
    if saved:
        regions = (regions[0], dataclasses.replace(regions[1], saved=(saved,)), *regions[2:])
    plan = Plan(
        regions=regions,
        loops=loops,
        fingerprint=traced.graph.fingerprint,
        modules=module_fingerprints(traced.graph),
        target="tpu-v5e",
        name="mlp",
    )
    plan.save(path)
    return path


@pytest.fixture
def plan_file(tmp_path) -> Path:
    """Per-block checkpointing of the small MLP; the second block saves its product."""
    return write_plan(tmp_path / "plan.json", "per-block", saved="layers/1/dot_general")


def test_a_plan_is_measured_applied(cli, tmp_path):
    path = write_plan(tmp_path / "plan.json", "whole")
    planned = cli("measure", *SMALL, *CPU, "--plan", str(path), "--json")
    assert planned.code == 0, planned.err
    by_hand = cli("measure", *SMALL, *CPU, "--policy", "whole", "--json")
    plain = cli("measure", *SMALL, *CPU, "--json")
    figures = [json.loads(result.out)["flops"] for result in (planned, by_hand, plain)]
    assert figures[0] == figures[1] > figures[2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "cut short"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "version 99"),
        (lambda text: text.replace("rematplan/plan", "other/plan"), "not a rematplan plan"),
        (lambda text: text.replace('"regions"', '"religions"'), "incomplete"),
    ],
)
@pytest.mark.parametrize("verb", ["measure", "show"])
def test_broken_plan_files_are_refused(cli, plan_file, verb, change, complaint):
    plan_file.write_text(change(plan_file.read_text()))
    words = ("measure", *SMALL, *CPU, "--plan", str(plan_file)) if verb == "measure" else ("show", str(plan_file))
    result = cli(*words)
    assert result.code == 4
    assert complaint in result.err
    assert "Traceback" not in result.err


def test_a_plan_for_another_function_is_refused_with_what_changed(cli, plan_file):
    result = cli("measure", "mlp", "blocks=4", "batch=64", "features=32", *CPU, "--plan", str(plan_file))
    assert result.code == 4
    assert "another function" in result.err
    assert "new: layers/3" in result.err


def test_a_plan_applies_to_another_batch(cli, plan_file):
    assert cli("measure", "mlp", "blocks=3", "batch=32", "features=32", *CPU, "--plan", str(plan_file)).code == 0


def test_a_missing_plan_file(cli):
    result = cli("measure", *SMALL, *CPU, "--plan", "absent.json")
    assert result.code == 2
    assert "absent.json" in result.err


def test_show_a_plan(cli, plan_file):
    shown = cli("show", str(plan_file))
    assert shown.code == 0, shown.err
    assert "layers/0" in shown.out
    assert "saving nothing" in shown.out
    assert json.loads(cli("show", str(plan_file), "--json").out) == json.loads(plan_file.read_text())


def test_a_plan_is_shown_once(cli, plan_file):
    assert cli("show", str(plan_file)).out.count("Regions") == 1


def test_the_code_of_a_plan_is_python_that_names_its_modules_and_values(cli, plan_file):
    code = cli("show", str(plan_file), "--code").out
    ast.parse(code)
    saved = json.loads(plan_file.read_text())["regions"][1]["saved"][0]
    assert repr(saved.removeprefix("layers/1/")) in code
    assert code.count("@nnx.remat") == 3
    assert "save_only_these_names" in code
    assert "layers/2" in code


def test_the_code_is_no_document(cli, plan_file, tmp_path):
    """Each of the two may be had; an option that would be ignored is refused, before anything is written."""
    result = cli("show", str(plan_file), "--code", "--json", "--run", str(tmp_path / "copy.json"))
    assert (result.code, result.out) == (2, "")
    assert "--code" in result.err and "--json" in result.err
    assert not (tmp_path / "copy.json").exists()
    assert json.loads(cli("show", str(plan_file), "--json").out) == json.loads(plan_file.read_text())
    copied = cli("show", str(plan_file), "--code", "--run", str(tmp_path / "copy.json"))
    assert "@nnx.remat" in copied.out
    assert copied.err == f"Wrote {tmp_path / 'copy.json'}\n"
