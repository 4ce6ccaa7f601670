"""The same program with repetitions cut out.

Comes in: a traced program and a stretch of operations to drop. Goes out: a smaller traced program in which what follows
the dropped stretch reads what came before it, and configurations for it. Parameters that only dropped operations read are
dropped with them. Refuses, with the reason, where the dropped stretch cannot be bridged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend import core as jex

from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import Traced


class CannotFold(Exception):
    """What was dropped cannot be bridged: nothing kept stands for a value, or for what a region does."""


@dataclass(frozen=True)
class Folded:
    """A shortened program.

    Attributes:
      traced: the shortened program.
      original: the program that it was cut from.
      dropped: the operations of the original program that were cut out, `[start, stop)`: the last of its repetitions.
      begin: where its repetitions begin.
      values: value id in the original program of every value of the short one.
      inputs: positions of the original inputs that remain.
    """

    traced: Traced
    original: Traced
    dropped: tuple[int, int]
    begin: int
    values: tuple[int, ...]
    inputs: tuple[int, ...]

    def configuration(self, original: Configuration) -> Configuration:
        """The configuration of the short program that repeats as one of the original program does.

        Regions in what was cut out go with it; one around all repetitions is around those that are left. A region that ends in
        what was cut out goes on as one does that begins as far before the end of that: where regions repeat, it is its copy.

        Raises:
          CannotFold: a region begins or ends in what was cut out, and there is no such copy.
        """
        value = {v: i for i, v in enumerate(self.values)}
        start, stop = self.dropped

        def shorter(region: Region, first: int, last: int) -> Region:
            saved = frozenset(value[v] for v in region.saved if v in value)
            first, last = self._position(first), self._position(last)
            return replace(region, start=first, stop=last, saved=saved, inner=kept(region.inner))

        def kept(regions: Sequence[Region]) -> tuple[Region, ...]:
            found: list[Region] = []
            cut: Region | None = None
            for region in regions:
                around = region.start <= self.begin and region.stop >= stop
                if around or region.stop <= start or region.start >= stop:
                    found.append(shorter(region, region.start, region.stop))
                elif region.start < start and region.stop <= stop:
                    cut = region
                elif region.stop < stop or (region.stop == stop and cut is None):
                    continue
                elif cut is not None and self._goes_on(cut, region):
                    found.append(shorter(replace(cut, saved=cut.saved | region.saved), cut.start, region.stop))
                    cut = None
                else:
                    raise CannotFold("a region begins in what is cut out")
            if cut is not None:
                raise CannotFold("a region ends in what is cut out")
            return tuple(found)

        loops = tuple((self._position(i), c) for i, c in original.loops if not start <= i < stop)
        return Configuration(kept(original.regions), loops)

    def _position(self, index: int) -> int:
        """Where an operation of the original program is in the short one, or what followed it."""
        start, stop = self.dropped
        return index if index <= start else max(start, index - stop + start)

    def _goes_on(self, cut: Region, other: Region) -> bool:
        """Whether a region that is cut at its end does before the cut what another does before the end of what is cut out."""
        start, stop = self.dropped
        graph = self.original.graph

        def done(region: Region, end: int) -> tuple[object, ...]:
            operations = graph.operations[region.start : end]
            saved = [[output in region.saved for output in op.outputs] for op in operations]
            return [op.primitive for op in operations], saved, region.policy, region.prevent_cse

        return not cut.inner and not other.inner and done(cut, start) == done(other, stop)


def fold(
    traced: Traced, *, dropped: tuple[int, int], stands_for: Mapping[int, int], begin: int | None = None
) -> Folded:
    """Drops a stretch of operations.

    Args:
      dropped: a half-open range of operation indices.
      stands_for: for values defined there and read later, the kept (or again replaced) value that takes their place; it
        must have the same shape and dtype.
      begin: where the repetitions begin of which the last are dropped; by default there are no others.

    Raises:
      CannotFold: a kept operation or an output reads a dropped value that nothing stands for, or one of another shape.
    """
    start, stop = dropped
    gone = range(start, stop)
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
    short, values, inputs = _renumber(traced, wired, results)
    return Folded(short, traced, dropped, start if begin is None else begin, values, inputs)


def _same_type(traced: Traced, a: int, b: int) -> bool:
    one, two = traced.avals[a], traced.avals[b]
    return one.shape == two.shape and one.dtype == two.dtype


def _renumber(
    traced: Traced, wired: Sequence[tuple[int, tuple[int, ...]]], results: Sequence[object]
) -> tuple[Traced, tuple[int, ...], tuple[int, ...]]:
    """The program of these operations, what its values were before, and which inputs it has."""
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
    return short, tuple(values), tuple(inputs)
