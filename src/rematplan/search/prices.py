"""Seconds of a program that was only probed.

Comes in: measurements. Goes out: seconds. A full TPU compile gives cycles; a probe gives only the schedule. Variants of one
model share most of their fused instructions, so what these were said to cost is remembered (`target/cycles.py`) and added
up; where nothing is known, a roofline on the schedule ranks.
"""

from __future__ import annotations

from rematplan.target.cache import Cache
from rematplan.target.cost import step_seconds
from rematplan.target.cycles import CycleTable
from rematplan.target.measurement import Measurement
from rematplan.target.target import Kind, Target


class Prices:
    """What programs cost on one target, by what was learnt so far."""

    def __init__(self, target: Target):
        self._target = target
        self._cycles = target.kind is Kind.TPU and target.chip is not None
        self._table = CycleTable.load(Cache.default(), target) if self._cycles else CycleTable()

    def learn(self, measurement: Measurement) -> None:
        """Takes the prices of a full compile's instructions, as the cache has already."""
        if self._cycles and measurement.cycles is not None and measurement.costs:
            self._table.add(measurement.costs)

    def seconds(self, measurement: Measurement) -> float:
        """Seconds of a program: from its cycles where there are any, else predicted from those of others, else a roofline."""
        if self._cycles and measurement.cycles is None and self._target.chip is not None:
            return step_seconds(
                self._table.predict(measurement.costs).cycles / self._target.chip.clock_hz,
                host_bytes=measurement.host_bytes,
                waiting=measurement.waiting_seconds,
                chip=self._target.chip,
            )
        if measurement.seconds is None:
            # no rates are known for this target: bytes moved rank
            return float(measurement.bytes_accessed or 0.0)
        return measurement.seconds
