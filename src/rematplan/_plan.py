"""A plan: where to checkpoint and what to save there, by name; a JSON file that people can read in a diff.

Comes in: what was decided, or a file. Goes out: `Plan`, or the file. Does not know what a plan's names stand for in a program
(`naming.py`), how a plan was found, nor how it is applied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.errors import InputError, PlanMismatch
from rematplan.program.configuration import OwnRegions
from rematplan.records import PlanRecord, Row
from rematplan.report.files import write_text
from rematplan.target.measurement import Measurement

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT = "rematplan/plan"
VERSION = 1
_NOT_IN_FILE = frozenset({"measurement", "model", "name", "rows"})  # the name is there as `workload`


@dataclass(frozen=True)
class PlanRegion:
    """One `jax.checkpoint` region, by the names of its first and last operation; `saved` are names of values.

    Attributes:
      first, last: names of operations.
      saved: names of the values that are kept for the backward pass; everything else is computed again.
      module: the module path that the region follows, empty if it does not follow one.
      prevent_cse: as in `jax.checkpoint`.
      inner: regions inside; what they save is kept only while this region is run again.
      offloaded: those of the saved values that are kept in the host's memory.
      policy: instead of saved names, the name of a policy in `jax.checkpoint_policies`: a hand-written one that also saves
        values in loops, branches or derivative rules, where no name reaches. Empty for none.
    """

    first: str
    last: str
    saved: tuple[str, ...] = ()
    module: str = ""
    prevent_cse: bool = True
    inner: tuple[PlanRegion, ...] = ()
    offloaded: tuple[str, ...] = ()
    policy: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every saved name, those of inner regions last."""
        return (*self.saved, *(name for region in self.inner for name in region.names))


@dataclass(frozen=True)
class PlanLoop:
    """Iterations of one loop that are treated alike. Names are those of the body.

    Attributes:
      regions: in the body.
      operation: the loop; several parts of one loop follow each other in the order in which they run.
      iterations: how many; None for all that are left.
      chunk: so many iterations at a time form a region around those of the body; 0 for none.
    """

    operation: str
    regions: tuple[PlanRegion, ...]
    iterations: int | None = None
    chunk: int = 0


@dataclass(frozen=True)
class Plan:
    """A checkpointing plan.

    Attributes:
      regions, loops: what to do.
      own_regions: what becomes of the checkpoint regions that the model brings along.
      fingerprint: of the structure that the plan was made for; not of versions, shapes or constants.
      modules: the same by module, so that a mismatch can say what changed.
      shapes: hash of the argument shapes; with other shapes the plan applies but its figures do not count.
      name: of the workload.
      target, budget_bytes: what it was made for.
      status: "fits"; empty for a plan that was written by hand.
      predicted: figures said before any compile of this very plan.
      measured: figures of this plan on the target's compiler.
      baselines: hand-written configurations beside it: name -> figures.
      bound: least seconds under the same menus and cost model, and what that does not cover.
      notes: decisions that a reader should know, such as the user's own regions that were kept.
      findings: what a user should know about the program that was planned: code, message, module, location, bytes, flops.
      versions: of rematplan, JAX, Flax and the compiler that it was made with.
      measurement: the full measurement, with its timeline; not part of the file.
      model: keys of `records.Model`: what the plan and hand-written configurations do with each value; not part of the file.
      rows: `baselines` with their timelines; not part of the file.
    """

    regions: tuple[PlanRegion, ...] = ()
    loops: tuple[PlanLoop, ...] = ()
    own_regions: OwnRegions = OwnRegions.KEEP
    fingerprint: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    shapes: str = ""
    name: str = ""
    target: str = ""
    budget_bytes: int | None = None
    status: str = ""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    baselines: tuple[Mapping[str, Any], ...] = ()
    bound: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    measurement: Measurement | None = field(default=None, compare=False, repr=False)
    model: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    rows: tuple[Row, ...] = field(default=(), compare=False, repr=False)

    @property
    def saved(self) -> tuple[str, ...]:
        """Every saved name, in program order, loops last."""
        regions = [*self.regions, *(r for loop in self.loops for r in loop.regions)]
        return tuple(name for region in regions for name in region.names)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_IN_FILE}
        content["regions"] = [dataclasses.asdict(r) for r in self.regions]
        content["loops"] = [dataclasses.asdict(loop) for loop in self.loops]
        content["own_regions"] = self.own_regions.value
        return {"format": FORMAT, "version": VERSION, "workload": self.name, **content}

    def record(self) -> PlanRecord:
        """Everything that is known of the plan, as the verb `plan` prints it; of one from a file, what the file holds."""
        from rematplan.report.code import record_of  # the writer is not needed to plan

        record = record_of(self.to_json())
        if self.measurement is not None:
            record["measured"] = self.measurement.to_json()
        if self.rows:
            record["baselines"] = [row.to_json() for row in self.rows]
        record["model"] = self.model
        return PlanRecord(**record)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Writes the plan, whole or not at all.

        Raises:
          InputError: the file exists and `force` is not set, or it cannot be written.
        """
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n", force=force)

    @classmethod
    def load(cls, source: Plan | str | Path | Mapping[str, Any]) -> Plan:
        """A plan from a file, a parsed file or a plan.

        Raises:
          InputError: there is no such file.
          PlanMismatch: the file is not a plan, is cut short, or of a version that this rematplan does not know.
        """
        if isinstance(source, Plan):
            return source
        if isinstance(source, Mapping):
            return _from_json(source, "the plan")
        path = Path(source)
        try:
            raw = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise InputError(
                f"plan {path} cannot be read: {getattr(error, 'strerror', None) or error}; give the file that `-o` wrote"
            ) from error
        try:
            content = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanMismatch(
                f"plan {path} is not valid JSON ({error}); the file was cut short or edited by hand: write it again "
                "with `rematplan plan -o`"
            ) from error
        return _from_json(content, f"plan {path}")

    def code(self) -> str:
        """The equivalent hand-written code, where regions follow modules."""
        from rematplan.report.code import plan_code  # the writer is not needed to plan

        return plan_code(self)

    def __str__(self) -> str:
        from rematplan.report.code import plan_text

        return plan_text(self)

    def __rich__(self) -> RenderableType:
        return self.record().__rich__()

    def _repr_html_(self) -> str:
        return self.record()._repr_html_()


def _from_json(content: Any, label: str) -> Plan:
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise PlanMismatch(
            f"{label} is not a rematplan plan (no `format: {FORMAT}`); give a file that `rematplan plan -o` wrote"
        )
    if content.get("version") != VERSION:
        raise PlanMismatch(
            f"{label} has format version {content.get('version')!r}, this rematplan reads version {VERSION}; plan again, "
            "or use the rematplan that wrote it"
        )
    try:
        values = {key: _typed(content[key], kind, key) for key, kind in _FIELDS.items() if key in content}
        regions = tuple(_region(r) for r in _typed(content["regions"], list, "regions"))
        loops = tuple(_loop(each) for each in _typed(content["loops"], list, "loops"))
        own = OwnRegions(content.get("own_regions", OwnRegions.KEEP.value))
        name = _typed(content.get("workload", ""), str, "workload")
        return Plan(regions=regions, loops=loops, own_regions=own, name=name, **values)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PlanMismatch(f"{label} is incomplete ({error!r}); write it again with `rematplan plan -o`") from error


# Fields of a plan file besides what it does, and their types; `Mapping` and `list` hold JSON.
_FIELDS: dict[str, Any] = {
    "fingerprint": str,
    "modules": Mapping,
    "shapes": str,
    "target": str,
    "budget_bytes": (int, type(None)),
    "status": str,
    "predicted": Mapping,
    "measured": Mapping,
    "baselines": list,
    "bound": Mapping,
    "notes": list,
    "findings": list,
    "versions": Mapping,
}


def _typed(value: Any, kind: Any, what: str, *, of: type | None = None) -> Any:
    """The value if it is of that type, and a list's elements of theirs; lists become tuples.

    Raises:
      TypeError: it is not.
    """
    accepted = (list, tuple) if kind is list else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{what} is {value!r:.60}")
    if isinstance(value, (list, tuple)):
        inner = of or (str if what == "notes" else Mapping if what in ("baselines", "findings") else object)
        for each in value:
            if not isinstance(each, inner):
                raise TypeError(f"{what} holds {each!r:.60}")
        return tuple(value)
    return value


def _region(content: Any) -> PlanRegion:
    content = _typed(content, Mapping, "a region")
    return PlanRegion(
        first=_typed(content["first"], str, "first"),
        last=_typed(content["last"], str, "last"),
        saved=_typed(content["saved"], list, "saved", of=str),
        module=_typed(content.get("module", ""), str, "module"),
        prevent_cse=_typed(content.get("prevent_cse", True), bool, "prevent_cse"),
        inner=tuple(map(_region, _typed(content.get("inner", []), list, "inner"))),
        offloaded=_typed(content.get("offloaded", []), list, "offloaded", of=str),
        policy=_typed(content.get("policy", ""), str, "policy"),
    )


def _loop(content: Any) -> PlanLoop:
    content = _typed(content, Mapping, "a loop")
    iterations = _typed(content.get("iterations"), (int, type(None)), "iterations")
    chunk = _typed(content.get("chunk", 0), int, "chunk")
    if chunk < 0 or (iterations is not None and iterations < 1):
        raise ValueError(f"{iterations} iterations in chunks of {chunk}")
    regions = tuple(map(_region, _typed(content["regions"], list, "regions")))
    return PlanLoop(_typed(content["operation"], str, "operation"), regions, iterations, chunk)
