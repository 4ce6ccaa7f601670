"""Two processes of one training run: one plan, or one error, on both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def both(case: str, tmp_path: Path) -> list[dict]:
    """What each of two processes says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "REMATPLAN_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.search.two_processes", str(index), port, case],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


@pytest.mark.slow
def test_both_train_with_the_same_plan(tmp_path):
    first, second = both("same", tmp_path)
    assert "error" not in first | second
    assert first["plan"] == second["plan"]
    assert first["regions"] > 0
    assert (first["measured_here"], second["measured_here"]) == (True, False)
    assert first["losses"] == second["losses"]
    assert first["losses"][1] < first["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("model", "PlanMismatch: {}process 1 of 2 does not ask for the plan of process 0: another function"),
        ("batch", "PlanMismatch: {}process 1 of 2 does not ask for the plan of process 0: arguments of other shapes"),
        ("budget", "PlanMismatch: {}process 1 of 2 does not ask for the plan of process 0: budget in bytes 819200"),
        ("infeasible", "InfeasibleBudget: {}the budget of 10 KiB cannot be met"),
    ],
)
def test_both_end_with_the_error_that_names_the_process(tmp_path, case, expected):
    first, second = both(case, tmp_path)
    assert first["error"].startswith(expected.format(""))
    assert second["error"].startswith(expected.format("process 0: "))


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_cannot_trace(tmp_path):
    first, second = both("trace", tmp_path)
    assert first["error"] == 'RematplanError: process 1: ZeroDivisionError("in the user\'s model")'
    assert second["error"] == "ZeroDivisionError: in the user's model"


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_crashes_while_it_plans(tmp_path):
    first, second = both("crash", tmp_path)
    assert first["error"] == "OSError: no space left on device"
    assert second["error"] == "RematplanError: process 0: OSError('no space left on device')"


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_does_not_ask(tmp_path):
    first, _ = both("late", tmp_path)
    assert first["error"].startswith("InputError: process 1 of 2 did not ask for this plan within 2 s")
