"""Cycles of a program that was only probed, from programs like it that were compiled in full.

A full TPU compile takes ten times as long as a probe, and only it says how many cycles each fusion takes. But a fusion
takes the same cycles in every program, and variants of one model (more saved here, a region there) share most of them.
So a `CycleTable` learns cycles by fingerprint from full measurements and adds them up along a probe's schedule. Fusions
that it has not met are priced by the kinds of work in them, at prices fitted to all that it has met.

    table = CycleTable.load(cache, target)
    table.add(full_measurement.costs)
    table.predict(probe.costs).cycles
    table.save(cache, target)

Eight variants of a six-block GPT on v5e (plain, per block, dots, last block plain, and four sets of saved values), each
predicted from full compiles of some others: error 5.3 % on average and 6.5 % at most with none (all too low, so they
rank right), 2.0 % and 9.4 % with one, 1.5 % and 5.9 % with two, 0.7 % and 2.6 % with all seven; its own gives 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rematplan.target.cache import Cache
from rematplan.target.measurement import InstructionCost
from rematplan.target.target import Target, compiler_versions

_FORMAT = 2
# Prices before anything is learned: cycles of an instruction, then of each field of `work.Work`. Fitted to the fusions
# of the six-block GPT on v5e; seconds are priced at the clock, so that the first two carry over to other chips.
_PRIOR_FIXED = 500.0
_PRIOR_CLOCK = 1.5e9
_PRIOR = (
    0.5 * _PRIOR_CLOCK,  # matrix_seconds: half, because the rest of a product's time is in what it writes
    1.15 * _PRIOR_CLOCK,  # hbm_seconds
    0.3 / 4096,  # bytes
    0.5 / 1024,  # transcendentals
    4.0 / 1024,  # reduced
    3.3 / 2048,  # product_bytes
    0.3 / 1024,  # converted
    4.0 / 1024,  # permuted
)
_PRIOR_WEIGHT = 3.0  # of each prior price, in observations; 0.3 is a little worse on the GPT


@dataclass(frozen=True)
class CyclePrediction:
    """Cycles predicted for a whole program, and the part of them that comes from fusions met before."""

    cycles: float
    known_fraction: float


@dataclass(frozen=True, slots=True)
class _Entry:
    cycles: float
    work: tuple[float, ...]


class CycleTable:
    """Cycles by fingerprint, for one chip and compiler version."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._prices: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, costs: Iterable[InstructionCost]) -> None:
        """Learn from a full measurement. A probe's costs, which hold no cycles, are refused with ValueError."""
        costs = tuple(costs)
        if costs and all(cost.cycles is None for cost in costs):
            raise ValueError("these costs hold no cycles: only full measurements can be learned from")
        for cost in costs:
            # the compiler prices some kinds (custom gathers) at nothing: they add nothing to its total either
            self._learn(cost.fingerprint, _Entry(float(cost.cycles or 0), cost.work))

    def predict(self, costs: Iterable[InstructionCost]) -> CyclePrediction:
        """Cycles of a program from its kinds of instructions; from fitted prices alone if nothing was learned yet."""
        known = priced = 0.0
        prices = self._fitted()
        for cost in costs:
            entry = self._entries.get(cost.fingerprint)
            if entry is not None:
                known += cost.count * entry.cycles
            else:
                priced += cost.count * _price(cost.work, prices)
        total = known + priced
        return CyclePrediction(total, known / total if total else 1.0)

    def _learn(self, fingerprint: str, entry: _Entry) -> None:
        if fingerprint not in self._entries:
            self._entries[fingerprint] = entry
            self._prices = None

    def _fitted(self) -> tuple[float, ...]:
        """Fixed cycles and price of each kind of work: non-negative least squares on relative errors."""
        if self._prices is None:
            self._prices = _fit([entry for entry in self._entries.values() if entry.cycles > 0])
        return self._prices

    def save(self, cache: Cache, target: Target) -> None:
        """Keep what was learned in the cache folder, joined with what other processes learned meanwhile."""
        self._join(cache.read(_file(target)))
        entries = {k: [e.cycles, list(e.work)] for k, e in self._entries.items()}
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
            read = {str(k): _Entry(float(c), tuple(map(float, w))) for k, (c, w) in document["entries"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            return  # a damaged file counts as absent
        for fingerprint, entry in read.items():
            self._learn(fingerprint, entry)


def _price(work: tuple[float, ...], prices: tuple[float, ...]) -> float:
    return prices[0] + sum(n * price for n, price in zip(work, prices[1:], strict=False))


def _fit(entries: list[_Entry]) -> tuple[float, ...]:
    prior = (_PRIOR_FIXED, *_PRIOR)
    if not entries:
        return prior
    import numpy as np
    from scipy.optimize import nnls

    # columns in units of the prior prices, so that all unknowns are about 1
    amounts = np.array([(1.0, *entry.work) for entry in entries]) * np.array(prior)
    cycles = np.array([entry.cycles for entry in entries])
    pull = math.sqrt(_PRIOR_WEIGHT)
    rows = np.vstack([amounts / cycles[:, None], pull * np.eye(len(prior))])
    right = np.concatenate([np.ones(len(entries)), np.full(len(prior), pull)])
    scale, _ = nnls(rows, right)
    return tuple(float(s) * p for s, p in zip(scale, prior, strict=True))


def _file(target: Target) -> str:
    chip = target.chip.name if target.chip else target.name
    versions = hashlib.sha256(json.dumps(compiler_versions(target), sort_keys=True).encode()).hexdigest()[:12]
    return f"cycles-{chip}-{versions}.json"
