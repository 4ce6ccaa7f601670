"""Checkpointing plans for Flax NNX and JAX training steps.

    import rematplan as rp

    work = rp.Workload(loss_fn, model, batch)
    plan = rp.plan(work, budget="12GiB", target="tpu-v5e")
    loss_fn = rp.remat(loss_fn, plan=plan)

Public names are loaded on first use: importing this package imports neither JAX nor Flax, so that a command line that
only prints its help answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rematplan._compare import compare
    from rematplan._fit import fit
    from rematplan._inspect import inspect
    from rematplan._measure import measure
    from rematplan._plan import Plan
    from rematplan._remat import remat
    from rematplan._verify import verify
    from rematplan.search import frontier, plan
    from rematplan.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "Workload",
    "__version__",
    "compare",
    "fit",
    "frontier",
    "inspect",
    "measure",
    "plan",
    "remat",
    "verify",
]

# A module that would share the name of a public function has an underscore, so that `rp.remat` is always the function.
_HOME = {
    "Plan": "rematplan._plan",
    "Workload": "rematplan.workload",
    "compare": "rematplan._compare",
    "fit": "rematplan._fit",
    "frontier": "rematplan.search",
    "inspect": "rematplan._inspect",
    "measure": "rematplan._measure",
    "plan": "rematplan.search",
    "remat": "rematplan._remat",
    "verify": "rematplan._verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rematplan' has no attribute {name!r}; public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # next time without this function
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
