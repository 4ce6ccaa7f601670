"""The loss of a workload as a traced program, with module paths, argument names and what differentiation needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rematplan.program.residuals import with_residuals
from rematplan.program.trace import Traced, trace, with_names

if TYPE_CHECKING:
    from rematplan.workload import Workload


def traced_loss(work: Workload) -> Traced:
    """Traces the loss once, on shapes alone.

    Raises:
      InputError: the loss is not a scalar, or nothing in it can be differentiated.
    """
    lifted = work.lift(scopes=True)
    traced = trace(lifted.pure, lifted.leaves, differentiated=work.differentiated)
    return with_residuals(with_names(traced, [info.path for info in lifted.info]))
