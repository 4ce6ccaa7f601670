"""`compare`: every hand-written configuration of a workload on one target, beside each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rematplan import apply, findings
from rematplan._inspect import computed_bytes, residuals_of
from rematplan._measure import (
    Progress,
    checkpointed,
    compiler_does_nothing,
    compiler_options,
    lowered,
    measure_lowered,
    method_named,
    silent,
)
from rematplan._model import describe_model
from rematplan.budgets import budget_bytes
from rematplan.errors import CompilerError, InputError, PlanMismatch
from rematplan.planner.baselines import Baseline, baselines
from rematplan.program.configuration import PLAIN
from rematplan.program.loss import traced_loss
from rematplan.records import Comparison, Refused, Row
from rematplan.target.compiler import Method, SideBySide
from rematplan.target.executors import ExecutorLike, using
from rematplan.target.measurement import Measurement, attributed
from rematplan.target.target import Kind, Target, resolve

if TYPE_CHECKING:
    from rematplan._measure import Lowered
    from rematplan.workload import Workload


@dataclass(frozen=True)
class _Task:
    """A configuration that is ready to be measured."""

    baseline: Baseline
    lowered: Lowered


def compare(
    work: Workload,
    *,
    target: str | Target,
    budget: str | int | None = None,
    method: Method | str = Method.COMPILE,
    executor: ExecutorLike = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measures every hand-written configuration that the workload allows.

    Args:
      work, target: as in `measure`.
      budget: what the rows are held against, and what the compiler's own rematerialization is given; default for the
        latter is the chip's memory.
      method: "compile" for the compiler's full result, "probe" for its schedule and buffers only.
      executor: where compiles run, as in `plan`.
      progress: called with a sentence whenever something long begins or ends.

    Returns:
      A row for each configuration in a fixed order, `plain` first; what the compiler refused stands apart, and so does its own
      rematerialization where that is not exercised: with "probe" on TPU, for "cpu" and for "local".

    Raises:
      InputError: unknown target or method, a missing compiler, or a budget that cannot be read.
      CompilerError: no configuration at all could be measured.
    """
    chosen = resolve(target) if isinstance(target, str) else target
    how = method_named(method)
    limit = None if budget is None else budget_bytes(budget, target=chosen)
    say = progress or silent
    say("tracing")
    traced = traced_loss(work)
    tasks: list[_Task] = []
    refused: list[Refused] = []
    left_out: list[Refused] = []
    for baseline in baselines(traced.graph):
        if missing := compiler_does_nothing(baseline, chosen, how):  # its figures would be those of `plain`
            left_out.append(Refused(baseline.name, missing))
            continue
        say(f"lowering {baseline.name}")
        options = compiler_options(baseline, chosen, method=how, limit_bytes=limit)
        try:
            elsewhere = functools.partial(apply.transferred, traced=traced, configuration=baseline.configuration)
            planned = checkpointed(traced, baseline)
            tasks.append(_Task(baseline, lowered(work, planned, chosen, options=options, elsewhere=elsewhere)))
        # a callback or an ordered effect where the region would be; a policy that JAX would drop
        except (PlanMismatch, InputError) as error:
            refused.append(Refused(baseline.name, str(error)))
    rows: list[Row] = []
    with using(executor):
        outcomes = _measure_all(tasks, chosen, say)
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, Measurement):
            rows.append(Row(task.baseline.name, outcome, _note(task, outcome)))
        else:
            refused.append(Refused(task.baseline.name, outcome))
    if not rows:
        raise CompilerError(
            f"{chosen.name}: no configuration could be measured. {refused[0].name}: {refused[0].reason}"
        )
    kept = computed_bytes(residuals_of(traced, PLAIN))
    notes = (
        *findings.of_target(chosen.kind),
        *findings.of_program(traced),
        *findings.of_loops(traced.graph),
        *findings.of_rows(rows, residual_bytes=kept),
    )
    shown = {t.baseline.name: t.baseline.configuration for t in tasks if not t.baseline.compiler_rematerializes}
    return Comparison(
        chosen.name,
        tuple(rows),
        budget_bytes=limit,
        refused=(*refused, *left_out),
        findings=notes,
        model=describe_model(traced, shown),
    )


def _measure_all(tasks: list[_Task], target: Target, say: Progress) -> list[Measurement | str]:
    """A measurement for each task, or why there is none."""
    done: list[str] = []

    def tell(task: _Task) -> None:
        done.append(task.baseline.name)
        say(f"{target.name}: {len(done)} of {len(tasks)} configurations measured, last {done[-1]}")

    if target.kind is Kind.LOCAL:  # in this thread, one after another
        outcomes: list[Measurement | str] = []
        for task in tasks:
            outcomes.append(_outcome(functools.partial(measure_lowered, task.lowered, target), task))
            if isinstance(outcomes[-1], Measurement):
                tell(task)
        return outcomes
    say(f"{target.name}: measuring {len(tasks)} configurations")
    with SideBySide(target) as measuring:
        futures = {measuring.submit(task.lowered.program, task.lowered.options): task for task in tasks}
        for future in as_completed(futures):
            if future.exception() is None:
                tell(futures[future])
        return [_outcome(future.result, task) for future, task in futures.items()]


def _outcome(measured: Callable[[], Measurement], task: _Task) -> Measurement | str:
    try:
        return attributed(measured(), task.lowered.arguments)
    except CompilerError as error:
        return str(error)


def _note(task: _Task, measured: Measurement) -> str:
    if not task.baseline.compiler_rematerializes:
        return ""
    if measured.fits_limit is False:
        return "the compiler's own rematerialization did not reach its limit"
    return "the compiler's own rematerialization"
