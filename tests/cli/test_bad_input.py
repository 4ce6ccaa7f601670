"""Bad input: one clear paragraph, the right exit code, nothing lost. All of it meets the real product, no fakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import jax
import pytest

from rematplan.target import target as targets

SMALL = ("mlp", "blocks=2", "batch=32", "features=16")
CPU = ("--target", "cpu")


def is_one_paragraph(text: str) -> bool:
    """Whether an error is a single paragraph without a traceback."""
    return text.startswith("error: ") and "Traceback" not in text and "\n\n" not in text.strip()


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        ("lambda w, x: x @ w", "must return a scalar loss"),
        ("lambda w, x: (x @ w).sum().astype(int)", "scalar loss of a floating dtype"),
        ("lambda w, x: 'text'", "must return a scalar loss"),
    ],
)
def test_a_loss_that_cannot_be_differentiated(cli, factory_file, loss, complaint):
    path = factory_file(f"""
        import jax, rematplan as rp
        def make():
            spec = jax.ShapeDtypeStruct((4, 4), "float32")
            return rp.Workload({loss}, spec, spec)
    """)
    result = cli("measure", f"{path}:make", *CPU)
    assert result.code == 2
    assert complaint in result.err
    assert is_one_paragraph(result.err)


def test_a_function_of_integers_has_nothing_to_differentiate(cli, factory_file):
    path = factory_file("""
        import jax, rematplan as rp
        def make():
            return rp.Workload(lambda n: (n * 1.5).sum(), jax.ShapeDtypeStruct((4,), "int32"))
    """)
    result = cli("measure", f"{path}:make", *CPU)
    assert result.code == 2
    assert "nothing to differentiate" in result.err


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("tpu-v5q", "tpu-v5e"), ("h100", "gpu-h100"), ("tpu-v5e:4y4", "topology"), ("", "unknown target")],
)
def test_unknown_chips_are_answered_with_the_nearest_names(cli, name, complaint):
    result = cli("measure", *SMALL, "--target", name)
    assert result.code == 2
    assert complaint in result.err
    assert is_one_paragraph(result.err)


def test_a_missing_compiler_is_answered_with_how_to_install_it(cli, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda _name: None)
    result = cli("measure", *SMALL, "--target", "tpu-v5e")
    assert result.code == 2
    assert "pip install 'rematplan[tpu]'" in result.err
    assert is_one_paragraph(result.err)


@pytest.mark.parametrize(
    ("budget", "complaint"),
    [
        ("lots", "is not an amount of memory"),
        ("0", "zero"),
        ("-1GiB", "negative"),
        ("12G", "unknown unit"),
        ("1TiB", "more than tpu-v5e has"),
        ("16GiB", "its compiler sees 15.8 GiB"),
        ("120%", "more than all"),
    ],
)
@pytest.mark.parametrize("verb", ["compare", "plan"])
def test_impossible_budgets_are_refused_before_any_work(cli, verb, budget, complaint):
    # the workload does not exist: had it been looked for first, the error would be another
    result = cli(verb, "absent:make", "--target", "tpu-v5e", f"--budget={budget}")
    assert result.code == 2
    assert complaint in result.err
    assert is_one_paragraph(result.err)


def test_a_percentage_needs_a_target_with_a_memory_figure(cli):
    result = cli("compare", *SMALL, *CPU, "--budget", "80%")
    assert result.code == 2
    assert "no such figure" in result.err


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ("none", "means full recompute"),
        ("per-blok", "nearest: per-block"),
        ("save_only_these_names", "unknown policy"),
        ("every-4", "does not apply"),
    ],
)
def test_policies_that_mean_nothing_here(cli, policy, complaint):
    result = cli("measure", *SMALL, *CPU, "--policy", policy)
    assert result.code == 2
    assert complaint in result.err


def test_a_policy_and_a_plan_exclude_each_other(cli, tmp_path):
    result = cli("measure", *SMALL, *CPU, "--policy", "whole", "--plan", str(tmp_path / "plan.json"))
    assert result.code == 2
    assert "both a policy and a plan" in result.err


def test_an_existing_output_is_kept_and_noticed_before_the_work(cli, factory_file, tmp_path):
    marker, output = tmp_path / "worked", tmp_path / "run.json"
    output.write_text("mine")
    path = factory_file(f"""
        import pathlib, rematplan.workloads
        def make():
            pathlib.Path({str(marker)!r}).touch()
            return rematplan.workloads.mlp(blocks=2, batch=32, features=16)
    """)
    words = ("measure", f"{path}:make", *CPU, "--run", str(output))
    refused = cli(*words)
    assert refused.code == 2
    assert "--force" in refused.err
    assert output.read_text() == "mine"
    assert not marker.exists()
    assert cli(*words, "--force").code == 0
    assert json.loads(output.read_text())["verb"] == "measure"


def test_an_output_folder_that_is_missing_is_noticed_before_the_work(cli, tmp_path):
    result = cli("measure", "absent:make", *CPU, "--run", str(tmp_path / "no" / "run.json"))
    assert result.code == 2
    assert "does not exist; create it first" in result.err


def test_interrupted_while_compiling(tmp_path):
    """Ctrl-C ends the program with 130, leaves no file, and no compile child behind."""
    output = tmp_path / "run.json"
    script = tmp_path / "interrupted.py"
    # the interrupt arrives while the first child compiles: what stands between is the real product
    script.write_text(f"""
import os, signal, sys, threading, time
from rematplan.cli import main
from rematplan.target import workers

def interrupt():
    while not workers.POOL._all:
        time.sleep(0.01)
    print(*[child.pid for child in workers.POOL._all], flush=True)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
sys.exit(main(["compare", "gpt", "blocks=2", "--target", "cpu", "--run", {str(output)!r}]))
""")
    environment = {**os.environ, "REMATPLAN_CACHE": "off"}
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 130, result.stderr
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["interrupted.py"]
    assert all(_has_ended(int(pid)) for pid in result.stdout.split())


def _has_ended(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_interrupted_inside_the_users_factory(cli, factory_file):
    path = factory_file("""
        import os, signal
        def make():
            os.kill(os.getpid(), signal.SIGINT)
    """)
    previous = signal.getsignal(signal.SIGINT)
    result = cli("measure", f"{path}:make", *CPU)
    assert signal.getsignal(signal.SIGINT) == previous
    assert result.code == 130
    assert is_one_paragraph(result.err)


def test_a_cache_that_cannot_be_written_is_a_warning(cli, tmp_path, monkeypatch):
    occupied = tmp_path / "cache"
    occupied.write_text("a file, not a folder: nothing can be written below it, not even by root")
    monkeypatch.setenv("REMATPLAN_CACHE", str(occupied))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = cli("measure", *SMALL, *CPU, "--json")
    assert result.code == 0
    assert "warning: cannot write the cache folder" in result.err
    assert json.loads(result.out)["peak_bytes"] > 0
    assert occupied.read_text().startswith("a file")


def test_a_crash_of_the_compiler_is_reported_and_the_next_command_works(cli, monkeypatch, tmp_path):
    jax.devices()  # this process has read its flags; only a new compile child reads these, and aborts
    monkeypatch.setenv("REMATPLAN_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as broken:
        broken.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
        result = cli("measure", *SMALL, *CPU, "--json")
    assert result.code == 1
    assert result.out == ""
    assert "the compiler process ended" in result.err
    assert "xla_no_such_flag" in result.err
    assert cli("measure", *SMALL, *CPU, "--json").code == 0
