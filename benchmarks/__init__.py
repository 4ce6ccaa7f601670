"""Benchmarks: `python -m benchmarks.NAME` prints one table. Ratios come from one run; nothing here is a test."""
