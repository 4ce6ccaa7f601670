"""Rules that explain traps: facts about a program and its checkpointing -> `Finding`s.

Each rule is a function of plain data that returns findings, and only says what is certain from that data. `code` is
stable, the message gives the number, the cause and the next step.
"""

from __future__ import annotations

from dataclasses import replace

from rematplan.program.configuration import Configuration, Region
from rematplan.program.graph import Graph, Nesting
from rematplan.records import Finding
from rematplan.target.target import Kind
from rematplan.units import format_bytes

# A region with this share of the program's FLOPs is the whole model: what is outside is at most a loss.
WHOLE_SHARE = 0.9
# A difference below this share of the bytes is none: scalars and random keys.
NO_DIFFERENCE = 0.001


def of_program(graph: Graph) -> tuple[Finding, ...]:
    """What the user's function holds already: one finding for each source line that makes regions."""
    own = [op for op in graph.operations if op.subprogram is not None and op.subprogram.kind is Nesting.REGION]
    found = []
    for location in dict.fromkeys(op.location for op in own):
        here = [op for op in own if op.location == location]
        inside = sum(len(op.subprogram.graph.operations) for op in here if op.subprogram is not None)
        regions = "a region" if len(here) == 1 else f"{len(here)} regions"
        found.append(
            Finding(
                "own-region",
                f"The model checkpoints {inside} operations by itself, in {regions} kept as written: what a policy or plan "
                "saves lies outside. To have it planned, plan with own_regions='replace', or remove it.",
                module=here[0].module,
                location=location,
            )
        )
    return (*found, *_opaque(graph))


def _opaque(graph: Graph) -> tuple[Finding, ...]:
    """Loops without a fixed length and branches: one finding for each source line."""
    ops = [op for op in graph.operations if op.primitive in ("while", "cond")]
    return tuple(
        Finding(
            "one-operation",
            f"A {op.primitive} is one operation for the planner: it runs again as a whole or not at all, and nothing inside "
            "is saved by name. A loop of fixed length is planned inside if it is written with scan.",
            module=op.module,
            location=location,
        )
        for location, op in {op.location: op for op in reversed(ops)}.items()
    )


def of_regions(graph: Graph, configuration: Configuration) -> tuple[Finding, ...]:
    """Regions that cannot lower the peak."""
    total = sum(op.flops for op in graph.operations)
    for region in configuration.regions:
        if region.saved or region.inner or region.policy not in (None, "nothing_saveable"):
            continue
        inside = graph.operations[region.start : region.stop]
        share = sum(op.flops for op in inside) / total if total else 0.0
        if share >= WHOLE_SHARE:
            return (
                Finding(
                    "whole-model-region",
                    f"One region holds {share:.0%} of the FLOPs and saves nothing: before its backward pass starts the whole "
                    "region is computed once more and all of its residuals are alive, so the peak is that of no "
                    "checkpointing, at the price of a second forward pass. Use several regions, one for each block.",
                    module=inside[0].module,
                    location=inside[0].location,
                ),
            )
    return ()


def of_residuals(
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
            )
        )
    if configuration.regions and saved_bytes >= plain_bytes * (1 - NO_DIFFERENCE):
        found.append(
            Finding(
                "no-fewer-residuals",
                f"With these regions the backward pass holds {format_bytes(saved_bytes)} of residuals, without them "
                f"{format_bytes(plain_bytes)}: they free nothing, and the compiler can no longer fuse across their "
                "boundaries. Save less, or leave them out.",
            )
        )
    return tuple(found)


def of_target(kind: Kind) -> tuple[Finding, ...]:
    """What figures of this kind of target cannot say."""
    if kind is not Kind.CPU:
        return ()
    return (
        Finding(
            "cpu-figures",
            "These figures are those of XLA's CPU compiler, which fuses and schedules unlike a TPU's or a GPU's and, without "
            "the option that rematplan sets, removes recomputation; they rank configurations at best. Name the chip you "
            "train on, for example --target tpu-v5e.",
        ),
    )


def without_policies(configuration: Configuration) -> Configuration:
    """The same regions, those with a policy saving nothing."""

    def bare(region: Region) -> Region:
        return replace(region, policy=None) if region.policy not in (None, "nothing_saveable") else region

    inside = configuration.with_bodies(lambda _, body: without_policies(body))
    return replace(inside, regions=tuple(map(bare, configuration.regions)))


def _policies(configuration: Configuration) -> set[str]:
    here = {region.policy for region in configuration.regions if region.policy is not None}
    return here.union(*(_policies(body) for _, loop in configuration.loops for body in loop.variants()))
