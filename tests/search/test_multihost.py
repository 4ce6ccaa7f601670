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


def both(cache: Path) -> dict[str, tuple[dict, dict]]:
    """By case, what each of two processes got. None of them may hang."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "REMATPLAN_CACHE": str(cache)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.search.two_processes", str(index), port],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ended = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    lines = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output, _ in ended]
    return {first["case"]: (first, second) for first, second in zip(*lines, strict=True)}


OTHERWISE = "PlanMismatch: {}process 1 of 2 does not ask for the plan of process 0: "
# What process 0 says of what both meet; process 1 says who met it.
ERRORS = {
    "model": OTHERWISE + "another function (structure ",
    "batch": OTHERWISE + "arguments of other shapes or types (",
    "budget": OTHERWISE + "budget in bytes 1048576, there 1740800.",
    "infeasible": "InfeasibleBudget: {}the budget of 10.0 KiB cannot be met on cpu",
}


@pytest.mark.slow
def test_one_plan_or_one_error_on_both(tmp_path):
    """In one test, because starting two processes takes longer than all they do."""
    said = both(tmp_path)
    first, second = said["same"]
    assert "error" not in first | second
    assert first["plan"] == second["plan"]  # to the byte
    assert first["regions"] > 0
    assert (first["measured_here"], second["measured_here"]) == (True, False)
    assert first["losses"] == second["losses"]
    assert first["losses"][1] < first["losses"][0]

    for case, expected in ERRORS.items():
        first, second = said[case]
        assert first["error"].startswith(expected.format(""))
        assert second["error"].startswith(expected.format("process 0: "))
    assert "new: blocks/3" in said["model"][0]["error"]

    # nobody waits for a process that cannot trace, crashes while it plans, or does not ask
    first, second = said["trace"]
    assert first["error"] == 'RematplanError: process 1: ZeroDivisionError("in the user\'s model")'
    assert second["error"] == "ZeroDivisionError: in the user's model"
    first, second = said["crash"]
    assert first["error"] == "OSError: no space left on device"
    assert second["error"] == "RematplanError: process 0: OSError('no space left on device')"
    assert said["late"][0]["error"].startswith("InputError: process 1 of 2 did not ask for this plan within 2 s")
