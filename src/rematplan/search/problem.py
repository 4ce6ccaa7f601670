"""One workload on one target, ready to be lowered and measured under any configuration.

Comes in: a workload and a target. Goes out: `Problem`, which turns configurations into measurements: of the whole step,
or of the step with repeated blocks cut out, from which the whole is extrapolated. Does not know which configurations
are worth trying.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from rematplan import apply
from rematplan.planner.blocks import Block, Granularity, Run, blocks, runs
from rematplan.planner.price import Rates
from rematplan.program.configuration import PLAIN, Configuration, OwnRegions
from rematplan.program.fold import CannotFold, Folded, fold
from rematplan.program.loss import traced_loss
from rematplan.program.trace import Traced
from rematplan.target import compiler
from rematplan.target.compiler import Method, Options, Program
from rematplan.target.measurement import Measurement, Source
from rematplan.target.target import Target
from rematplan.workload import Workload

Progress = Callable[[str], None]

# Shorter runs are measured whole, which costs less than the two programs that they would be extrapolated from.
SHORTEST_FOLDED_RUN = 12
# Smaller programs are probed whole in a second or two, and nothing has to be extrapolated.
FEWEST_FOLDED_OPERATIONS = 1200
# How many repetitions are kept in the two programs that a whole one is extrapolated from. With fewer than four, a TPU
# keeps what is saved in on-chip memory, and the straight line through both is far off (v5e, libtpu 0.0.52).
FOLDED_REPETITIONS = (4, 6)
WORKERS = 2


@dataclass(frozen=True)
class Figures:
    """What one configuration needs and costs on the target, before it is compiled itself.

    Attributes:
      required_bytes, peak_bytes, seconds: extrapolated from shortened programs if `folded`, else of the probe.
      measurements: what they come from: weights that sum to one, and measurements.
    """

    required_bytes: int
    peak_bytes: int
    seconds: float
    folded: bool
    measurements: tuple[tuple[float, Measurement], ...]

    def as_measurement(self) -> Measurement:
        """The figures with their sources; timeline and parts are those of the longest program that was probed."""
        found = self.measurements[-1][1]
        if self.folded:
            found = replace(
                found,
                source=Source.PREDICTED,
                required_bytes=self.required_bytes,
                peak_bytes=self.peak_bytes,
                sources={
                    **found.sources,
                    "required_bytes": "extrapolated from programs with repeated blocks cut out",
                    "peak_bytes": "extrapolated from programs with repeated blocks cut out",
                },
            )
        if self.seconds == found.seconds:
            return found
        sources = {**found.sources, "seconds": "predicted from cycles of programs like it"}
        return replace(found, seconds=self.seconds, sources=sources)


class Problem:
    """A workload on a target.

    Attributes:
      traced: the loss as a traced program.
      coarse, fine: its blocks, one for each repeated period, and one for each good cut.
      probes, compiles: how many measurements were asked for.
      tracing_seconds, lowering_seconds, compiling_seconds: wall time so far; lowering is part of neither probes nor compiles.
    """

    def __init__(
        self, work: Workload, target: Target, *, progress: Progress, own_regions: OwnRegions = OwnRegions.KEEP
    ):
        self.work = work
        self.target = target
        self.own_regions = own_regions
        self.say = progress
        self.probes = 0
        self.compiles = 0
        self.lowering_seconds = 0.0
        self.compiling_seconds = 0.0
        begun = time.monotonic()
        progress("tracing")
        self.traced: Traced = traced_loss(work, own_regions=own_regions)
        self.graph = self.traced.graph
        self.coarse: tuple[Block, ...] = blocks(self.graph, granularity=Granularity.COARSE)
        self.fine: tuple[Block, ...] = blocks(self.graph)
        self.rates = rates_of(target)
        self.tracing_seconds = time.monotonic() - begun

    @cached_property
    def repeated(self) -> Run | None:
        """The run of repeated coarse blocks that does most of the work, if it is long enough to be worth cutting."""
        if len(self.graph.operations) < FEWEST_FOLDED_OPERATIONS:
            return None
        long = [r for r in runs(self.coarse) if r.count * r.period >= SHORTEST_FOLDED_RUN and r.count >= 2]
        work = lambda r: sum(b.flops for b in self.coarse[r.first : r.stop])  # noqa: E731
        return max(long, key=work, default=None)

    @property
    def default_step(self) -> bool:
        """Whether the step is loss and gradients alone, so that a shortened program stands for it."""
        return self.work.optimizer is None and self.work.make_step is None

    def whole(self, configuration: Configuration) -> Program:
        """The whole training step under a configuration."""
        # without regions the program is measured as the user wrote it
        as_written = configuration == PLAIN and self.own_regions is OwnRegions.KEEP
        planned = None if as_written else apply.configured(self.traced, configuration)
        step = self.work.step(planned)
        return self._lower(step.function, step.leaves, donated=step.donated, name=self.work.name)

    def _lower(
        self, function: Callable[..., Any], leaves: Sequence[Any], *, donated: Sequence[int] = (), name: str
    ) -> Program:
        begun = time.monotonic()
        program = compiler.lower(function, leaves, donated=donated, target=self.target, name=name)
        self.lowering_seconds += time.monotonic() - begun
        return program

    def shortened(self, configuration: Configuration, repetitions: int) -> Program:
        """Loss and gradients with only `repetitions` of the repeated blocks.

        Raises:
          CannotFold: the blocks cannot be cut out, or the configuration does not repeat with them.
        """
        folded = self._folded(repetitions)
        short = apply.configured(folded.traced, folded.configuration(configuration))
        positions = folded.traced.differentiated

        def step(*leaves: Any) -> Any:
            def loss(parameters: Sequence[Any]) -> Any:
                full = list(leaves)
                for position, x in zip(positions, parameters, strict=True):
                    full[position] = x
                outputs = short(*full)
                return outputs[0], outputs[1:]

            return jax.value_and_grad(loss, has_aux=True)([leaves[i] for i in positions])

        leaves = [
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (folded.traced.avals[i] for i in folded.traced.graph.inputs)
        ]
        return self._lower(step, leaves, name=f"{self.work.name}, {repetitions} repetitions")

    def _folded(self, repetitions: int) -> Folded:
        if not hasattr(self, "_foldings"):
            self._foldings: dict[int, Folded] = {}
        if repetitions not in self._foldings:
            run = self.repeated
            if run is None or repetitions >= run.count:
                raise CannotFold("there is no repeated block to cut out")
            self._foldings[repetitions] = fold_run(self.traced, self.coarse, run, repetitions)
        return self._foldings[repetitions]

    def figures(
        self, tasks: Sequence[tuple[str, Configuration, int | None]], seconds: Callable[[Measurement], float]
    ) -> list[Figures]:
        """Probes configurations, shortened where they repeat.

        Args:
          tasks: a name for progress, the configuration, and after how many blocks it repeats (None: not at all).
          seconds: reads the time of a probe.
        """
        with ThreadPoolExecutor(WORKERS) as pool:
            waiting = []
            for number, (name, configuration, period) in enumerate(tasks):
                self.say(f"probing {number + 1} of {len(tasks)}: {name}")
                waiting.append(self._submit(pool, configuration, period))
            return [self._combine([(n, f.result()) for n, f in parts], seconds) for parts in waiting]

    def _submit(
        self, pool: ThreadPoolExecutor, configuration: Configuration, period: int | None
    ) -> list[tuple[int | None, Future[Measurement]]]:
        run = self.repeated
        programs: list[tuple[int | None, Program]] = []
        if run is not None and period is not None and self.default_step and FOLDED_REPETITIONS[-1] * period < run.count:
            try:
                programs = [(n * period, self.shortened(configuration, n * period)) for n in FOLDED_REPETITIONS]
            except CannotFold:
                programs = []
        programs = programs or [(None, self.whole(configuration))]
        self.probes += len(programs)
        measure = lambda program: compiler.measure(program, target=self.target, method=Method.PROBE)  # noqa: E731
        return [(n, pool.submit(measure, program)) for n, program in programs]

    def _combine(self, parts: list[tuple[int | None, Measurement]], seconds: Callable[[Measurement], float]) -> Figures:
        if len(parts) == 1:
            m = parts[0][1]
            return Figures(m.required_bytes, m.peak_bytes, seconds(m), folded=False, measurements=((1.0, m),))
        (few, short), (more, long) = parts
        assert few is not None and more is not None and self.repeated is not None
        # the straight line through both, read at the full count
        weight = (self.repeated.count - few) / (more - few)
        line = lambda a, b: a + weight * (b - a)  # noqa: E731
        return Figures(
            required_bytes=int(line(short.required_bytes, long.required_bytes)),
            peak_bytes=int(line(short.peak_bytes, long.peak_bytes)),
            seconds=line(seconds(short), seconds(long)),
            folded=True,
            measurements=((1 - weight, short), (weight, long)),
        )

    def compile(self, name: str, configuration: Configuration, options: Options) -> Measurement:
        """A full compile of the whole step."""
        self.say(f"compiling {name}")
        program = self.whole(configuration)
        self.compiles += 1
        begun = time.monotonic()
        (measured,) = compiler.measure_many([(program, options)], self.target, workers=1)
        self.compiling_seconds += time.monotonic() - begun
        return measured


def fold_run(traced: Traced, chain: Sequence[Block], run: Run, repetitions: int) -> Folded:
    """Keeps the first `repetitions - 1` repetitions of a run and the last one.

    Raises:
      CannotFold: repetitions do not hand on the same values.
    """
    first_dropped = run.first + (repetitions - 1) * run.period
    last_dropped = run.stop - run.period
    before, after = chain[first_dropped - 1], chain[last_dropped - 1]
    if len(before.outputs) != len(after.outputs):
        raise CannotFold("repetitions do not hand on the same values")
    stands_for = dict(zip(after.outputs, before.outputs, strict=True))
    return fold(traced, dropped=[(chain[first_dropped].start, chain[last_dropped].start)], stands_for=stands_for)


def rates_of(target: Target) -> Rates:
    """A target's rates, for ranking only; those of a middling accelerator where there are none."""
    chip = target.chip
    if chip is None or not chip.peak_flops or not chip.bandwidth:
        return Rates({"float32": 5e13, "bfloat16": 1e14}, 1e12)
    names = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}
    flops = {names.get(k, k): v for k, v in chip.peak_flops.items()}
    return Rates(flops, chip.bandwidth)
