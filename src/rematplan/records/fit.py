"""What `fit` found: for each target the largest value with and without a plan, and the next one, which does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.errors import InputError
from rematplan.records.plain import plain
from rematplan.report.display import Displayed


@dataclass(frozen=True)
class FitPoint:
    """One value on one target, with the smallest or the fastest plan that was found for it, or without one.

    Attributes:
      fits: whether it keeps the budget and, where one was asked for, the slowdown.
      required_bytes: what must be free for one step; None where the compiler refused the program.
      seconds: of one step; None where the target gives none, or where it does not fit.
      plain_seconds: of one step without checkpointing, by the same clock; None where it is not known or was not needed.
      source: "compiled", "probed" or "predicted" (from programs with repeated blocks cut out, or from compiles before):
        of the plan.
      reason: why it does not fit; empty if it does.
      clock: where the seconds come from, as in `Measurement.sources`: "cycles" or "roofline"; empty without seconds. Times of
        two clocks only rank.
      plain_source: where `plain_seconds` come from, as `source`; "predicted" where the chip has no room for a full compile
        without checkpointing; empty without them.
    """

    value: int
    fits: bool
    required_bytes: int | None
    seconds: float | None
    plain_seconds: float | None
    source: str
    reason: str = ""
    clock: str = ""
    plain_source: str = ""

    @property
    def slowdown(self) -> float | None:
        """Seconds with the plan over seconds without, at this value; at most 1 is no slower."""
        if not self.seconds or not self.plain_seconds:
            return None
        return self.seconds / self.plain_seconds

    def to_json(self) -> dict[str, Any]:
        """One key an attribute, and `slowdown`."""
        return {**plain(self), "slowdown": plain(self.slowdown)}


@dataclass(frozen=True)
class FitRow:
    """One target.

    Attributes:
      memory_bytes: of one device, what its compiler lets a program have; None if unknown.
      device_count: devices of the target.
      budget_bytes: what one step may take on a device.
      plain: the largest value without checkpointing; None if the least one does not fit.
      plain_above: the next value, which does not fit without; None if there is none in the range.
      best: the largest value with a plan; compiled in full. None if the least one does not fit.
      above: the next value, for which no plan was found, or the least one if that does not fit; None if all of the range
        does.
      plan: the plan file's document for `best`, which `Plan.load` takes.
      price_per_hour: of one device, as it was given; in any currency.
      tried: every value that was looked at with plans.
      probes, compiles: measurements that were asked for; what was found in the cache counts too.
      search_seconds: how long it took.
    """

    target: str
    memory_bytes: int | None
    device_count: int
    budget_bytes: int
    plain: FitPoint | None
    plain_above: FitPoint | None
    best: FitPoint | None
    above: FitPoint | None
    plan: Mapping[str, Any] | None
    price_per_hour: float | None
    tried: tuple[FitPoint, ...]
    probes: int
    compiles: int
    search_seconds: float

    @property
    def throughput(self) -> float | None:
        """Units of the varied keyword per second at the largest value, such as samples for a batch."""
        return self.best.value / self.best.seconds if self.best is not None and self.best.seconds else None

    @property
    def cost_per_million(self) -> float | None:
        """Price of a million units of the varied keyword, on all devices of the target."""
        if self.price_per_hour is None or self.throughput is None:
            return None
        return self.price_per_hour * self.device_count / 3600 / self.throughput * 1e6

    def to_json(self) -> dict[str, Any]:
        """One key an attribute, `throughput` and `cost_per_million`."""
        points = ("plain", "plain_above", "best", "above")
        return {
            **plain(self),
            **{name: p.to_json() if (p := getattr(self, name)) is not None else None for name in points},
            "tried": [p.to_json() for p in self.tried],
            "throughput": plain(self.throughput),
            "cost_per_million": plain(self.cost_per_million),
        }


@dataclass(frozen=True)
class SkippedValue:
    """A value that the factory refused."""

    value: int
    reason: str


@dataclass(frozen=True)
class FitRecord(Displayed):
    """The largest value of one keyword that fits each target.

    Attributes:
      workload: its name.
      keywords: the factory's other arguments, as they were given.
      vary: the keyword.
      low: the least value that was asked for, and `high` the greatest; None where there was none.
      slowdown: the most that a plan may take, in times of no checkpointing; None where it may take anything.
      rows: one for each target, in the order given.
      skipped: values that the factory refused.
    """

    KIND = "fit"

    workload: str
    keywords: Mapping[str, Any]
    vary: str
    low: int
    high: int | None
    multiple_of: int
    slowdown: float | None
    rows: tuple[FitRow, ...]
    skipped: tuple[SkippedValue, ...] = ()

    @property
    def smallest(self) -> str | None:
        """The target with the least memory, over all of its devices, of those that train the least value."""
        able = [r for r in self.rows if r.best is not None]
        memory = lambda r: (r.memory_bytes or r.budget_bytes) * r.device_count
        return min(able, key=memory).target if able else None

    @property
    def cheapest(self) -> str | None:
        """The target with the lowest price of a unit; None where no prices were given."""
        priced = [(r.cost_per_million, r.target) for r in self.rows if r.cost_per_million is not None]
        return min(priced)[1] if priced else None

    def row(self, target: str) -> FitRow:
        """What was found for a target.

        Raises:
          InputError: it was not asked for.
        """
        found = next((r for r in self.rows if r.target == target), None)
        if found is None:
            raise InputError(f"{target!r} is not in this record; it has {', '.join(r.target for r in self.rows)}.")
        return found

    def to_json(self) -> dict[str, Any]:
        """One key an attribute, `smallest` and `cheapest`."""
        return {
            **plain(self),
            "rows": [row.to_json() for row in self.rows],
            "smallest": self.smallest,
            "cheapest": self.cheapest,
        }
