"""The command line: one module for each verb. Importing it loads no JAX; verbs load what they need when they run."""

from __future__ import annotations

from rematplan.cli.main import main

__all__ = ["main"]
