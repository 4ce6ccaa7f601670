"""JSON Schemas (draft 2020-12) of what the command line prints and writes."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

# Documents that others contain, by the name under which they refer to them.
_SHARED = {"measurement": "measurement", "model": "model", "plan": "plan-file", "plan-region": "plan-region"}


def schema(kind: str) -> dict[str, Any]:
    """The self-contained schema of what a verb prints under `--json`; also of `run` and `plan-file`.

    Raises:
      KeyError: if there is no such kind.
    """
    return {**_read(kind), "$defs": {name: _read(file) for name, file in _SHARED.items()}}


def kinds() -> tuple[str, ...]:
    """Names of the schemas."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in files if entry.name.endswith(".json")))


def _read(kind: str) -> dict[str, Any]:
    file = resources.files(__name__) / f"{kind}.json"
    if not file.is_file():
        raise KeyError(f"no schema {kind!r}; there are {', '.join(kinds())}")
    return json.loads(file.read_text(encoding="utf-8"))
