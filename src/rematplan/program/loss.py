"""The loss of a workload as a traced program, with module paths, argument names and what differentiation needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rematplan.program.configuration import OwnRegions
from rematplan.program.residuals import with_residuals
from rematplan.program.shards import per_device
from rematplan.program.trace import Traced, trace, with_names
from rematplan.sharding import in_mesh, mesh_of

if TYPE_CHECKING:
    from rematplan.workload import Workload


def traced_loss(work: Workload, *, own_regions: OwnRegions = OwnRegions.KEEP) -> Traced:
    """Traces the loss once, on shapes alone.

    Of a program over several devices, sizes and operations are those of one device.

    Args:
      own_regions: whether the checkpoint regions that the loss brings along stay one operation each or are opened.

    Raises:
      InputError: the loss is not a scalar, or nothing in it can be differentiated.
    """
    lifted = work.lift(scopes=True)
    with in_mesh(lifted.leaves):
        traced = trace(lifted.pure, lifted.leaves, differentiated=work.differentiated, own_regions=own_regions)
        traced = with_residuals(with_names(traced, [info.path for info in lifted.info]))
        return traced if mesh_of(lifted.leaves) is None else per_device(traced, lifted.leaves)
