"""`Run`: one use of one verb as a file: what was asked, with which versions, and the whole record that came out."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rematplan.errors import InputError, PlanMismatch

FORMAT = "rematplan-run"
FORMAT_VERSION = 1
_KEYS = {"verb": str, "command": list, "versions": dict, "target": str, "record": dict}
_HEAD = 200  # characters; the format is the first key
# What decides a figure: the tracer, the model library, and the compilers.
_PACKAGES = ("rematplan", "jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def versions() -> dict[str, str]:
    """Installed versions by package, Python's included. Reads package metadata; imports nothing."""
    from importlib import metadata  # slow to load, and help does not need it

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Run:
    """One use of one verb.

    Attributes:
      verb: "measure", "plan", ...: also the kind of the record.
      command: the command line's words, without the program's name.
      target: the target's name; empty for verbs that need none.
      record: the JSON document that the verb prints under `--json`.
    """

    verb: str
    command: tuple[str, ...]
    versions: Mapping[str, str]
    target: str
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """One key an attribute, beside `format` and `version`."""
        from rematplan.records import plain  # as above

        return {"format": FORMAT, "version": FORMAT_VERSION, **plain(self)}


def to_text(document: Mapping[str, Any]) -> str:
    """A JSON document as this package writes it."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def looks_like_run(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as run records do; also one that is cut short. False if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as stream:
            return f'"{FORMAT}"' in stream.read(_HEAD)
    except OSError:
        return False


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      InputError: if the file is missing, cannot be read, or does not hold a whole JSON object.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond all measure
        raise InputError(f"{path} is not a whole JSON file ({error}); it may be cut short: write it anew.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} holds {type(document).__name__}, not a plan or a run record.")
    return document


def from_document(document: Mapping[str, Any], *, name: str) -> Run:
    """The run in a JSON object that was read from the file `name`.

    Raises:
      InputError: if it is not a run record.
      PlanMismatch: if it is one of an unknown format version.
    """
    if document.get("format") != FORMAT:
        raise InputError(f"{name} is not a run record; `rematplan VERB ... --run FILE` writes one.")
    if document.get("version") != FORMAT_VERSION:
        raise PlanMismatch(
            f"{name} has format version {document.get('version')!r}, and this rematplan reads {FORMAT_VERSION}; "
            "run the command again with this version."
        )
    missing = [key for key, kind in _KEYS.items() if not isinstance(document.get(key), kind)]
    if not missing and not all(isinstance(t, str) for t in (*document["command"], *document["versions"].values())):
        missing = ["command or versions"]
    if missing:
        raise InputError(f"{name} is not a whole run record ({', '.join(missing)} missing or damaged); write it anew.")
    return Run(
        verb=document["verb"],
        command=tuple(document["command"]),
        versions=document["versions"],
        target=document["target"],
        record=document["record"],
    )


def with_comparison(run: Run, comparison: Run) -> Run:
    """A plan's or frontier's run with the rows of a comparison, which measured every hand-written configuration itself.

    A search extrapolates most of them, and leaves out the compiler's own rematerialization.

    Raises:
      InputError: the runs are of other verbs, of other models, targets or compilers, or written before runs held models.
    """
    if run.verb not in ("plan", "frontier") or comparison.verb != "compare":
        raise InputError(
            f"a run of {comparison.verb} cannot stand beside one of {run.verb}; give the run of a plan or a frontier "
            "first, and that of compare second."
        )
    if run.target != comparison.target:
        raise InputError(
            f"the first run is for {run.target}, the second for {comparison.target}; compare on that target."
        )
    if dict(run.versions) != dict(comparison.versions):
        raise InputError(
            "the two runs were made with other versions of rematplan, JAX or the compiler; run one of them anew."
        )
    measured = {row["name"]: row for row in comparison.record["rows"]}
    kept = [row for row in run.record["baselines"] if row["name"] not in measured]
    record = {**run.record, "baselines": [*measured.values(), *kept]}
    return replace(run, record={**record, "model": _one_model(run.record.get("model"), comparison.record.get("model"))})


def _one_model(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both models' values and decisions; what only one of them knows of is not read under the other's configurations."""
    if one is None or other is None:
        raise InputError("one of the two runs does not say what its model is; write it anew with --run.")
    sides = [{_key(value): n for n, value in enumerate(model["values"])} for model in (one, other)]
    arrays = [
        {(v["module"], v["name"]): (v["shape"], v["dtype"], v["count"]) for v in m["values"]} for m in (one, other)
    ]
    differ = [name for name, array in arrays[0].items() if name in arrays[1] and arrays[1][name] != array]
    if one["modules"] != other["modules"] or differ:
        where = f": {'/'.join(filter(None, differ[0]))} differs" if differ else ""
        raise InputError(f"the two runs are of other models or sizes{where}; compare the model that was planned.")
    values = list({_key(v): v for v in (*one["values"], *other["values"])}.values())
    unread = {"saved": 0, "offloaded": 0, "recomputed": 0, "where": ""}
    decisions = {
        name: [decided[side[_key(v)]] if _key(v) in side else unread for v in values]
        for side, model in zip(reversed(sides), (other, one), strict=True)
        for name, decided in model["decisions"].items()
    }
    return {"modules": one["modules"], "values": values, "decisions": decisions}


def _key(value: Mapping[str, Any]) -> tuple[Any, ...]:
    return value["module"], value["name"], value["operation"], tuple(value["shape"]), value["dtype"], value["location"]
