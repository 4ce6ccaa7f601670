"""Sharded arguments and `shard_map` on eight virtual CPU devices, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
REMAT3 = bool(getattr(jax.config, "jax_remat3", False))


@pytest.mark.slow
def test_every_form_of_remat_on_eight_devices():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.nnx.eight_devices"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("equal: ")]
    assert len(lines) == 3 * 4 + (0 if REMAT3 else 2)
