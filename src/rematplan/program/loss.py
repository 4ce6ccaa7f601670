"""The loss of a workload as a traced program, with module paths, argument names and what differentiation needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rematplan.errors import InputError
from rematplan.program.configuration import OwnRegions
from rematplan.program.residuals import with_residuals
from rematplan.program.shards import per_device
from rematplan.program.trace import UNFUNCTIONALIZED, Traced, holds, trace, with_names
from rematplan.sharding import in_mesh, mesh_of

if TYPE_CHECKING:
    from rematplan.workload import Workload


def traced_loss(work: Workload, *, own_regions: OwnRegions = OwnRegions.KEEP) -> Traced:
    """Traces the loss once, on shapes alone.

    Of a program over several devices, sizes and operations are those of one device.

    Args:
      own_regions: whether the checkpoint regions that the loss brings along stay one operation each or are opened.

    Raises:
      InputError: the loss is not a scalar, nothing in it can be differentiated, or it does not run by itself: it names an axis
        of a `vmap` around it, or holds a `checkify.check` that nothing makes functional.
    """
    lifted = work.lift(scopes=True)
    with in_mesh(lifted.leaves):
        try:
            traced = trace(lifted.pure, lifted.leaves, differentiated=work.differentiated, own_regions=own_regions)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            unbound = str(error).partition(".")[0]
            raise InputError(
                f"{work.name} communicates over an axis that a vmap or shard_map around it names ({unbound}), and is planned "
                "by itself. Put that vmap or shard_map into the loss function."
            ) from error
        if work.make_step is None and holds(traced.graph, UNFUNCTIONALIZED):
            raise InputError(
                f"{work.name} holds a checkify.check, which JAX runs only inside of checkify.checkify. Give the step that you "
                "run with step=, checkify.checkify in it."
            )
        traced = with_residuals(with_names(traced, [info.path for info in lifted.info]))
        return traced if mesh_of(lifted.leaves) is None else per_device(traced, lifted.leaves)
