"""What a plan means for a program: a configuration by the names of its operations and values, and back.

Comes in: a configuration of a traced program, or a plan. Goes out: a plan's regions and loops, or the configuration that they
mean here; where the program is another one, an error that says which modules differ.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rematplan._plan import Plan, PlanLoop, PlanRegion
from rematplan.errors import PlanMismatch
from rematplan.program.configuration import POLICIES, Configuration, LoopPart, LoopPlan, Region
from rematplan.program.graph import Graph, Operation


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
