"""Benchmarks: `python -m benchmarks.NAME` prints one table. Ratios come from one run; nothing here is a test."""

import os

# a machine with a TPU or GPU plugin but no device would try to open one; nothing here needs it
os.environ.setdefault("JAX_PLATFORMS", "cpu")
