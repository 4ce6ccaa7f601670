"""Where a program is checkpointed and what is saved there, by operation and value number of one `Graph`.

Plain data between planners (which choose one), `apply` (which runs one) and `Plan` (which writes one down by name).
Does not know JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum


class OwnRegions(Enum):
    """What happens to the checkpoint regions that a model brings along (`nnx.remat`, `jax.checkpoint`)."""

    #: Each stays one operation, recomputed as the user wrote it.
    KEEP = "keep"
    #: Each is opened, and the operations inside are planned like all others.
    REPLACE = "replace"


# Those of jax.checkpoint_policies that are policies; the others there are functions that make one (jax 0.10.2).
POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


class Offload(Enum):
    """Whether saved values may be kept in the host's memory."""

    #: All stay on the device.
    NEVER = "never"
    #: In loops, where copies run beside the computation of other iterations.
    HOST = "host"


@dataclass(frozen=True)
class Region:
    """Consecutive operations `[start, stop)` under one `jax.checkpoint`.

    Attributes:
      saved: ids of values defined inside, and in no inner region, that are kept for the backward pass; everything else is
        recomputed.
      policy: instead of `saved`, one of `POLICIES`: what it saves in loops, branches and derivative rules has no id here.
      prevent_cse: as in `jax.checkpoint`; needless in the body of a loop, where forward and backward are loops apart.
      inner: regions inside, in order, disjoint: what they keep is kept only while this region is run again.
      offloaded: ids of saved values that are kept in the host's memory; only in the bodies of loops.
    """

    start: int
    stop: int
    saved: frozenset[int] = frozenset()
    policy: str | None = None
    prevent_cse: bool = True
    inner: tuple[Region, ...] = ()
    offloaded: frozenset[int] = frozenset()

    def with_inner(self) -> Iterator[Region]:
        """The region and all regions inside it, outer ones first."""
        yield self
        for region in self.inner:
            yield from region.with_inner()


@dataclass(frozen=True)
class LoopPart:
    """Consecutive iterations of a loop that are treated alike.

    Attributes:
      body: what is configured in the loop's body.
      iterations: how many; None for all that are left.
      chunk: so many iterations at a time form a region around the body's own: only what one chunk hands to the next is kept
        until then. 0 for none. Iterations that do not fill a chunk follow the last one, outside of any.
    """

    body: Configuration
    iterations: int | None = None
    chunk: int = 0


@dataclass(frozen=True)
class LoopPlan:
    """What is done with a loop: its iterations in parts, in the order in which they run."""

    parts: tuple[LoopPart, ...]

    @property
    def body(self) -> Configuration | None:
        """The configuration of the body of a loop that stays one loop; None for one in parts or chunks.

        A single part that counts its iterations is a loop in parts too: whether they are all is known with the loop's length.
        """
        whole = len(self.parts) == 1 and not self.parts[0].chunk and self.parts[0].iterations is None
        return self.parts[0].body if whole else None

    def variants(self) -> Iterator[Configuration]:
        """The configurations of the body that occur."""
        yield from dict.fromkeys(part.body for part in self.parts)


def in_every_iteration(body: Configuration) -> LoopPlan:
    """A loop that stays one loop, with its body configured."""
    return LoopPlan((LoopPart(body),))


@dataclass(frozen=True)
class Configuration:
    """Regions in order, disjoint; and what is done with loops.

    Attributes:
      loops: pairs of a loop's operation index and what is done with it.
    """

    regions: tuple[Region, ...] = ()
    loops: tuple[tuple[int, LoopPlan], ...] = ()

    def loop(self, operation: int) -> LoopPlan | None:
        """What is done with one loop, None if it is left as it is."""
        return next((c for index, c in self.loops if index == operation), None)

    def all_regions(self) -> Iterator[Region]:
        """The regions and all regions inside them; not those in the bodies of loops."""
        for region in self.regions:
            yield from region.with_inner()

    def with_bodies(self, change: Callable[[int, Configuration], Configuration]) -> Configuration:
        """The same with the configuration of every loop's body changed; `change` gets the loop's operation index too."""
        loops = tuple(
            (index, LoopPlan(tuple(replace(part, body=change(index, part.body)) for part in plan.parts)))
            for index, plan in self.loops
        )
        return replace(self, loops=loops)


PLAIN = Configuration()
