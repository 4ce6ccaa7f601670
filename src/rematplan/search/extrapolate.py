"""Figures of a deep program from shortened ones.

Comes in: measurements of a program with most of its repeated blocks cut out. Goes out: what the whole needs and takes.
Two lengths make a straight line. Where every region lies in one repetition, what one more repetition keeps is known, and
what is outside the repetitions takes the time that it takes without regions; then one length is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rematplan.planner.blocks import Block, Run
from rematplan.planner.menu import stretch
from rematplan.planner.price import Rates
from rematplan.program.configuration import Configuration
from rematplan.program.graph import Graph
from rematplan.target.measurement import Measurement, Source, Timeline

# How many repetitions are kept at least in shortened programs. With fewer than four, a TPU keeps what is saved in on-chip
# memory, and what is extrapolated is far off (v5e, libtpu 0.0.52).
FEWEST, MORE = 4, 6


_FROM_SHORTER = "extrapolated from programs with repeated blocks cut out"
_EXTRAPOLATED = ("required_bytes", "peak_bytes", "argument_bytes", "flops", "bytes_accessed")


@dataclass(frozen=True)
class Figures:
    """What one configuration needs and costs on the target, before it is compiled itself.

    Attributes:
      required_bytes, peak_bytes, seconds: extrapolated from shortened programs if `folded`, else of the probe.
      measurements: what they come from: weights that sum to one, and measurements; last the longest of the configuration.
    """

    required_bytes: int
    peak_bytes: int
    seconds: float
    folded: bool
    measurements: tuple[tuple[float, Measurement], ...]

    def as_measurement(self) -> Measurement:
        """The figures with their sources; without timeline and modules where those are not of this very program."""
        found = self.measurements[-1][1]
        if self.folded:
            found = replace(
                found,
                source=Source.PREDICTED,
                required_bytes=self.required_bytes,
                peak_bytes=self.peak_bytes,
                argument_bytes=int(self._line("argument_bytes")),
                output_bytes=int(self._line("output_bytes")),
                alias_bytes=int(self._line("alias_bytes")),
                temporary_bytes=max(
                    0, int(self.required_bytes - self._line("argument_bytes") - self._line("output_bytes"))
                ),
                flops=self._line("flops"),
                bytes_accessed=self._line("bytes_accessed"),
                cycles=None,
                timeline=Timeline(),
                modules=(),
                sources={**found.sources, **dict.fromkeys(_EXTRAPOLATED, _FROM_SHORTER)},
            )
        if self.seconds == found.seconds:
            return found
        sources = {**found.sources, "seconds": "predicted from cycles of programs like it"}
        return replace(found, seconds=self.seconds, sources=sources, modules=())

    def _line(self, field: str) -> float:
        """A figure that adds up over repetitions, of the whole program."""
        return sum(weight * (getattr(m, field) or 0) for weight, m in self.measurements)


@dataclass(frozen=True)
class Shortened:
    """A measurement with so many repetitions left."""

    repetitions: int
    measurement: Measurement


def lengths(period: int, rest: int = 0) -> tuple[int, int]:
    """Two numbers of repetitions that a configuration of this period can be cut to: whole periods, and a rest."""
    whole = lambda least: rest + max(-(-(least - rest) // period), 1) * period
    return whole(FEWEST), max(whole(MORE), whole(FEWEST) + period)


def as_probed(m: Measurement, seconds: Callable[[Measurement], float]) -> Figures:
    """Figures of a program that was probed whole."""
    return Figures(m.required_bytes, m.peak_bytes, seconds(m), folded=False, measurements=((1.0, m),))


def from_two(short: Shortened, long: Shortened, count: int, seconds: Callable[[Measurement], float]) -> Figures:
    """The straight line through two lengths, read at the full count."""
    weight = (count - short.repetitions) / (long.repetitions - short.repetitions)
    line = lambda a, b: a + weight * (b - a)
    a, b = short.measurement, long.measurement
    return Figures(
        required_bytes=int(line(a.required_bytes, b.required_bytes)),
        peak_bytes=int(line(a.peak_bytes, b.peak_bytes)),
        seconds=line(seconds(a), seconds(b)),
        folded=True,
        measurements=((1 - weight, a), (weight, b)),
    )


def from_one(
    found: Shortened,
    plain: tuple[Shortened, Shortened],
    kept_bytes: float,
    count: int,
    seconds: Callable[[Measurement], float],
) -> Figures:
    """One length, and what each further repetition adds.

    Args:
      plain: the program without regions at two lengths: what arguments and outputs a repetition has, and the time of
        what is outside all of them.
      kept_bytes: what a repetition keeps under the configuration.
    """
    short, long = plain
    apart = long.repetitions - short.repetitions
    arguments = (long.measurement.argument_bytes - short.measurement.argument_bytes) / apart
    outputs = (_outputs(long.measurement) - _outputs(short.measurement)) / apart
    further = count - found.repetitions
    grown = count / found.repetitions
    # seconds outside of repetitions, a - n (b - a) / (m - n), counted once and not as often as repetitions were
    weights = (
        ((1 - grown) * long.repetitions / apart, short.measurement),
        (-(1 - grown) * short.repetitions / apart, long.measurement),
        (grown, found.measurement),
    )
    m = found.measurement
    # kept values die as gradients are made: the peak lies at the end that has more
    live = arguments + max(kept_bytes, outputs)
    return Figures(
        required_bytes=int(m.required_bytes + further * (arguments + outputs + kept_bytes)),
        peak_bytes=int(m.peak_bytes + further * live),
        seconds=sum(weight * seconds(each) for weight, each in weights),
        folded=True,
        measurements=weights,
    )


def larger(one: Figures, other: Figures) -> Figures:
    """Time of the one, the larger need of both: a line through short programs misses what on-chip memory took in them."""
    return replace(
        one,
        required_bytes=max(one.required_bytes, other.required_bytes),
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
    )


def kept_in_a_repetition(
    graph: Graph, chain: Sequence[Block], run: Run, configuration: Configuration, period: int, *, rates: Rates
) -> float | None:
    """Bytes that each repetition of a run keeps; None where that is not known from the regions alone.

    It is known where all that works in the run lies in regions, each of which covers `period` repetitions at most.
    """
    low, high = chain[run.first].start, chain[run.stop - 1].stop
    regions = [r for r in configuration.regions if r.start < high and low < r.stop]
    starts = [chain[run.first + i * run.period].start for i in range(run.count)]
    if configuration.loops or any(r.inner or r.offloaded or r.policy is not None for r in regions):
        return None
    if any(sum(r.start < s < r.stop for s in starts) >= period for r in regions):
        return None
    working = [b for b in chain[run.first : run.stop] if b.flops > 0]
    if any(not any(r.start < b.stop and b.start < r.stop for r in regions) for b in working):
        return None
    # of what a policy names only that is kept which some derivative or some recomputation reads
    saved = [stretch(graph, r.start, r.stop, rates=rates).save_set(r.saved).values for r in regions]
    kept = {v for values in saved for v in values} | {
        v for r in regions for v in read_from_before(graph, r.start, r.stop)
    }
    # whole periods, without the last regions: what those hand on is no region's input any more
    repetitions = period * max(run.count // period - 1, 1)
    end = starts[repetitions] if repetitions < run.count else high
    return sum(graph.values[v].bytes for v in kept if low <= graph.producer[v] < end) / repetitions


def read_from_before(graph: Graph, start: int, stop: int) -> set[int]:
    """Values that these operations read and that are there before them: inputs too."""
    return {v for op in graph.operations[start:stop] for v in op.inputs if graph.producer[v] < start}


def _outputs(m: Measurement) -> int:
    return m.output_bytes - m.alias_bytes
