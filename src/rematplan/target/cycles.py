"""Cycles of a program that was only probed, from programs like it that were compiled in full.

A full TPU compile takes ten times as long as a probe, and only it says how many cycles each fusion takes. But a fusion
takes the same cycles in every program, and variants of one model (more saved here, a region there) share most of them.
So a `CycleTable` learns cycles by fingerprint from full measurements and adds them up along a probe's schedule. Fusions
that it has not met are priced by the kinds of work in them, times what the most similar ones that it has met took
beyond their price.

    CycleTable.remember(full_measurement.costs, cache, target)
    CycleTable.load(cache, target).predict(probe.costs).cycles

Eighteen programs on v5e (perceptrons, transformers, convolutions, loops), mean error of the predicted cycles: 16 % when
nothing was learned, 7 % (median over the programs 5 %) from one other variant of the same program.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rematplan.target.cache import Cache
from rematplan.target.fingerprint import UNPRICED
from rematplan.target.measurement import InstructionCost
from rematplan.target.target import Target, compiler_versions

_FORMAT = 2
_MOST_FILES = 32  # of a table, before they are put together into one
# Prices before anything is learned: cycles of an instruction, then of each field of `work.Work`. Fitted to the fusions
# of the six-block GPT on v5e; seconds are priced at the chip's clock, so that the first two carry over to other chips.
_PRIOR_FIXED = 500.0
_PRIOR_PER_SECOND = (
    0.5,  # matrix_seconds: half, because the rest of a product's time is in what it writes
    1.15,  # hbm_seconds
)
_PRIOR = (
    0.3 / 4096,  # bytes
    0.5 / 1024,  # transcendentals
    4.0 / 1024,  # reduced
    3.3 / 2048,  # product_bytes
    0.3 / 1024,  # converted
    4.0 / 1024,  # permuted
)
# How many of the most similar fusions correct a price, how fast their weight falls with distance (in root mean square
# differences of the logarithm of each kind of work's price), and the weight of "as priced" beside them.
_NEIGHBOURS = 5
_REACH = 0.15
_AS_PRICED = 0.3
_NOTHING = 100.0  # cycles; prices far below are alike


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

    def __init__(self, clock_hz: float = math.nan) -> None:
        """Nothing is learned yet. The chip's clock prices what was not met; what only learns needs none."""
        self._clock_hz = clock_hz
        self._entries: dict[str, _Entry] = {}
        self._met: tuple[Any, Any] | None = None  # of every entry the shares of its price, and what it took beyond

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
        """Cycles of a program from its kinds of instructions; from prior prices alone if nothing was learned yet."""
        known = 0.0
        strange: list[InstructionCost] = []
        for cost in costs:
            entry = self._entries.get(cost.fingerprint) or self._entries.get(cost.fingerprint + UNPRICED)
            if entry is not None:
                known += cost.count * entry.cycles
            else:
                strange.append(cost)
        total = known + self._priced(strange)
        return CyclePrediction(total, known / total if total else 1.0)

    def _learn(self, fingerprint: str, entry: _Entry) -> None:
        if fingerprint not in self._entries:
            self._entries[fingerprint] = entry
            self._met = None

    def _priced(self, costs: list[InstructionCost]) -> float:
        """Cycles of instructions that were not met, by their work and by what is similar."""
        import numpy as np

        if not costs:
            return 0.0
        counts = np.array([float(cost.count) for cost in costs])
        shares = _shares([cost.work for cost in costs], self._clock_hz)
        cycles = shares.sum(axis=1)
        if self._met is None:
            entries = [e for k, e in self._entries.items() if e.cycles > 0 and not k.endswith(UNPRICED)]
            met = _shares([entry.work for entry in entries], self._clock_hz)
            beyond = np.log(np.array([entry.cycles for entry in entries])) - np.log(met.sum(axis=1))
            self._met = np.log1p(met / _NOTHING), beyond
        places, beyond = self._met
        if len(beyond):
            for row, place in enumerate(np.log1p(shares / _NOTHING)):
                distance = np.sqrt(((places - place) ** 2).mean(axis=1))
                nearest = np.argsort(distance, kind="stable")[:_NEIGHBOURS]
                weights = np.exp(-distance[nearest] / _REACH)
                cycles[row] *= np.exp((weights * beyond[nearest]).sum() / (weights.sum() + _AS_PRICED))
        return float((counts * cycles).sum())

    def save(self, cache: Cache, target: Target) -> None:
        """Keep in the cache folder what was learned and is not there yet.

        Every call writes a file of its own, which is never changed: processes and machines that learn at the same time
        lose nothing to each other.
        """
        folder = _folder(target)
        names = cache.names(folder)
        there = CycleTable()
        read = {name: cache.read(name) for name in names}
        for document in read.values():
            there._join(document)
        new = {k: entry for k, entry in self._entries.items() if k not in there._entries}
        if new:
            _write(cache, folder, new)
        if len(names) > _MOST_FILES:
            # Files that others write meanwhile are not among these, and files that could not be read stay.
            _write(cache, folder, there._entries)
            for name in {name for name, document in read.items() if document is not None} - {
                _name(folder, there._entries)
            }:
                cache.remove(name)

    @staticmethod
    def remember(costs: Iterable[InstructionCost], cache: Cache, target: Target) -> None:
        """Adds what one full measurement says to what is kept in the cache folder."""
        table = CycleTable()
        table.add(costs)
        table.save(cache, target)

    @staticmethod
    def load(cache: Cache, target: Target) -> CycleTable:
        """What was learned before on this chip and compiler version; empty if nothing was."""
        clock_hz = target.chip.clock_hz if target.chip else math.nan
        while True:
            table = CycleTable(clock_hz)
            names = cache.names(_folder(target))
            documents = [cache.read(name) for name in names]
            if any(d is None for d in documents) and cache.names(_folder(target)) != names:
                continue  # another process put them together meanwhile
            for document in documents:
                table._join(document)
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


def only_probed(
    probed: Iterable[InstructionCost], compiled: Iterable[InstructionCost], clock_hz: float
) -> list[InstructionCost]:
    """Prices of what a probe of a program has and its full compile does not, so that the probe costs what the compile does.

    Of programs of several devices the compiler joins products and transfers after a probe has stopped: half of the kinds of
    instructions in the probe do not come back. They share what the compile has beyond the kinds that both have, in proportion
    to their work.

    Returns:
      Costs that are executed no time: to learn from, not to add up.
    """
    entries = {cost.fingerprint: float(cost.cycles or 0) for cost in compiled}
    total = sum(cost.count * float(cost.cycles or 0) for cost in compiled)
    probed = tuple(probed)
    strange = [cost for cost in probed if cost.fingerprint not in entries]
    left = total - sum(cost.count * entries[cost.fingerprint] for cost in probed if cost.fingerprint in entries)
    if not strange or left <= 0:
        return []
    priced = [float(sum(row)) for row in _shares([cost.work for cost in strange], clock_hz)]
    scale = left / max(sum(cost.count * price for cost, price in zip(strange, priced, strict=True)), 1.0)
    return [
        replace(cost, fingerprint=cost.fingerprint + UNPRICED, count=0, cycles=round(scale * price))
        for cost, price in zip(strange, priced, strict=True)
    ]


def _shares(works: list[tuple[float, ...]], clock_hz: float) -> Any:
    """Cycles of each kind of work in each instruction, at the prior prices, [instructions, 1 + kinds]."""
    import numpy as np

    prices = np.array((_PRIOR_FIXED, *(share * clock_hz for share in _PRIOR_PER_SECOND), *_PRIOR))
    amounts = np.zeros((len(works), len(prices)))
    amounts[:, 0] = 1.0
    for row, work in enumerate(works):
        amounts[row, 1 : 1 + len(work)] = work[: len(prices) - 1]
    return amounts * prices


def _folder(target: Target) -> str:
    chip = target.chip.name if target.chip else target.name
    versions = hashlib.sha256(json.dumps(compiler_versions(target), sort_keys=True).encode()).hexdigest()[:12]
    return f"cycles-{chip}-{versions}"


def _document(entries: Mapping[str, _Entry]) -> dict[str, Any]:
    return {"format": _FORMAT, "entries": {k: [e.cycles, list(e.work)] for k, e in sorted(entries.items())}}


def _name(folder: str, entries: Mapping[str, _Entry]) -> str:
    """By content: the same entries are the same file, whoever writes them."""
    return f"{folder}/{hashlib.sha256(json.dumps(_document(entries)).encode()).hexdigest()[:24]}.json"


def _write(cache: Cache, folder: str, entries: Mapping[str, _Entry]) -> None:
    cache.write(_name(folder, entries), _document(entries))
