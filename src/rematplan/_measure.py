"""`measure`: a workload under one configuration on one target -> a `Measurement`.

Traces the loss, checkpoints it as a policy or plan says, puts the training step around it, lowers that here and has the
target's compiler measure it. Does not know how a plan is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rematplan import apply, policies
from rematplan._plan import Plan
from rematplan.budgets import budget_bytes
from rematplan.errors import InputError
from rematplan.lift import Lifted
from rematplan.planner.baselines import Baseline
from rematplan.program.configuration import PLAIN
from rematplan.program.loss import traced_loss
from rematplan.program.trace import Traced
from rematplan.pure import LeafInfo
from rematplan.sharding import in_mesh
from rematplan.step import PureLoss, StepFunction
from rematplan.target import compiler
from rematplan.target.compiler import Method, Options, Program, Rematerialization
from rematplan.target.executors import ExecutorLike, using
from rematplan.target.measurement import Argument, Measurement, Role, attributed
from rematplan.target.target import Kind, Target, resolve

if TYPE_CHECKING:
    from rematplan.workload import Workload

Progress = Callable[[str], None]


def measure(
    work: Workload,
    *,
    target: str | Target,
    policy: str | None = None,
    plan: Plan | str | Path | None = None,
    budget: str | int | None = None,
    method: Method | str = Method.COMPILE,
    executor: ExecutorLike = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measures memory and time of one training step, per device.

    Args:
      work: what is trained. Shapes suffice, except for "local", which makes and runs real arrays.
      target: a name such as "tpu-v5e", "gpu-h100", "cpu", "local", or a resolved one.
      policy: a hand-written configuration ("plain", "per-block", ...) or the name of a policy in
        `jax.checkpoint_policies` that needs no argument; default plain.
      plan: instead of a policy, a plan or the path of one.
      budget: bytes that the step may need, as in `plan`; `fits_limit` says whether it does. A TPU's compiler is given them
        as its limit. It schedules for less memory then, and the step may take longer.
      method: "compile" for the compiler's full result, "probe" for its schedule and buffers only.
      executor: where the compile runs, as in `plan`.
      progress: called with a sentence whenever something long begins.

    Returns:
      Bytes, seconds and operations, each with its source in `sources`: the target's compiler, or, for "local", the device.

    Raises:
      InputError: unknown names, a missing compiler, a budget that cannot be read, or both a policy and a plan.
      PlanMismatch: the plan is not for this function.
      CompilerError: the compiler crashed or refused the program.
    """
    if policy is not None and plan is not None:
        raise InputError("both a policy and a plan were given; a measurement is of one of them.")
    chosen = resolve(target) if isinstance(target, str) else target
    how = method_named(method)
    limit = None if budget is None else budget_bytes(budget, target=chosen)
    loaded = None if plan is None else Plan.load(plan)
    say = progress or silent
    say("tracing")
    baseline: Baseline | None = None
    pure_loss: PureLoss | None = None
    elsewhere: Callable[[Lifted], PureLoss] | None = None
    if loaded is not None:
        elsewhere = functools.partial(apply.planned, plan=loaded)
        opened = work.lift(scopes=True)
        with in_mesh(opened.leaves):
            pure_loss = elsewhere(opened)
    elif policy not in (None, "plain"):
        traced = traced_loss(work)
        baseline = policies.by_name(traced.graph, policy)
        pure_loss = checkpointed(traced, baseline)
        elsewhere = functools.partial(apply.transferred, traced=traced, configuration=baseline.configuration)
    options = compiler_options(baseline, chosen, method=how, limit_bytes=limit)
    if limit is not None and chosen.kind is Kind.TPU and how is Method.COMPILE:
        options = replace(options, limit_bytes=limit)
    ready = lowered(work, pure_loss, chosen, options=options, elsewhere=elsewhere)
    say(f"{chosen.name}: measuring {'the plan' if loaded is not None else policy or 'plain'}")
    with using(executor):
        measured = measure_lowered(ready, chosen).held_against(limit)
    missing = compiler_does_nothing(baseline, chosen, how)
    return replace(measured, warnings=(*measured.warnings, missing)) if missing else measured


@dataclass(frozen=True)
class Lowered:
    """A training step that is ready to be measured, how, and what its arguments are."""

    program: Program
    options: Options
    arguments: tuple[Argument, ...] = ()


def checkpointed(traced: Traced, baseline: Baseline) -> PureLoss | None:
    """The flat loss under a hand-written configuration; None stands for the loss as the user wrote it."""
    return None if baseline.configuration == PLAIN else apply.configured(traced, baseline.configuration)


def compiler_options(baseline: Baseline | None, target: Target, *, method: Method, limit_bytes: int | None) -> Options:
    """How a configuration is compiled: only the one called `compiler` gets the compiler's own rematerialization."""
    if baseline is None or not baseline.compiler_rematerializes:
        return Options(method=method)
    limit = limit_bytes if limit_bytes is not None else target.memory_bytes
    return Options(method=method, limit_bytes=limit, rematerialization=Rematerialization.ON)


def compiler_does_nothing(baseline: Baseline | None, target: Target, method: Method) -> str:
    """Why the compiler's own rematerialization has no part in a measurement of it; empty if it has, or nobody asked for it."""
    if baseline is None or not baseline.compiler_rematerializes:
        return ""
    if target.kind is Kind.CPU:
        return "XLA's compiler for CPUs does not rematerialize by itself"
    if target.kind is Kind.LOCAL:
        return "what is run here is compiled as the device's compiler does it by itself, and it is given no limit"
    if target.kind is Kind.TPU and method is Method.PROBE:
        return "a probe ends before the compiler rematerializes; the method compile measures it"
    return ""


def lowered(
    work: Workload,
    pure_loss: PureLoss | None,
    target: Target,
    *,
    options: Options,
    elsewhere: Callable[[Lifted], PureLoss] | None = None,
) -> Lowered:
    """The training step around a flat loss, lowered for the target's platform; `elsewhere` as in `Workload.step`."""
    step = work.step(pure_loss, elsewhere=elsewhere)
    program = compiler.lower(
        step.function, step.leaves, donated=step.donated, target=target, name=work.name, sources=step.sources
    )
    return Lowered(program, options, arguments_of(step))


def arguments_of(step: StepFunction) -> tuple[Argument, ...]:
    """What the arrays that a step takes are, for `measurement.attributed`."""

    def role(leaf: LeafInfo) -> Role:
        return Role.OPTIMIZER if leaf.optimizer else Role.PARAMETER if leaf.parameter else Role.INPUT

    return tuple(Argument(role(leaf), leaf.path) for leaf in step.arguments)


def measure_lowered(ready: Lowered, target: Target) -> Measurement:
    """One measurement.

    Raises:
      CompilerError: the compiler crashed or refused the program.
    """
    options = ready.options
    measured = compiler.measure(
        ready.program,
        target=target,
        method=options.method,
        limit_bytes=options.limit_bytes,
        rematerialization=options.rematerialization,
        compiler_options=options.compiler_options,
    )
    return attributed(measured, ready.arguments)


def method_named(method: Method | str) -> Method:
    """The method of that name.

    Raises:
      InputError: if there is none.
    """
    try:
        return Method(method)
    except ValueError:
        names = " or ".join(known.value for known in Method)
        raise InputError(f"unknown method {method!r}; write {names}.") from None


def silent(_message: str) -> None:
    """Progress that nobody watches."""
