"""Findings about a policy or plan: what its regions cannot do, and what they do not save.

Comes in: a graph, a configuration and sums of residuals. Goes out: findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rematplan.program.configuration import Configuration, Region
from rematplan.program.graph import Graph
from rematplan.records import Finding
from rematplan.units import format_bytes

# A region with this share of the program's FLOPs is the whole model: what is outside is at most a loss.
WHOLE_SHARE = 0.9
# What does less of the work than this is light.
LIGHT_SHARE = 0.05
NOTHING = "nothing_saveable"
# A difference below this share of the bytes is none: scalars and random keys.
NO_DIFFERENCE = 0.001


def of_regions(graph: Graph, configuration: Configuration) -> tuple[Finding, ...]:
    """Regions that cannot lower the peak."""
    bare = [r for r in configuration.regions if not (r.saved or r.inner or r.policy not in (None, NOTHING))]
    spans = [(r.start, r.stop) for r in bare]
    last = max(configuration.regions, key=lambda r: r.start, default=None)
    return of_spans(graph, spans, last=None if last is None else (last.start, last.stop))


def of_spans(graph: Graph, spans: Sequence[tuple[int, int]], *, last: tuple[int, int] | None) -> tuple[Finding, ...]:
    """Regions that save nothing and cannot lower the peak.

    Args:
      spans: operations of regions that save nothing.
      last: the last of all regions, whether it saves something or not.
    """
    total = sum(op.flops for op in graph.operations) or 1.0
    work = lambda a, z: sum(op.flops for op in graph.operations[a:z])
    for start, stop in spans:
        inside = graph.operations[start:stop]
        if work(start, stop) >= WHOLE_SHARE * total:
            return (
                Finding(
                    "whole-model-region",
                    f"One region holds {work(start, stop) / total:.0%} of the FLOPs and saves nothing: before its backward "
                    "pass starts the whole region is computed once more and all of its residuals are alive, so the peak is "
                    "that of no checkpointing, at the price of a second forward pass. Use several regions, one for each "
                    "block.",
                    module=inside[0].module,
                    location=inside[0].location,
                    flops=work(start, stop),
                ),
            )
    if last is None or last not in spans or len(spans) < 2:
        return ()
    start, stop = last
    if work(stop, len(graph.operations)) > LIGHT_SHARE * total or work(start, stop) <= LIGHT_SHARE * total:
        return ()
    inside = graph.operations[start:stop]
    return (
        Finding(
            "last-block-region",
            "The last block is a region that saves nothing, and hardly anything follows it: its backward pass comes first, "
            "and the block is computed again at once, when nothing of what it keeps has been freed. That lowers no peak and "
            "costs the block's forward pass. Leave the last block without a region, or save what is dear in it.",
            module=inside[0].module,
            location=inside[0].location,
            flops=work(start, stop),
        ),
    )


def of_saving(
    configuration: Configuration, saved_bytes: int, *, plain_bytes: int, least_bytes: int | None
) -> tuple[Finding, ...]:
    """Checkpointing that does not do what it was written for.

    Args:
      saved_bytes: computed residuals under the configuration.
      plain_bytes: the same without checkpointing.
      least_bytes: the same regions with nothing saved in them; None if no policy was given.
    """
    found = []
    if least_bytes is not None and abs(saved_bytes - least_bytes) <= NO_DIFFERENCE * max(least_bytes, 1):
        names = ", ".join(sorted(_policies(configuration)))
        found.append(
            Finding(
                "policy-saves-nothing",
                f"The policy {names} saves nothing inside its regions ({format_bytes(saved_bytes)} of residuals with and "
                "without it): either no operation there is of the kind that it may save, or the backward pass reads none of "
                "those. What it does read is recomputed.",
                bytes=plain_bytes - saved_bytes,
            )
        )
    if configuration.regions and saved_bytes >= plain_bytes * (1 - NO_DIFFERENCE):
        found.append(
            Finding(
                "no-fewer-residuals",
                f"With these regions the backward pass holds {format_bytes(saved_bytes)} of residuals, without them "
                f"{format_bytes(plain_bytes)}: they free nothing, and the compiler can no longer fuse across their "
                "boundaries. Save less, or leave them out.",
                bytes=saved_bytes,
            )
        )
    return tuple(found)


def without_policies(configuration: Configuration) -> Configuration:
    """The same regions, those with a policy saving nothing."""

    def bare(region: Region) -> Region:
        return replace(region, policy=None) if region.policy not in (None, NOTHING) else region

    inside = configuration.with_bodies(lambda _, body: without_policies(body))
    return replace(inside, regions=tuple(map(bare, configuration.regions)))


def _policies(configuration: Configuration) -> set[str]:
    here = {region.policy for region in configuration.regions if region.policy is not None}
    return here.union(*(_policies(body) for _, loop in configuration.loops for body in loop.variants()))
