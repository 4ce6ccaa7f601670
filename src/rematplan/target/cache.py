"""Measurements on disk, so that nothing is compiled twice.

Comes in: a key (a hash of everything that a result depends on) and a measurement. Goes out: the measurement again, or
None. A folder may be shared by several processes and machines: entries are written to a file that nobody else knows and
moved into place, so that a reader sees all of one or nothing, and there are no locks, which network file systems keep
badly. Who writes last wins, with the same content, because the key holds everything that it depends on. A folder that
cannot be written is used for reading only, after one warning; an entry that cannot be read counts as absent, and is
written anew.

    cache = Cache.default()
    cache.put(key, measurement)
    cache.get(key)
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from rematplan.target.measurement import Measurement, decode, encode

# bump when the meaning of a figure changes, so that older entries are no longer found
FORMAT = 14
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
        file = self.folder / name
        # of other processes on other machines too, which a process number would not tell apart
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(document), encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"cannot write the cache folder {self.folder} ({error.strerror}); going on without it. "
                "Set REMATPLAN_CACHE to another folder, or to off.",
                stacklevel=3,
            )
        finally:
            with contextlib.suppress(OSError):  # interrupted, or no room for it
                temporary.unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """What was written into a folder of this one, by the names that `read` takes, in order."""
        if self.folder is None:
            return []
        try:
            found = [entry.name for entry in (self.folder / folder).iterdir() if entry.suffix == ".json"]
        except OSError:
            return []
        return [f"{folder}/{name}" for name in sorted(found)]

    def remove(self, name: str) -> None:
        """Drop a document; another process may have done so already."""
        if self.folder is not None and self._writable:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)
