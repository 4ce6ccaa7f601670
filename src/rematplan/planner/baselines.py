"""What people write by hand, as configurations of a graph.

Comes in: a `Graph` with module paths. Goes out: named configurations: one region per block, per k blocks, around the
whole model, with the usual policies. A block is an element of the model's largest list of same modules, else a direct
child of the model; in a model that loops over stacked layers, the body of the loop. Does not know JAX.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rematplan.program.configuration import PLAIN, Configuration, Region, in_every_iteration
from rematplan.program.graph import Graph, Nesting, Operation

DOTS = "dots_saveable"
DOTS_NO_BATCH = "dots_with_no_batch_dims_saveable"
# Loops with less than this share of the work are left as they are.
LOOP_SHARE = 0.1


@dataclass(frozen=True)
class Baseline:
    """A hand-written configuration.

    Attributes:
      name: as in the command line's `--policy`.
      compiler_rematerializes: plain code, the compiler's own rematerialization on.
    """

    name: str
    configuration: Configuration
    compiler_rematerializes: bool = False


@dataclass(frozen=True)
class Stretch:
    """Operations `[start, stop)` that one module call executes."""

    module: str
    start: int
    stop: int


def baselines(graph: Graph) -> tuple[Baseline, ...]:
    """Every hand-written configuration that this program allows; configurations that coincide are given once."""
    blocks = block_calls(graph)
    model = model_range(graph)
    loops = heavy_loops(graph)
    found = [Baseline("plain", PLAIN)]
    if model is not None:
        found.append(Baseline("whole", _regions(graph, [model])))
    if loops:
        found.append(Baseline("per-block", _bodies(graph, loops)))
        found.append(Baseline("dots", _bodies(graph, loops, DOTS)))
        found.append(Baseline("dots_with_no_batch_dims", _bodies(graph, loops, DOTS_NO_BATCH)))
    elif blocks:
        found.append(Baseline("per-block", _regions(graph, blocks)))
        found += [
            Baseline(f"every-{k}", _regions(graph, [_join(group) for group in _groups(blocks, k)]))
            for k in (2, 3, 4)
            if k < len(blocks)
        ]
        if len(blocks) > 1:
            found.append(Baseline("all-but-last", _regions(graph, blocks[:-1])))
        found.append(Baseline("dots", _regions(graph, blocks, DOTS)))
        found.append(Baseline("dots_with_no_batch_dims", _regions(graph, blocks, DOTS_NO_BATCH)))
    if model is not None:
        found.append(Baseline("whole-dots", _regions(graph, [model], DOTS_NO_BATCH)))
    found.append(Baseline("compiler", PLAIN, compiler_rematerializes=True))
    return tuple(found)


def block_calls(graph: Graph) -> list[Stretch]:
    """The calls of the model's blocks, in order."""
    lists: dict[str, dict[str, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    children: dict[str, list[Operation]] = defaultdict(list)
    for op in graph.operations:
        if not op.module:
            continue
        children[op.module.split("/")[0]].append(op)
        for match in re.finditer(r"(?:^|/)(\d+)(?=/|$)", op.module):
            lists[op.module[: match.start()]][op.module[: match.end()]].append(op)
    same = {}
    for prefix, elements in lists.items():
        shapes = [tuple(op.primitive for op in ops) for ops in elements.values()]
        common = max(shapes.count(s) for s in shapes)
        if common > 1:
            same[prefix] = (common, sum(op.flops for ops in elements.values() for op in ops))
    if same:
        # the largest list of same modules; of two as long, the one that does more work
        prefix = max(same, key=lambda p: (same[p][0], same[p][1], -len(p)))
        members = set(lists[prefix])
        return [s for s in _calls(graph, members) if s.stop > s.start]
    return [s for s in _calls(graph, set(children)) if any(op.flops for op in graph.operations[s.start : s.stop])]


def model_range(graph: Graph) -> Stretch | None:
    """From the first to the last operation that runs inside a module."""
    inside = [op.index for op in graph.operations if op.module]
    return Stretch("", inside[0], inside[-1] + 1) if inside else None


def _calls(graph: Graph, members: set[str]) -> list[Stretch]:
    """Maximal runs of operations below the same member, so a module called twice gives two calls."""
    calls: list[Stretch] = []
    for op in graph.operations:
        path = next((m for m in _prefixes(op.module) if m in members), None)
        if path is None:
            continue
        if calls and calls[-1].module == path and calls[-1].stop == op.index:
            calls[-1] = Stretch(path, calls[-1].start, op.index + 1)
        else:
            calls.append(Stretch(path, op.index, op.index + 1))
    return calls


def _prefixes(module: str) -> Iterator[str]:
    parts = module.split("/")
    return ("/".join(parts[:n]) for n in range(1, len(parts) + 1))


def _groups(blocks: Sequence[Stretch], size: int) -> list[Sequence[Stretch]]:
    return [blocks[i : i + size] for i in range(0, len(blocks), size)]


def _join(group: Sequence[Stretch]) -> Stretch:
    return Stretch("", group[0].start, group[-1].stop)


def _regions(graph: Graph, stretches: Sequence[Stretch], policy: str | None = None) -> Configuration:
    """One region per stretch; a region ends before an operation that must not run twice, and starts again after it."""
    regions = []
    for stretch in stretches:
        start = stretch.start
        for op in graph.operations[stretch.start : stretch.stop]:
            if op.barrier:
                regions.append(Region(start, op.index, policy=policy))
                start = op.index + 1
        regions.append(Region(start, stretch.stop, policy=policy))
    return Configuration(tuple(r for r in regions if r.stop > r.start))


def heavy_loops(graph: Graph) -> list[Operation]:
    """Loops that do a meaningful share of the program's work."""
    total = sum(op.flops for op in graph.operations) or 1.0
    loops = [op for op in graph.operations if op.subprogram is not None and op.subprogram.kind is Nesting.LOOP]
    return [op for op in loops if op.flops > LOOP_SHARE * total]


def _bodies(graph: Graph, loops: Sequence[Operation], policy: str | None = None) -> Configuration:
    bodies = []
    for op in loops:
        assert op.subprogram is not None
        body = op.subprogram.graph
        whole = _regions(body, [Stretch("", 0, len(body.operations))], policy)
        # forward and backward of a loop are two loops, so nothing can be merged across them
        regions = tuple(Region(r.start, r.stop, policy=r.policy, prevent_cse=False) for r in whole.regions)
        bodies.append((op.index, in_every_iteration(Configuration(regions))))
    return Configuration(loops=tuple(bodies))
