"""Policies as the values that they save.

Comes in: a configuration in whose regions policies of `jax.checkpoint_policies` decide. Goes out: the same with the values
that they save, as a plan can say it, and as every implementation of remat honours it.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from rematplan import _jax_private
from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import Traced


def by_name(traced: Traced, configuration: Configuration) -> Configuration:
    """The same configuration with every policy replaced by the values that it saves, as a plan can say it."""

    def named(region: Region) -> Region:
        if region.policy is None:
            return region
        policy = getattr(jax.checkpoint_policies, region.policy)
        saved = frozenset(
            output
            for equation in traced.equations[region.start : region.stop]
            if _jax_private.answer_of(policy, equation.eqn) == "save"
            for output in equation.outputs
            if output >= 0 and not is_complex(traced, output)
        )
        return replace(region, policy=None, saved=saved)

    inside = configuration.with_bodies(lambda index, body: by_name(traced.bodies[index], body))
    return replace(inside, regions=tuple(map(named, configuration.regions)))


def honoured(traced: Traced, configuration: Configuration) -> Configuration:
    """The same configuration, with values in place of policies that JAX would not follow.

    The new remat drops some without a word; and neither saves complex numbers (0.10.2): those are left out.
    """
    if any(is_complex(traced, v) for v in range(len(traced.avals))):
        return by_name(traced, configuration)
    if not _jax_private.new_remat():
        return configuration
    bodies = [body for _, loop in configuration.loops for body in loop.variants()]
    policies = {r.policy for c in (configuration, *bodies) for r in c.all_regions() if r.policy is not None}
    kept = [_jax_private.kept_by_new_remat(getattr(jax.checkpoint_policies, name)) for name in policies]
    return configuration if all(kept) else by_name(traced, configuration)


def is_complex(traced: Traced, value: int) -> bool:
    """Whether a value is of complex numbers, which `checkpoint_name` takes and no region can save (jax 0.10.2)."""
    return traced.graph.values[value].dtype.startswith("complex")
