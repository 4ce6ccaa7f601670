"""Where a program is checkpointed and what is saved there, by operation and value number of one `Graph`.

Plain data between planners (which choose one), `apply` (which runs one) and `Plan` (which writes one down by name).
Does not know JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class OwnRegions(Enum):
    """What happens to the checkpoint regions that a model brings along (`nnx.remat`, `jax.checkpoint`)."""

    KEEP = "keep"  # each stays one operation, recomputed as the user wrote it
    REPLACE = "replace"  # opened: the operations inside are planned like all others


@dataclass(frozen=True)
class Region:
    """Consecutive operations `[start, stop)` under one `jax.checkpoint`.

    Attributes:
      saved: ids of values defined inside, and in no inner region, that are kept for the backward pass; everything else is
        recomputed.
      policy: instead of `saved`, the name of a policy in `jax.checkpoint_policies` (hand-written configurations only).
      prevent_cse: as in `jax.checkpoint`; needless in the body of a loop, where forward and backward are loops apart.
      inner: regions inside, in order, disjoint: what they keep is kept only while this region is run again.
    """

    start: int
    stop: int
    saved: frozenset[int] = frozenset()
    policy: str | None = None
    prevent_cse: bool = True
    inner: tuple[Region, ...] = ()

    def with_inner(self) -> Iterator[Region]:
        """The region and all regions inside it, outer ones first."""
        yield self
        for region in self.inner:
            yield from region.with_inner()


@dataclass(frozen=True)
class Configuration:
    """Regions in order, disjoint; and what is configured inside the bodies of loops.

    Attributes:
      loops: pairs of a loop's operation index and the configuration of its body.
    """

    regions: tuple[Region, ...] = ()
    loops: tuple[tuple[int, Configuration], ...] = ()

    def loop(self, operation: int) -> Configuration | None:
        """The configuration of the body of one loop, None if it is left as it is."""
        return next((c for index, c in self.loops if index == operation), None)

    def all_regions(self) -> Iterator[Region]:
        """The regions and all regions inside them; not those in the bodies of loops."""
        for region in self.regions:
            yield from region.with_inner()


PLAIN = Configuration()
