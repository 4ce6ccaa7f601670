"""The same program with repetitions cut out.

Comes in: a traced program and stretches of operations to drop. Goes out: a smaller traced program in which what
follows a dropped stretch reads what came before it. Parameters that only dropped operations read are dropped with
them. Refuses, with the reason, where the dropped stretch cannot be bridged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jax.extend import core as jex

from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import Traced


class CannotFold(Exception):
    """A value made in a dropped stretch is needed where no kept value can stand for it."""


@dataclass(frozen=True)
class Folded:
    """A shortened program.

    Attributes:
      traced: the shortened program.
      operations: index in the original program of every operation of the short one.
      values: value id in the original program of every value of the short one.
      inputs: positions of the original inputs that remain.
    """

    traced: Traced
    operations: tuple[int, ...]
    values: tuple[int, ...]
    inputs: tuple[int, ...]

    def configuration(self, original: Configuration) -> Configuration:
        """The part of a configuration of the original program that lies in this one.

        Raises:
          CannotFold: a region is only partly kept.
        """
        position = {op: i for i, op in enumerate(self.operations)}
        value = {v: i for i, v in enumerate(self.values)}

        def kept(regions: Sequence[Region]) -> tuple[Region, ...]:
            found = []
            for region in regions:
                places = [position[i] for i in range(region.start, region.stop) if i in position]
                if places:
                    saved = frozenset(value[v] for v in region.saved if v in value)
                    inner = kept(region.inner)
                    found.append(replace(region, start=places[0], stop=places[-1] + 1, saved=saved, inner=inner))
            for before, after in pairwise(found):
                if after.start < before.stop:
                    raise CannotFold("a region is only partly kept")
            return tuple(found)

        loops = tuple((position[i], c) for i, c in original.loops if i in position)
        return Configuration(kept(original.regions), loops)


def fold(traced: Traced, *, dropped: Sequence[tuple[int, int]], stands_for: Mapping[int, int]) -> Folded:
    """Drops stretches of operations.

    Args:
      dropped: half-open ranges of operation indices.
      stands_for: for values defined in dropped stretches and read later, the kept (or again replaced) value that takes
        their place; it must have the same shape and dtype.

    Raises:
      CannotFold: a kept operation or an output reads a dropped value that nothing stands for, or one of another shape.
    """
    gone = {i for start, stop in dropped for i in range(start, stop)}
    defined = {o for i in gone for o in traced.equations[i].outputs if o >= 0}

    def place(value: int) -> int:
        steps = 0
        while value in defined:
            if value not in stands_for or steps > len(defined):
                raise CannotFold(f"{traced.graph.values[value].name} is read after the stretch that was cut out")
            replacement = stands_for[value]
            if not _same_type(traced, value, replacement):
                raise CannotFold(f"{traced.graph.values[value].name} changes shape from one repetition to the next")
            value, steps = replacement, steps + 1
        return value

    kept = [i for i in range(len(traced.equations)) if i not in gone]
    wired = [(i, tuple(place(v) for v in traced.equations[i].inputs)) for i in kept]
    results = [o if isinstance(o, jex.Literal) else place(o) for o in traced.outputs]
    return _renumber(traced, wired, results)


def _same_type(traced: Traced, a: int, b: int) -> bool:
    one, two = traced.avals[a], traced.avals[b]
    return one.shape == two.shape and one.dtype == two.dtype


def _renumber(traced: Traced, wired: Sequence[tuple[int, tuple[int, ...]]], results: Sequence[object]) -> Folded:
    read = {v for _, inputs in wired for v in inputs} | {o for o in results if isinstance(o, int)}
    inputs = [p for p, v in enumerate(traced.graph.inputs) if v in read]
    values = [traced.graph.inputs[p] for p in inputs]
    values += [c for c in traced.constants if c in read]
    values += [o for i, _ in wired for o in traced.equations[i].outputs if o >= 0]
    new = {old: i for i, old in enumerate(values)}
    equations, operations, bodies = [], [], {}
    for index, (i, reads) in enumerate(wired):
        equation, op = traced.equations[i], traced.graph.operations[i]
        outputs = tuple(new[o] if o >= 0 else -1 for o in equation.outputs)
        here = tuple(new[v] for v in reads)
        moved = dict(zip((*equation.inputs, *equation.outputs), (*here, *outputs), strict=True))
        equations.append(replace(equation, inputs=here, outputs=outputs))
        needed = tuple(sorted(moved[v] for v in op.needed))
        operations.append(
            replace(op, index=index, inputs=here, outputs=tuple(o for o in outputs if o >= 0), needed=needed)
        )
        if i in traced.bodies:
            bodies[index] = traced.bodies[i]
    producer = [-1] * len(values)
    for op in operations:
        for v in op.outputs:
            producer[v] = op.index
    outputs = tuple(new[o] if isinstance(o, int) else o for o in results)
    graph = replace(
        traced.graph,
        values=tuple(replace(traced.graph.values[old], id=i) for i, old in enumerate(values)),
        operations=tuple(operations),
        inputs=tuple(range(len(inputs))),
        outputs=tuple(o for o in outputs if isinstance(o, int)),
        producer=tuple(producer),
    )
    short = Traced(
        graph,
        tuple(equations),
        {new[c]: a for c, a in traced.constants.items() if c in new},
        outputs,
        bodies,
        tuple(traced.avals[old] for old in values),
        tuple(i for i, p in enumerate(inputs) if p in traced.differentiated),
    )
    return Folded(short, tuple(i for i, _ in wired), tuple(values), tuple(inputs))
