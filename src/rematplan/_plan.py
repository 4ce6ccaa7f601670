"""A plan: where to checkpoint and what to save there, by name; a JSON file that people can read in a diff.

Comes in: a configuration of a traced program, or a file. Goes out: `Plan`, and from a plan and a traced program the
configuration again. Does not know how a plan was found, nor how it is applied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematplan.errors import InputError, PlanMismatch
from rematplan.program.configuration import POLICIES, Configuration, LoopPart, LoopPlan, OwnRegions, Region
from rematplan.program.graph import Graph, Operation
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


def describe(
    configuration: Configuration, graph: Graph, bodies: Mapping[int, Graph]
) -> tuple[tuple[PlanRegion, ...], tuple[PlanLoop, ...]]:
    """A configuration by name.

    Raises:
      ValueError: it configures a loop in the body of a loop, for which plans have no words.
    """
    if any(part.body.loops for _, loop in configuration.loops for part in loop.parts):
        raise ValueError("plans say nothing of loops in the bodies of loops")
    loops = tuple(
        PlanLoop(
            graph.operations[index].name,
            tuple(_named(r, bodies[index]) for r in part.body.regions),
            part.iterations,
            part.chunk,
        )
        for index, loop in configuration.loops
        for part in loop.parts
    )
    return tuple(_named(r, graph) for r in configuration.regions), loops


def _named(region: Region, graph: Graph) -> PlanRegion:
    operations = graph.operations[region.start : region.stop]
    return PlanRegion(
        first=operations[0].name,
        last=operations[-1].name,
        saved=tuple(graph.values[v].name for v in sorted(region.saved)),
        module=module_of(region, graph),
        prevent_cse=region.prevent_cse,
        inner=tuple(_named(r, graph) for r in region.inner),
        offloaded=tuple(graph.values[v].name for v in sorted(region.offloaded)),
        policy=region.policy or "",
    )


def module_of(region: Region, graph: Graph) -> str:
    """The module whose call is exactly this region; empty if there is none."""
    paths = [op.module.split("/") for op in graph.operations[region.start : region.stop]]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    path = "/".join(common)
    inside = lambda module: module == path or module.startswith(path + "/")
    before = graph.operations[region.start - 1].module if region.start else ""
    after = graph.operations[region.stop].module if region.stop < len(graph.operations) else ""
    return path if path and not inside(before) and not inside(after) else ""


def resolve(plan: Plan, graph: Graph, bodies: Mapping[int, Graph]) -> Configuration:
    """The configuration that a plan means for a program.

    Raises:
      PlanMismatch: the program has another structure than the one that the plan was made for, or the plan was changed by
        hand to what cannot be done; the message says where.
    """
    if plan.fingerprint and plan.fingerprint != graph.fingerprint:
        raise PlanMismatch(
            f"the plan was made for another function (structure {plan.fingerprint}, here {graph.fingerprint}): "
            f"{difference(plan.modules, module_fingerprints(graph))}; plan again for this function"
        )
    operation = {op.name: op.index for op in graph.operations}
    regions = _resolved(plan.regions, graph)
    parts: dict[int, list[LoopPart]] = {}
    for loop in plan.loops:
        index = operation.get(loop.operation)
        if index is None or index not in bodies:
            raise PlanMismatch(f"the plan names a loop {loop.operation!r} that this function does not have; plan again")
        body = Configuration(_resolved(loop.regions, bodies[index]))
        parts.setdefault(index, []).append(LoopPart(body, loop.iterations, loop.chunk))
    loops = tuple((index, LoopPlan(_every_iteration(found, graph.operations[index]))) for index, found in parts.items())
    for index, loop in loops:
        _check_names_around(index, loop, regions, graph, bodies[index])
    return Configuration(regions, loops)


def _every_iteration(parts: Sequence[LoopPart], operation: Operation) -> tuple[LoopPart, ...]:
    """The parts of a loop, if every iteration is in one of them; a single part takes whatever there is."""
    assert operation.subprogram is not None
    length = left = operation.subprogram.length
    alone = len(parts) == 1
    for part in parts:
        count = left if part.iterations is None else part.iterations
        left = left - count if 0 < count <= left else -1
    if left and not (alone and parts[0].iterations is None):
        counts = ", ".join("all that are left" if p.iterations is None else str(p.iterations) for p in parts)
        raise PlanMismatch(
            f"the plan's parts of the loop {operation.name!r} take {counts} of the {length} iterations that it runs here; "
            "every iteration is in one of them, so plan again for this function"
        )
    return (replace(parts[0], iterations=None),) if alone else tuple(parts)


def _check_names_around(index: int, loop: LoopPlan, regions: Sequence[Region], graph: Graph, body: Graph) -> None:
    """Raises PlanMismatch where a region around a loop saves by a name that the loop's body gives to another value.

    To JAX they are one name: the region would keep every iteration's value too.
    """
    inside = {body.values[v].name for each in loop.variants() for r in each.all_regions() for v in r.saved}
    for region in Configuration(tuple(regions)).all_regions():
        if region.start <= index < region.stop:
            twice = sorted(inside.intersection(graph.values[v].name for v in region.saved))
            if twice:
                raise PlanMismatch(
                    f"the plan saves {twice[0]!r} in a region around the loop {graph.operations[index].name!r}, whose body "
                    "saves another value by that name: JAX would keep both; leave out one of them, or plan again"
                )


def _resolved(regions: Sequence[PlanRegion], graph: Graph) -> tuple[Region, ...]:
    operation = {op.name: op.index for op in graph.operations}
    value = {v.name: v.id for v in graph.values}

    def one(region: PlanRegion) -> Region:
        missing = [n for n in (region.first, region.last) if n not in operation]
        missing += [n for n in (*region.saved, *region.offloaded) if n not in value]
        if missing:
            raise PlanMismatch(
                f"the plan names {missing[0]!r}, which this function does not have; plan again for this function"
            )
        start, stop = operation[region.first], operation[region.last] + 1
        saved = frozenset(value[n] for n in region.saved)
        inner = tuple(map(one, region.inner))
        wrong = ""
        if stop <= start:
            wrong = "ends before it begins"
        elif any(not start <= graph.producer[v] < stop for v in saved):
            wrong = "saves what is not computed in it"
        elif any(r.start <= graph.producer[v] < r.stop for r in inner for v in saved):
            wrong = "saves what a region inside of it computes, which decides itself what is kept"
        elif not set(region.offloaded) <= set(region.saved):
            wrong = "offloads what it does not save"
        elif region.policy and region.saved:
            wrong = "has both a policy and names of values that it saves"
        elif region.policy and region.policy not in POLICIES:
            wrong = f"has the policy {region.policy!r}, which is none of {', '.join(POLICIES)}"
        if wrong:
            raise PlanMismatch(f"the plan's region from {region.first!r} to {region.last!r} {wrong}; plan again")
        return Region(
            start,
            stop,
            saved,
            policy=region.policy or None,
            prevent_cse=region.prevent_cse,
            inner=inner,
            offloaded=frozenset(value[n] for n in region.offloaded),
        )

    return tuple(map(one, regions))


def module_fingerprints(graph: Graph) -> dict[str, str]:
    """Hash of the operations of each module."""
    text: dict[str, list[str]] = defaultdict(list)
    for op in graph.operations:
        text[op.module].append(op.primitive + (op.subprogram.graph.fingerprint if op.subprogram else ""))
    return {module: hashlib.sha256(" ".join(ops).encode()).hexdigest()[:8] for module, ops in text.items()}


def shapes_fingerprint(graph: Graph) -> str:
    """Hash of the shapes and types of the arguments."""
    text = [f"{graph.values[i].dtype}{graph.values[i].shape}" for i in graph.inputs]
    return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]


_ITSELF = "the function itself (a Python number that was static when it was planned and is an array here counts, too)"


def difference(planned: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Where two functions differ, by their `module_fingerprints`."""
    gone = [m for m in planned if m not in here]
    new = [m for m in here if m not in planned]
    changed = [m for m in planned if m in here and planned[m] != here[m]]
    parts = []
    for label, modules in (("changed", changed), ("missing", gone), ("new", new)):
        if modules:
            shown = ", ".join(m or _ITSELF for m in modules[:3])
            parts.append(f"{label}: {shown}" + (f" and {len(modules) - 3} more" if len(modules) > 3 else ""))
    return "; ".join(parts) or "the same modules are wired differently"
