"""Help answers at once: nothing on its way imports JAX."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rematplan
from rematplan import workloads

HEAVY = {"jax", "jaxlib", "flax", "numpy", "scipy", "highspy"}
VERBS = ("demo", "inspect", "measure", "compare", "plan", "frontier", "fit", "verify", "show", "targets", "report")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], ["plan", "--help"], ["targets"]])
def test_no_heavy_import_on_the_way_to_help(words):
    code = f"""
import sys, time
start = time.perf_counter()
from rematplan.cli import main
code = main({words!r})
print(f"{{time.perf_counter() - start:.2f}} s", file=sys.stderr)
print(code, sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "0 []", result.stderr
    assert result.stdout.strip()


def test_help_names_every_verb_and_exit_code(cli):
    shown = cli("--help")
    assert shown.code == 0
    for verb in VERBS:
        assert f" {verb} " in shown.out
    assert "3 the budget cannot be met" in shown.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_the_common_options(cli, verb):
    shown = cli(verb, "--help")
    assert shown.code == 0
    for option in ("--json", "--run", "--force", "--debug"):
        assert option in shown.out


def test_version(cli):
    assert cli("--version").out.strip() == rematplan.__version__


@pytest.mark.parametrize("words", [["bogus"], ["measure"], ["measure", "gpt"], ["plan", "gpt", "--target", "cpu"]])
def test_wrong_words_are_usage_errors(cli, words):
    result = cli(*words)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert "--help" in result.err


@pytest.mark.parametrize("verb", ["inspect", "measure", "compare", "plan", "frontier", "fit", "verify"])
def test_every_built_in_workload_is_named(cli, verb):
    shown = " ".join(cli(verb, "--help").out.replace("│", " ").split())
    assert f"built-in: {', '.join(workloads.__all__)}." in shown
