"""Measurements on disk, so that nothing is compiled twice.

Comes in: a key (a hash of everything that a result depends on) and a measurement. Goes out: the measurement again, or
None. Entries are written to a temporary file and moved into place, so that several processes may share a folder. A
folder that cannot be written is used for reading only, after one warning; an entry that cannot be read counts as
absent.

    cache = Cache.default()
    cache.put(key, measurement)
    cache.get(key)
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from rematplan.target.measurement import Measurement, decode, encode

# bump when the meaning of a figure changes, so that older entries are no longer found
FORMAT = 7
_DISABLED = ("", "0", "off", "none")


class Cache:
    """A folder of JSON files, one for each key."""

    def __init__(self, folder: Path | None):
        """Use that folder, made when first written to; None caches nothing."""
        self.folder = folder
        self._writable = folder is not None

    @staticmethod
    def default() -> Cache:
        """`$REMATPLAN_CACHE` ("off" for none), else `rematplan` under `$XDG_CACHE_HOME` or `~/.cache`."""
        chosen = os.environ.get("REMATPLAN_CACHE")
        if chosen is not None:
            return Cache(None if chosen.lower() in _DISABLED else Path(chosen).expanduser())
        base = os.environ.get("XDG_CACHE_HOME")
        return Cache((Path(base) if base else Path.home() / ".cache") / "rematplan")

    def get(self, key: str) -> Measurement | None:
        """The measurement under a key, marked as cached; None if there is none that can be read."""
        entry = self.read(f"{key}.json")
        if entry is None:
            return None
        try:
            return replace(decode(entry), cached=True)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return None

    def put(self, key: str, measurement: Measurement) -> None:
        self.write(f"{key}.json", encode(measurement))

    def read(self, name: str) -> Any | None:
        """A JSON document of this folder; None if it is missing or damaged."""
        if self.folder is None:
            return None
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, name: str, document: Any) -> None:
        """Write a JSON document, whole or not at all."""
        if self.folder is None or not self._writable:
            return
        temporary: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.folder, suffix=".part", delete=False
            ) as file:
                temporary = Path(file.name)
                json.dump(document, file)
            temporary.replace(self.folder / name)
        except OSError as error:
            self._writable = False
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            warnings.warn(
                f"cannot write the cache folder {self.folder} ({error.strerror}); going on without it. "
                "Set REMATPLAN_CACHE to another folder, or to off.",
                stacklevel=3,
            )
