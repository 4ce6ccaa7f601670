"""Readers that have gone: they end the printing, and neither the work nor the exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rematplan.report.run import to_text
from tests.report import runs

# The verb's work is replaced by what ends it; everything around it is the product.
FAILING = """
import sys
import rematplan
from rematplan.cli import main
from rematplan.records import Verification

def verified(*_, **__):
    return Verification(False, None, None, True, True, False, {}, "full", ("it is another program",))

def broken(*_, **__):
    raise BrokenPipeError(32, "Broken pipe")  # as from a compile child that has died

rematplan.verify, rematplan.inspect = verified, broken
sys.exit(main())
"""


def run(*words: str, script: str = "", with_errors: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a command line whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    program = ["-c", script] if script else ["-m", "rematplan"]
    try:
        done = subprocess.run(
            [sys.executable, *program, *words],
            stdout=writer,
            stderr=writer if with_errors else subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize(
    "words", [("targets",), ("targets", "--json"), ("--help",), ("plan", "--help"), ("--version",), ("show", "RUN")]
)
@pytest.mark.parametrize("with_errors", [False, True])
def test_a_reader_that_has_gone_is_no_error(tmp_path, words, with_errors):
    file = tmp_path / "run.json"
    file.write_text(to_text(runs.comparison().to_json()))
    assert run(*[str(file) if word == "RUN" else word for word in words], with_errors=with_errors) == (0, "")


def test_files_are_written_all_the_same(tmp_path):
    code, errors = run("targets", "--run", str(tmp_path / "run.json"))
    assert (code, errors) == (0, f"Wrote {tmp_path / 'run.json'}\n")
    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize("option", [(), ("--json",)])
@pytest.mark.parametrize("with_errors", [False, True])
def test_a_failed_verification_stays_one(option, with_errors):
    words = ("verify", "mlp", "blocks=2", "--plan", "plan.json", *option)
    code, errors = run(*words, script=FAILING, with_errors=with_errors)
    assert code == 5
    assert with_errors or "it is another program" in errors


@pytest.mark.parametrize("words", [("bogus",), ("measure", "absent:make", "--target", "cpu")])
def test_wrong_words_stay_wrong(words):
    assert run(*words)[0] == run(*words, with_errors=True)[0] == 2


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_pipe_that_broke_elsewhere_is_an_error(option):
    code, errors = run("inspect", "mlp", "blocks=2", *option, script=FAILING)
    assert code == 1
    assert errors.startswith("error: internal error: BrokenPipeError")


@pytest.mark.parametrize("words", ["targets", "targets --json", "--help"])
def test_streams_may_be_closed(words):
    command = f"{sys.executable} -m rematplan {words} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.run(f"{command} 2>&-", shell=True, check=False).returncode == 0
