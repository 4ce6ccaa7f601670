"""The words of `--policy` -> a configuration of a traced program.

A word is a hand-written configuration (`planner/baselines.py`) or a policy of `jax.checkpoint_policies` that needs no
argument, which is then applied around the whole function.
"""

from __future__ import annotations

import difflib

from rematplan.errors import InputError
from rematplan.planner.baselines import Baseline, baselines
from rematplan.program.configuration import POLICIES, Configuration, Region
from rematplan.program.graph import Graph

HAND_WRITTEN = (
    "plain",
    "whole",
    "per-block",
    "every-2",
    "every-3",
    "every-4",
    "all-but-last",
    "dots",
    "dots_with_no_batch_dims",
    "whole-dots",
    "compiler",
)


def by_name(graph: Graph, name: str) -> Baseline:
    """The configuration that `name` means for this program.

    Raises:
      InputError: unknown names (with the nearest ones), and those that this program has no blocks for.
    """
    if name.lower() == "none":
        raise InputError(
            "the policy 'none' is refused because policy=None means full recompute in JAX; "
            "write plain for no rematerialization or whole for full recompute of the model."
        )
    if name in POLICIES:
        return Baseline(name, Configuration(_around_everything(graph, name)))
    if name not in HAND_WRITTEN:
        known = (*HAND_WRITTEN, *POLICIES)
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
        raise InputError(f"unknown policy {name!r}; {hint}.")
    found = {baseline.name: baseline for baseline in baselines(graph)}
    if name not in found:
        raise InputError(
            f"the policy {name!r} does not apply: it regroups the blocks of a model, and this program allows "
            f"{', '.join(found)} only."
        )
    return found[name]


def _around_everything(graph: Graph, policy: str) -> tuple[Region, ...]:
    """Regions from the first operation to the last, interrupted where an operation must run exactly once."""
    regions: list[Region] = []
    start = 0
    for operation in graph.operations:
        if operation.barrier:
            regions.append(Region(start, operation.index, policy=policy))
            start = operation.index + 1
    regions.append(Region(start, len(graph.operations), policy=policy))
    return tuple(region for region in regions if region.stop > region.start)
