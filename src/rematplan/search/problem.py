"""One workload on one target, ready to be lowered and measured under any configuration.

Comes in: a workload and a target. Goes out: `Problem`, which turns configurations into measurements: of the whole step,
or of the step with repeated blocks cut out, from which the whole is extrapolated. Does not know which configurations
are worth trying.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import jax

from rematplan import apply
from rematplan._measure import arguments_of
from rematplan.planner.blocks import Block, Granularity, Run, blocks, runs
from rematplan.planner.price import Rates
from rematplan.program.configuration import PLAIN, Configuration, OwnRegions
from rematplan.program.fold import CannotFold, Folded, fold
from rematplan.program.loss import traced_loss
from rematplan.program.trace import Traced
from rematplan.search.extrapolate import (
    Figures,
    Shortened,
    as_probed,
    from_one,
    from_two,
    kept_in_a_repetition,
    larger,
    lengths,
)
from rematplan.sharding import constrained
from rematplan.target import compiler
from rematplan.target.compiler import Method, Options, Program, SideBySide
from rematplan.target.measurement import Argument, Measurement
from rematplan.target.target import Kind, Target
from rematplan.workload import Workload

Progress = Callable[[str], None]

# Shorter runs are measured whole: nothing has to be extrapolated, and it costs hardly more.
SHORTEST_FOLDED_RUN = 12
# Smaller programs are probed whole in a second or two, and nothing has to be extrapolated.
FEWEST_FOLDED_OPERATIONS = 1200


class Problem:
    """A workload on a target.

    Attributes:
      traced: the loss as a traced program.
      coarse, fine: its blocks, one for each repeated period, and one for each good cut.
      probes, compiles: how many measurements were asked for.
      probe_once: probe under one limit alone (TPU).
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
        self.probe_once = False
        self.lowering_seconds = 0.0
        self.compiling_seconds = 0.0
        # the program without regions, shortened to both lengths: what others are extrapolated with
        self._plain: tuple[tuple[int, Future[Measurement]], tuple[int, Future[Measurement]]] | None = None
        self._arguments: tuple[Argument, ...] | None = None
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
        work = lambda r: sum(b.flops for b in self.coarse[r.first : r.stop])
        return max(long, key=work, default=None)

    @cached_property
    def folds(self) -> bool:
        """Whether programs that repeat are probed with most repetitions cut out."""
        run = self.repeated
        if run is None or not self.default_step or lengths(1)[1] >= run.count:
            return False
        try:
            self._folded(lengths(1)[0])
        except CannotFold:  # blocks that also hand on state of their own
            return False
        return True

    @property
    def probed_operations(self) -> int:
        """How many operations a program has that is probed: few, where repetitions are cut out."""
        every, run = len(self.graph.operations), self.repeated
        if run is None or not self.folds:
            return every
        repeated = self.coarse[run.stop - 1].stop - self.coarse[run.first].start
        return every - repeated * max(run.count - lengths(1)[1], 0) // run.count

    def cut_to(self, configuration: Configuration, period: int) -> tuple[int, int] | None:
        """Two numbers of repetitions that stand for all of them under a configuration; None if it is probed whole.

        Args:
          period: after how many repetitions the configuration repeats.
        """
        run = self.repeated
        if run is None or not self.folds:
            return None
        # whole periods serve every depth; where regions begin or end elsewhere than repetitions, whole periods are cut out
        for rest in dict.fromkeys((0, run.count % period)):
            with contextlib.suppress(CannotFold):
                for count in lengths(period, rest):
                    self._folded(count).configuration(configuration)
                return lengths(period, rest)
        return None

    @property
    def default_step(self) -> bool:
        """Whether the step is loss and gradients alone, so that a shortened program stands for it."""
        return self.work.optimizer is None and self.work.make_step is None

    def whole(self, configuration: Configuration) -> Program:
        """The whole training step under a configuration."""
        # without regions the program is measured as the user wrote it
        as_written = configuration == PLAIN and self.own_regions is OwnRegions.KEEP
        planned = None if as_written else apply.configured(self.traced, configuration)
        elsewhere = functools.partial(
            apply.transferred, traced=self.traced, configuration=configuration, own_regions=self.own_regions
        )
        step = self.work.step(planned, elsewhere=elsewhere)
        self._arguments = arguments_of(step)
        return self._lower(step.function, step.leaves, donated=step.donated, name=self.work.name, sources=step.sources)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What the arrays that the step takes are."""
        if self._arguments is None:
            self._arguments = arguments_of(self.work.step())
        return self._arguments

    def _lower(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        *,
        donated: Sequence[int] = (),
        name: str,
        sources: Callable[[], Sequence[int | None]] | None = None,
    ) -> Program:
        begun = time.monotonic()
        program = compiler.lower(function, leaves, donated=donated, target=self.target, name=name, sources=sources)
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
        lifted = self.work.lift(scopes=True).leaves
        leaves = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=getattr(lifted[position], "sharding", None))
            for position, aval in zip(
                folded.inputs, (folded.traced.avals[i] for i in folded.traced.graph.inputs), strict=True
            )
        ]

        def step(*arrays: Any) -> Any:
            def loss(parameters: Sequence[Any]) -> Any:
                full = list(arrays)
                for position, x in zip(positions, parameters, strict=True):
                    full[position] = x
                outputs = short(*full)
                return outputs[0], outputs[1:]

            results, gradients = jax.value_and_grad(loss, has_aux=True)([arrays[i] for i in positions])
            return results, [constrained(g, leaves[i]) for g, i in zip(gradients, positions, strict=True)]

        results = len(folded.traced.outputs)
        return self._lower(
            step,
            leaves,
            name=f"{self.work.name}, {repetitions} repetitions",
            sources=lambda: (*(None,) * results, *positions),
        )

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
          tasks: a name for progress, the configuration, and after how many repetitions it repeats (None: not at all).
          seconds: reads the time of a probe.
        """
        found: list[Figures] = []
        with SideBySide(self.target) as pool:
            waiting = []
            for number, (name, configuration, period) in enumerate(tasks):
                self.say(f"lowering probe {number + 1} of {len(tasks)}: {name}")
                waiting.append(self._submit(pool, configuration, period, seconds))
            for number, ((name, _, _), finish) in enumerate(zip(tasks, waiting, strict=True)):
                self.say(f"probing {number + 1} of {len(tasks)}: {name}")
                found.append(finish())
        return found

    def _submit(
        self,
        pool: SideBySide,
        configuration: Configuration,
        period: int | None,
        seconds: Callable[[Measurement], float],
    ) -> Callable[[], Figures]:
        """Begins to probe a configuration, and hands out what waits for its figures."""
        cut_to = self.cut_to(configuration, period) if period is not None else None
        if self.repeated is not None and period is not None and cut_to is not None:
            return self._submit_shortened(pool, self.repeated, configuration, period, cut_to, seconds)
        program = self.whole(configuration)
        if self.target.kind is Kind.TPU:  # elsewhere a probe is a compile
            compiled = compiler.known(program, Options(), target=self.target)
            if compiled is not None:
                return lambda: as_probed(compiled, seconds)
        found = self._probe(pool, program)
        return lambda: as_probed(found.result(), seconds)

    def _submit_shortened(
        self,
        pool: SideBySide,
        run: Run,
        configuration: Configuration,
        period: int,
        cut_to: tuple[int, int],
        seconds: Callable[[Measurement], float],
    ) -> Callable[[], Figures]:
        short, long = cut_to
        if self._plain is None:
            probes = [(n, self._probe(pool, self.shortened(PLAIN, n))) for n in lengths(1)]
            self._plain = ((probes[0][0], probes[0][1]), (probes[1][0], probes[1][1]))
        plain = self._plain
        if configuration == PLAIN:
            return lambda: from_two(_done(plain[0]), _done(plain[1]), run.count, seconds)
        first = short, self._probe(pool, self.shortened(configuration, short))
        kept = kept_in_a_repetition(self.graph, self.coarse, run, configuration, period, rates=self.rates)
        if kept is not None:
            return lambda: from_one(_done(first), (_done(plain[0]), _done(plain[1])), kept, run.count, seconds)
        last = long, self._probe(pool, self.shortened(configuration, long))
        return lambda: from_two(_done(first), _done(last), run.count, seconds)

    def confirmed(
        self, figures: Figures, configuration: Configuration, period: int, seconds: Callable[[Measurement], float]
    ) -> Figures:
        """Figures that were extrapolated from one length, with what a second one says."""
        run, cut_to = self.repeated, self.cut_to(configuration, period)
        assert run is not None and cut_to is not None, "what was extrapolated can be cut"
        short, long = cut_to
        with SideBySide(self.target, workers=1) as pool:
            last = Shortened(long, self._probe(pool, self.shortened(configuration, long)).result())
        first = Shortened(short, figures.measurements[-1][1])
        line = from_two(first, last, run.count, seconds)
        # only a TPU has on-chip memory for what a short program keeps
        return larger(line, figures) if self.target.kind is Kind.TPU else line

    def _probe(self, pool: SideBySide, program: Program) -> Future[Measurement]:
        self.probes += 1
        return pool.submit(program, Options(method=Method.PROBE, once=self.probe_once))

    def compile(self, name: str, configuration: Configuration, options: Options, *, number: str = "") -> Measurement:
        """A full compile of the whole step; `number` says which of how many it is."""
        took = f", {self.compiling_seconds / self.compiles:.0f} s each so far" if self.compiles else ""
        self.say(f"compiling {number or 'a plan'}{took}: {name}")
        program = self.whole(configuration)
        self.compiles += 1
        begun = time.monotonic()
        (measured,) = compiler.measure_many([(program, options)], self.target, workers=1)
        self.compiling_seconds += time.monotonic() - begun
        return measured


def _done(probe: tuple[int, Future[Measurement]]) -> Shortened:
    return Shortened(probe[0], probe[1].result())


def fold_run(traced: Traced, chain: Sequence[Block], run: Run, repetitions: int) -> Folded:
    """Keeps the first `repetitions` of a run.

    What is left does not depend on how many there were, so that what was measured for one depth serves the others.

    Raises:
      CannotFold: repetitions do not hand on the same values.
    """
    first_dropped = run.first + repetitions * run.period
    before, last = chain[first_dropped - 1], chain[run.stop - 1]
    if len(before.outputs) != len(last.outputs):
        raise CannotFold("repetitions do not hand on the same values")
    stands_for = dict(zip(last.outputs, before.outputs, strict=True))
    dropped = chain[first_dropped].start, last.stop
    return fold(traced, dropped=dropped, stands_for=stands_for, begin=chain[run.first].start)


def rates_of(target: Target) -> Rates:
    """A target's rates, for ranking only; those of a middling accelerator where there are none."""
    chip = target.chip
    if chip is None or not chip.peak_flops or not chip.bandwidth:
        return Rates({"float32": 5e13, "bfloat16": 1e14}, 1e12)
    names = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}
    flops = {names.get(k, k): v for k, v in chip.peak_flops.items()}
    return Rates(flops, chip.bandwidth, link_bytes_per_second=chip.link_bandwidth)
