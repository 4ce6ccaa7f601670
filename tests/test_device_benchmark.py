"""`benchmarks/device.py` on the CPU: every configuration is compiled and run, and what a device does not tell is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_compiled_beside_run(tmp_path):
    sizes = json.dumps({"blocks": 3, "features": 64, "batch": 512})
    command = [sys.executable, "-m", "benchmarks.device", "--target", "cpu", "--workloads", "mlp", "--sizes", sizes]
    command += ["--share", "0.8", "-o", str(tmp_path / "device.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "cpu keeps no count of its memory" in done.stdout
    rows = json.loads((tmp_path / "device.json").read_text())["rows"]
    assert [row["configuration"] for row in rows] == ["plain", "per-block", "plan"]
    for row in rows:
        # the same program by the same compiler, once for an absent device and once for this one
        assert row["run"]["required_bytes"] == pytest.approx(row["compiled"]["required_bytes"], rel=0.1)
        assert 0 < row["run"]["seconds"] < 60
    assert rows[2]["compiled"]["required_bytes"] <= 0.8 * rows[0]["compiled"]["required_bytes"]
