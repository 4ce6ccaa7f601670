"""The model as a reader of a report wants it: modules, the values that the backward pass reads, what becomes of them.

Comes in: a traced loss and named configurations of it. Goes out: `records.Model`, folded over repeated modules. Measures
nothing: what recomputing takes is part of measurements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rematplan.program import saving
from rematplan.program.configuration import Configuration
from rematplan.program.decisions import Decision, Fate, Place, decisions, operation_at
from rematplan.program.graph import Graph, ValueKind
from rematplan.program.trace import Traced
from rematplan.records import Decided, Model, ModelModule, ModelValue
from rematplan.scopes import indices, without_indices

_Instance = tuple[Place, int]


def describe_model(traced: Traced, configurations: Mapping[str, Configuration]) -> Model:
    """Modules and values of a loss, and what each configuration does with them.

    Args:
      configurations: by name, in the order in which they are shown.
    """
    graph = traced.graph
    fates = {
        name: decisions(graph, saving.by_name(traced, each), saving.inside_loops(traced, each))
        for name, each in configurations.items()
    }
    groups = _groups(graph, {instance for each in fates.values() for instance in each})
    values = tuple(_value(graph, members) for members in groups)
    decided = {name: tuple(_decided(graph, each, members) for members in groups) for name, each in fates.items()}
    return Model(_modules(graph), values, decided)


def _groups(graph: Graph, instances: set[_Instance]) -> list[list[_Instance]]:
    """Values that differ only in the index of a repeated layer, in the order of the program."""
    groups: dict[tuple[object, ...], list[_Instance]] = defaultdict(list)
    for place, value in sorted(instances):
        inside, operation = operation_at(graph, place, value)
        found = inside.values[value]
        name = without_indices(found.name)
        key = _loops(graph, place), name, found.shape, found.dtype, operation.primitive, operation.location
        groups[key].append((place, value))
    return list(groups.values())


def _loops(graph: Graph, place: Place) -> tuple[str, ...]:
    """Names of the loops around a program, without positions in lists."""
    names: list[str] = []
    for index in place:
        operation = graph.operations[index]
        assert operation.subprogram is not None
        names.append(without_indices(operation.name))
        graph = operation.subprogram.graph
    return tuple(names)


def _value(graph: Graph, members: Sequence[_Instance]) -> ModelValue:
    place, value = members[0]
    inside, operation = operation_at(graph, place, value)
    found = inside.values[value]
    module = without_indices(operation.module)
    return ModelValue(
        module=module,
        name=without_indices(found.name).removeprefix(f"{module}/"),
        operation=operation.primitive,
        shape=found.shape,
        dtype=found.dtype,
        bytes=found.bytes,
        flops=operation.flops,
        count=sum(_trips(graph, place) for place, _ in members),
        location=operation.location,
    )


def _trips(graph: Graph, place: Place) -> int:
    count = 1
    for index in place:
        nested = graph.operations[index].subprogram
        assert nested is not None
        count, graph = count * nested.length, nested.graph
    return count


def _decided(graph: Graph, fates: Mapping[_Instance, tuple[Fate, ...]], members: Sequence[_Instance]) -> Decided:
    counts = dict.fromkeys(Decision, 0)
    layers: dict[tuple[Decision, tuple[range, ...]], list[tuple[int, str]]] = defaultdict(list)
    for position, (place, value) in enumerate(members):
        inside, _ = operation_at(graph, place, value)
        label = "/".join(indices(inside.values[value].name))
        for fate in fates.get((place, value), ()):
            counts[fate.decision] += fate.count
            layers[fate.decision, fate.iterations].append((position, label))
    every = sum(_trips(graph, place) for place, _ in members)
    mixed = sum(map(bool, counts.values())) > 1 or 0 < sum(counts.values()) < every
    parts: dict[Decision, list[str]] = defaultdict(list)
    for (decision, iterations), found in layers.items():
        which = [_ranges(found)] if len(members) > 1 else []
        which += [f"{span.start}-{span.stop - 1}" if len(span) > 1 else str(span.start) for span in iterations]
        parts[decision].append(" of ".join(reversed(which)))
    where = "; ".join(f"{d.value}: {', '.join(parts[d])}" for d in Decision if mixed and counts[d])
    return Decided(counts[Decision.SAVED], counts[Decision.OFFLOADED], counts[Decision.RECOMPUTED], where)


def _ranges(members: Sequence[tuple[int, str]]) -> str:
    """`0-3, 5` for members at consecutive positions, by their labels."""
    ordered = sorted(dict(members).items())
    starts = [0] + [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b[0] != a[0] + 1]
    stops = [*starts[1:], len(ordered)]
    runs = [(ordered[a][1], ordered[b - 1][1]) for a, b in zip(starts, stops, strict=True)]
    return ", ".join(first if first == last else f"{first}-{last}" for first, last in runs)


def _paths(graph: Graph) -> set[str]:
    """Modules of the operations here and in nested programs."""
    nested = [op.subprogram.graph for op in graph.operations if op.subprogram is not None]
    return {op.module for op in graph.operations}.union(*map(_paths, nested))


def _modules(graph: Graph) -> tuple[ModelModule, ...]:
    """Every module that holds parameters or operations, and those around it; `count` is how many stand for one path."""
    members: dict[str, set[str]] = defaultdict(set)
    elements: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for value in (graph.values[i] for i in graph.inputs):
        if value.kind is ValueKind.PARAMETER:
            module = value.name.rpartition("/")[0]
            members[without_indices(module)].add(module)
            elements[without_indices(module)] += math.prod(value.shape)
            sizes[without_indices(module)] += value.bytes
    for module in _paths(graph):
        members[without_indices(module)].add(module)
    for path in list(members):
        parts = path.split("/")
        for n in range(1, len(parts)):
            outer = "/".join(parts[:n])
            members[outer].update("/".join(m.split("/")[:n]) for m in members[path])
    found = (ModelModule(path, len(names), elements[path], sizes[path]) for path, names in members.items() if path)
    own = ModelModule("", 1, elements[""], sizes[""])
    return (own, *sorted(found, key=lambda m: m.module))
