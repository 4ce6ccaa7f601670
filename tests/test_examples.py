"""The examples hold what they say: each is a script full of assertions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *targets: str) -> str:
    """What an example prints. Its assertions make it exit with an error."""
    result = subprocess.run([sys.executable, str(EXAMPLES / name), *targets], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_remat_around_a_model():
    shown = run("nnx_remat.py", "cpu")
    assert "kernels differ, biases are all zero" in shown
    assert "a region per layer 64.0 KiB" in shown  # 8 layers of 32 x 64 in float32
    assert "16 layers of 1024, batch 8192, on cpu" in shown
    assert "less time than a region per layer" in shown


def test_policies():
    shown = run("nnx_remat_policy.py", "cpu")
    assert "5 with the policy, as without remat; 7 with the bare form" in shown
    assert "policy 24.0 KiB, bare 8.00 KiB" in shown


@pytest.mark.slow
def test_remat_on_a_chip():
    shown = run("nnx_remat.py", "tpu-v5e")
    assert "Plan for tpu-v5e" in shown
    assert "less time than a region per layer" in shown


@pytest.mark.slow
def test_policies_on_two_chips():
    lines = run("nnx_remat_policy.py", "tpu-v5e", "gpu-h100").splitlines()
    for target, source in (("tpu-v5e", "cycles"), ("gpu-h100", "roofline")):
        assert len([line for line in lines if target in line and f"({source})" in line]) == 3


def test_every_example_is_run():
    text = Path(__file__).read_text()
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 2
    assert all(f'run("{name}"' in text for name in names)
