"""`verify`: a plan and a workload -> proof that the planned function computes the same thing.

Three independent checks. Structure: the planned program without its regions and names is the original program, operation
by operation; a loop that the plan runs in parts is compared with each part's body in the place of all. Saving: what
really runs again is what the plan says. Numbers: outputs, gradients and state of both, computed on the CPU with
recomputation really done, at full size or at a stated smaller one.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from rematplan import agreement, apply, findings
from rematplan._measure import Progress, silent
from rematplan._plan import Plan
from rematplan.errors import InputError
from rematplan.naming import describe, resolve
from rematplan.program import recomputed, structure
from rematplan.program.loss import traced_loss
from rematplan.records import Verification
from rematplan.sharding import in_mesh
from rematplan.shrink import Size, fitting

if TYPE_CHECKING:
    from rematplan.workload import Workload


class Scale(Enum):
    """At what size numbers are computed."""

    #: Full if that takes seconds, else with fewer examples.
    AUTO = "auto"
    #: As the workload says.
    FULL = "full"
    #: Structure and saving only.
    NONE = "none"


def verify(
    work: Workload,
    *,
    plan: Plan | str | Path,
    scale: Scale | str | None = Scale.AUTO,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Compares a planned function with the original.

    The programs operation by operation, what runs again with what the plan says, and, on the CPU of this machine, outputs,
    gradients and module state.

    Args:
      work: what the plan was made for; another batch size will do.
      plan: a plan or the path of one.
      scale: "auto", "full", or "none" (None) for no numbers.
      seed: of random arguments, where the workload has only shapes.
      progress: called with a sentence whenever something long begins.

    Returns:
      What was found, with `passed`; a difference is no exception here (the command line exits with 5). Errors are relative
      to the largest magnitude of each array and held against the tolerance of the program's dtype.

    Raises:
      InputError: the plan file cannot be read, or an unknown scale.
      PlanMismatch: the plan is not for this function.
    """
    say = progress or silent
    size = _scale(scale)
    loaded = Plan.load(plan)
    say("comparing structure")
    lifted = work.lift(scopes=True)
    traced = traced_loss(work, own_regions=loaded.own_regions)
    bodies = {i: body.graph for i, body in traced.bodies.items()}
    configuration = resolve(loaded, traced.graph, bodies)
    with in_mesh(lifted.leaves):
        original = jax.make_jaxpr(lifted.pure)(*lifted.leaves)
        changed: tuple[str, ...] = ()
        for each in recomputed.one_loop_each(configuration):
            # a loop in parts is another program: each of its bodies is compared as the body of the whole loop
            regions, loops = describe(each, traced.graph, bodies)
            planned = apply.planned(lifted, replace(loaded, regions=regions, loops=loops))
            changed = changed or structure.differences(original, jax.make_jaxpr(planned)(*lifted.leaves))
        say("counting what runs again")
        mismatches = recomputed.saved_as_planned(traced, configuration)
    dtype, tolerance = agreement.tolerance_of([value.dtype for value in traced.graph.values])
    chosen = Size(None, "no numbers: not asked for")
    if size is not Scale.NONE:
        chosen = fitting(work, traced, full=size is Scale.FULL, seed=seed)
    numbers = None
    if chosen.lifted is not None:
        say(f"computing both, {chosen.text}")
        with chosen.devices():
            function = apply.planned(chosen.lifted, loaded)
            numbers = agreement.compare(chosen.lifted, function, work.differentiated, tolerance=tolerance, dtype=dtype)
    differences = (
        *(f"structure: {text}." for text in changed),
        *(f"recomputation: {mismatch}." for mismatch in mismatches),
        *(f"numbers: {text}." for text in (numbers.differences if numbers else ())),
    )
    return Verification(
        structure_equal=not changed,
        outputs_max_error=numbers.outputs_max_error if numbers else None,
        gradients_max_error=numbers.gradients_max_error if numbers else None,
        # without numbers: the same program writes the same state
        state_equal=numbers.state_max_error <= tolerance if numbers else not changed,
        saved_as_planned=not mismatches,
        passed=not differences,
        tolerances={dtype: tolerance},
        size=chosen.text,
        differences=differences,
        findings=findings.of_program(traced),
    )


def _scale(scale: Scale | str | None) -> Scale:
    try:
        return Scale.NONE if scale is None else Scale(scale)
    except ValueError:
        names = ", ".join(known.value for known in Scale)
        raise InputError(f"unknown scale {scale!r}; write one of {names}.") from None
