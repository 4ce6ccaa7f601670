"""Cycles of a program that was only probed, from programs like it that were compiled in full.

A full TPU compile takes ten times as long as a probe, and only it says how many cycles each fusion takes. But a
fusion takes the same cycles in every program, and variants of one model (more saved here, a region there) share most
fusions. So a `CycleTable` learns cycles by fingerprint from full measurements and adds them up along a probe's
schedule; fusions it has not met get the cycles of similar ones, or a roofline calibrated on all that it knows.

    table = CycleTable.load(cache, target)
    table.add(full_measurement.costs)
    table.predict(probe.costs).cycles
    table.save(cache, target)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rematplan.target.cache import Cache
from rematplan.target.measurement import InstructionCost
from rematplan.target.target import Target, compiler_versions

_FORMAT = 1


@dataclass(frozen=True)
class CyclePrediction:
    """Attributes:
    cycles: predicted for the whole program.
    known_fraction: the part of them from fusions met before, exactly as they are.
    similar_fraction: the part from fusions met before in another memory space.
    """

    cycles: float
    known_fraction: float
    similar_fraction: float


@dataclass(frozen=True, slots=True)
class _Entry:
    cycles: float
    similar: str
    roofline_seconds: float


class CycleTable:
    """Cycles by fingerprint, for one chip and compiler version."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._similar: dict[str, list[_Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, costs: Iterable[InstructionCost]) -> None:
        """Learn from a full measurement. A probe's costs, which hold no cycles, are refused with ValueError."""
        costs = tuple(costs)
        if costs and all(cost.cycles is None for cost in costs):
            raise ValueError("these costs hold no cycles: only full measurements can be learned from")
        for cost in costs:
            # the compiler prices some kinds (custom gathers) at nothing: they add nothing to its total either
            self._learn(cost.fingerprint, _Entry(float(cost.cycles or 0), cost.similar, cost.roofline_seconds))

    def predict(self, costs: Iterable[InstructionCost]) -> CyclePrediction:
        """Cycles of a program from its kinds of instructions. Raises ValueError if nothing was learned yet."""
        if not self._entries:
            raise ValueError("no full measurement was learned from yet")
        exact = similar = guessed = 0.0
        overhead, slope = self._calibration()
        for cost in costs:
            entry = self._entries.get(cost.fingerprint)
            if entry is not None:
                exact += cost.count * entry.cycles
            elif cost.similar in self._similar:
                alike = self._similar[cost.similar]
                similar += cost.count * sum(e.cycles for e in alike) / len(alike)
            else:
                guessed += cost.count * (overhead + slope * cost.roofline_seconds)
        total = exact + similar + guessed
        return CyclePrediction(total, exact / total if total else 1.0, similar / total if total else 0.0)

    def _learn(self, fingerprint: str, entry: _Entry) -> None:
        if fingerprint in self._entries:
            return
        self._entries[fingerprint] = entry
        self._similar.setdefault(entry.similar, []).append(entry)

    def _calibration(self) -> tuple[float, float]:
        """Fixed cycles of an instruction and cycles per second of roofline, by least squares on relative errors."""
        points = [(e.roofline_seconds, e.cycles) for e in self._entries.values() if e.cycles and e.roofline_seconds]
        # weights 1 / cycles^2: a fusion of a thousand cycles counts as much as one of a million
        s0 = s1 = s2 = t0 = t1 = 0.0
        for x, y in points:
            w = 1 / (y * y)
            s0, s1, s2, t0, t1 = s0 + w, s1 + w * x, s2 + w * x * x, t0 + w * y, t1 + w * x * y
        determinant = s0 * s2 - s1 * s1
        if determinant <= 0 or len(points) < 2:
            total = sum(x for x, _ in points)
            return 0.0, (sum(y for _, y in points) / total if total else 0.0)
        slope = (s0 * t1 - s1 * t0) / determinant
        return max(0.0, (t0 - slope * s1) / s0), max(0.0, slope)

    def save(self, cache: Cache, target: Target) -> None:
        """Keep what was learned in the cache folder, joined with what other processes learned meanwhile."""
        self._join(cache.read(_file(target)))
        entries = {k: [e.cycles, e.similar, e.roofline_seconds] for k, e in self._entries.items()}
        cache.write(_file(target), {"format": _FORMAT, "entries": entries})

    @staticmethod
    def load(cache: Cache, target: Target) -> CycleTable:
        """What was learned before on this chip and compiler version; empty if nothing was."""
        table = CycleTable()
        table._join(cache.read(_file(target)))
        return table

    def _join(self, document: Any) -> None:
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            return
        try:
            for fingerprint, (cycles, similar, roofline) in document["entries"].items():
                self._learn(fingerprint, _Entry(float(cycles), str(similar), float(roofline)))
        except (AttributeError, KeyError, TypeError, ValueError):
            return  # a damaged file counts as absent


def _file(target: Target) -> str:
    chip = target.chip.name if target.chip else target.name
    versions = hashlib.sha256(json.dumps(compiler_versions(target), sort_keys=True).encode()).hexdigest()[:12]
    return f"cycles-{chip}-{versions}.json"
