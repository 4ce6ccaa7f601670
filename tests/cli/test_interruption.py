"""What is said of an interruption is true: which files there are, and that they are whole."""

from __future__ import annotations

import json

import pytest

import rematplan as rp
from rematplan import demo
from rematplan.cli import common
from rematplan.records import Demo, DemoRun
from rematplan.report import files

CPU = ("--target", "cpu")
SMALL = ("mlp", "blocks=2", "batch=64", "features=32")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_before_anything_was_written(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(rp, "measure", interrupt)
    result = cli("measure", *SMALL, *CPU, "--run", str(tmp_path / "run.json"))
    assert (result.code, result.out) == (130, "")
    assert result.err == "error: interrupted; nothing was written.\n"
    assert list(tmp_path.iterdir()) == []


def test_between_two_files(cli, tmp_path, monkeypatch):
    plan, run = tmp_path / "plan.json", tmp_path / "run.json"
    monkeypatch.setattr(common, "versions", interrupt)  # of the run record, after the plan
    result = cli("plan", *SMALL, *CPU, "--budget", "10MiB", "-o", str(plan), "--run", str(run))
    assert result.code == 130
    assert f"interrupted; {plan} had been written, and is whole." in result.err
    assert json.loads(plan.read_text())["format"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("scenes", [0, 1, 2])
def test_a_demo_writes_as_it_goes(cli, tmp_path, monkeypatch, scenes):
    done: list[str] = []

    def scene(scene: demo.Scene, *_: object) -> DemoRun:
        if len(done) == scenes:
            raise KeyboardInterrupt
        done.append(scene.name)
        return DemoRun(scene.name, "cpu", "", (), (), "", "")

    monkeypatch.setattr(demo, "_run_scene", scene)
    out = tmp_path / "demo"
    result = cli("demo", "--out", str(out))
    assert result.code == 130
    there = sorted(entry.name for entry in out.iterdir())
    assert there == sorted(f"{name}.run.json" for name in done)
    said = {0: "nothing was written", 1: f"{out / 'mlp.run.json'} had been written", 2: "2 files had been written"}
    assert f"interrupted; {said[scenes]}" in result.err
    assert all(json.loads((out / name).read_text())["record"].keys() == Demo(()).to_json().keys() for name in there)


def test_what_one_command_wrote_is_not_the_next_ones(cli, tmp_path, monkeypatch):
    assert cli("targets", "--run", str(tmp_path / "run.json")).code == 0
    assert files._NOTED.get() is None
    monkeypatch.setattr(rp, "measure", interrupt)
    assert "nothing was written" in cli("measure", *SMALL, *CPU).err
