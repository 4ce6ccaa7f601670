"""`plan` and `frontier`: a workload, a target and a budget -> the cheapest checkpointing that fits.

The work is done by `planning.Search`; what it measured for one budget is kept with the workload and serves the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

from rematplan import findings, multihost
from rematplan._model import describe_model
from rematplan._plan import Plan
from rematplan.budgets import budget_bytes
from rematplan.errors import InfeasibleBudget, InputError
from rematplan.naming import describe, module_fingerprints, shapes_fingerprint
from rematplan.program.configuration import Configuration, Offload, OwnRegions
from rematplan.program.graph import Nesting
from rematplan.program.loss import traced_loss
from rematplan.records import Frontier, FrontierPoint, Model, Row
from rematplan.report.run import versions
from rematplan.search.planning import FINALISTS, JUST_ABOVE, MOST_COMPILES, Found, Search
from rematplan.target.executors import ExecutorLike, using
from rematplan.target.measurement import Measurement, attributed
from rematplan.target.target import Kind, Target, resolve
from rematplan.workload import Workload

__all__ = ["frontier", "plan"]

Progress = Callable[[str], None]

POINTS = 12
# Of a frontier's points between its ends.
COMPILED_BETWEEN = 2
SMALLEST_GROWTH = 1.01
SMALLEST_TRIES = 2
# The attribute of a workload that keeps its searches, which hold the workload: both go together.
_SEARCHES = "_searches"


def plan(
    work: Workload,
    *,
    budget: str | int,
    target: str | Target,
    reserve: str | int = 0,
    finalists: int = FINALISTS,
    own_regions: OwnRegions | str = OwnRegions.KEEP,
    offload: Offload | str = Offload.NEVER,
    executor: ExecutorLike = None,
    progress: Progress | None = None,
) -> Plan:
    """The cheapest checkpointing found that fits the budget, as the target's compiler measures it.

    In a run of several processes (`jax.distributed.initialize`) every process calls this with the same arguments: process 0
    makes the plan, and all of them get the same one, or the same error.

    Args:
      work: what is trained. Shapes suffice; no array is made.
      budget: device memory for the whole step, per device: bytes, "12GiB" (binary), "12GB" (decimal), or "80%" of what the
        target's compiler sees.
      target: a name such as "tpu-v5e", "gpu-h100" or "cpu", as `rematplan targets` lists them, or a resolved one.
      reserve: part of the budget that is kept free for what else lives in the device's memory, written like a budget; the
        plan's own budget is what is left.
      finalists: how many candidates that fit are compiled whole at most, as long as another is expected to be faster;
        with one, the first that fits is taken, which takes half the time and may miss a few percent. Default 3.
      own_regions: "keep" the checkpoint regions that the model brings along (`nnx.remat`, `jax.checkpoint`) as they are,
        or "replace" them: what is inside is planned like everything else.
      offload: "host" lets loops keep saved values in the host's memory, which is not part of the budget. What the copies
        take is predicted from the link's rate (`chips.toml`; for TPUs an assumption), as if nothing else used it.
      executor: where compiles run: "local", which is the default (children of this process, as many as its cores and memory
        bear), "local:4" (so many), "dask:ADDRESS" (a cluster's scheduler), or any `concurrent.futures.Executor`.
      progress: called with a sentence whenever something long begins.

    Returns:
      A plan that the target's compiler accepted: `measured` and `measurement` are the full compile of this very plan with
      the budget as the limit (`required_bytes` is at most the budget), `predicted` is what was said before that,
      `baselines` are hand-written configurations as they were probed, `bound` is the least seconds by the same prices.

    Raises:
      InputError: unknown target, missing compiler, a budget that cannot be read or is more than the chip has.
      InfeasibleBudget: nothing found fits; carries the smallest budget that does and what it consists of.
      CompilerError: the compiler refused the program for a reason other than memory.
      PlanMismatch: in a run of several processes, they do not all ask for the plan of the same program.
    """
    chosen = resolve(target) if isinstance(target, str) else target
    limit = budget_bytes(budget, target=chosen, reserve=reserve)
    own = _choice(OwnRegions, own_regions, "own_regions")

    def make() -> Plan:
        with using(executor):
            search = _search(work, chosen, own, offload, progress)
            return _as_plan(search, search.plan(limit, finalists=finalists), with_model=True)

    asked = {"target": chosen.name, "budget in bytes": limit, "own_regions": own.value, "offload": str(offload)}
    return multihost.made_once(make, trace=lambda: traced_loss(work, own_regions=own).graph, asked=asked)


def frontier(
    work: Workload,
    *,
    target: str | Target,
    points: int = POINTS,
    own_regions: OwnRegions | str = OwnRegions.KEEP,
    offload: Offload | str = Offload.NEVER,
    executor: ExecutorLike = None,
    progress: Progress | None = None,
) -> Frontier:
    """Plans from the smallest feasible budget to the fastest found; every point is faster than all that need less.

    The ends and a few between them are compiled whole; the figures of the others are those of their probes, and say so.

    Args:
      work, target: as in `plan`.
      points: how many budgets are tried, in equal ratios; at least 2, default 12.
      own_regions, offload, executor, progress: as in `plan`.

    Returns:
      Points from the least `required_bytes` to the fastest, at most `points` of them, each with the plan of that budget.

    Raises:
      InputError: unknown target, or its compiler is missing.
      InfeasibleBudget: nothing fits the chip; carries the smallest memory that would do.
      CompilerError: the compiler refused the program for a reason other than memory.
    """
    chosen = resolve(target) if isinstance(target, str) else target
    with using(executor):
        search = _search(work, chosen, own_regions, offload, progress)
        return _frontier(search, points)


def _frontier(search: Search, points: int) -> Frontier:
    fastest = search.plan(None, finalists=1)
    found = [fastest, _smallest(search)]
    low, high = (f.best.measurement.required_bytes for f in reversed(found))
    between = max(points, 2) - 2
    budgets = [int(low * (high / low) ** (step / (between + 1))) for step in range(1, between + 1)]
    compiled = {round(n * (between - 1) / max(COMPILED_BETWEEN - 1, 1)) for n in range(COMPILED_BETWEEN)}
    say = search.problem.say
    for number, budget in enumerate(budgets):
        search.problem.say = lambda message, at=number + 3: say(f"budget {at} of {len(budgets) + 2}: {message}")
        with contextlib.suppress(InfeasibleBudget):  # just above the smallest, where a prediction may be a little high
            found.append(search.plan(budget, finalists=1) if number in compiled else search.estimate(budget))
    search.problem.say = say
    kept: list[Found] = []
    for f in sorted(found, key=lambda f: (f.best.measurement.required_bytes, f.best.measurement.seconds or 0.0)):
        if not kept or _seconds(f) < _seconds(kept[-1]):
            kept.append(f)
    made = [
        FrontierPoint(f.best.measurement.required_bytes, _attributed(search, f), _as_plan(search, f).to_json())
        for f in kept
    ]
    shown = {f"point {number}": f.best.candidate.configuration for number, f in enumerate(kept)}
    return Frontier(search.target.name, tuple(made), _rows(search), _model(search, shown))


def _smallest(search: Search) -> Found:
    """The plan of the smallest budget; what is predicted to be the smallest may be a little less.

    A TPU's compiler has often made all of a program's code before it refuses it: what is predicted to need no more than one
    step above the smallest is tried there at once, and nothing that is predicted to need more. Where SparseCores run beside it,
    a program grows with its limit and may be refused step after step: each is twice the one before, with few tries.
    """
    on_tpu = search.target.kind is Kind.TPU
    budget = int(search.probes.smallest_bytes() * (SMALLEST_GROWTH if on_tpu else 1.0))
    reach, tries = (1.0, SMALLEST_TRIES) if on_tpu else (JUST_ABOVE, MOST_COMPILES)
    growth = SMALLEST_GROWTH
    while True:
        try:
            return search.plan(budget, finalists=1, most_compiles=tries, reach=reach)
        except InfeasibleBudget as error:
            budget = max(int(budget * growth), error.minimum_bytes)
            growth **= 2


def _search(
    work: Workload,
    target: Target,
    own_regions: OwnRegions | str,
    offload: Offload | str,
    progress: Progress | None,
) -> Search:
    own, away = _choice(OwnRegions, own_regions, "own_regions"), _choice(Offload, offload, "offload")
    say = progress or (lambda _message: None)
    known: dict[tuple[str, OwnRegions, Offload], Search] = vars(work).setdefault(_SEARCHES, {})
    key = target.name, own, away
    if key not in known:
        known[key] = Search(work, target, progress=say, own_regions=own, offload=away)
    known[key].problem.say = say
    return known[key]


C = TypeVar("C", bound=Enum)


def _choice(kind: type[C], value: C | str, name: str) -> C:
    try:
        return kind(value)
    except ValueError:
        known = " or ".join(repr(each.value) for each in kind)
        raise InputError(f"{name} is {known}, not {value!r}") from None


def _seconds(found: Found) -> float:
    seconds = found.best.measurement.seconds
    return seconds if seconds is not None else float("inf")


def _as_plan(search: Search, found: Found, *, with_model: bool = False) -> Plan:
    traced = search.problem.traced
    rows = _rows(search)
    regions, loops = describe(
        found.best.candidate.configuration, traced.graph, {i: body.graph for i, body in traced.bodies.items()}
    )
    return Plan(
        regions=regions,
        loops=loops,
        own_regions=search.problem.own_regions,
        fingerprint=traced.graph.fingerprint,
        modules=module_fingerprints(traced.graph),
        shapes=shapes_fingerprint(traced.graph),
        name=search.problem.work.name,
        target=search.target.name,
        budget_bytes=found.budget_bytes,
        status="fits",
        predicted=found.best.predicted,
        measured=_without_timeline(found.best.measurement.to_json()),
        baselines=tuple(_without_timeline(row.to_json()) for row in rows),
        bound=_bound(found),
        notes=_notes(search, found),
        findings=_findings(search),
        versions=versions(),
        measurement=_attributed(search, found),
        rows=rows,
        model=_model(search, {"plan": found.best.candidate.configuration}).to_json() if with_model else None,
    )


def _attributed(search: Search, found: Found) -> Measurement:
    return attributed(found.best.measurement, search.problem.arguments)


def _model(search: Search, plans: Mapping[str, Configuration]) -> Model:
    """What hand-written configurations and plans do with each value."""
    written = {candidate.name: candidate.configuration for candidate, _ in search.probes.hand_written_rows()}
    return describe_model(search.problem.traced, {**written, **plans})


def _bound(found: Found) -> dict[str, Any]:
    """How far from the optimum a plan can be, and what that does not say."""
    bound, seconds = found.bound_seconds, found.best.measurement.seconds
    gap = seconds / bound - 1 if bound and seconds is not None else None
    return {
        "seconds": bound,
        "gap": gap,
        "basis": "by the prices of the search no plan of the same families that fits is faster: choices over the chain of "
        "blocks from measured menus; nested regions, with their bytes rounded down; mixtures of two ways to run a loop's "
        "iterations, as if those could be divided",
        "not_covered": "other places for regions, save sets between those of the menus, other orders of operations, what turns "
        "out to need less than predicted, and what the compiler makes of a mixture that its parts do not show",
    }


def _findings(search: Search) -> tuple[dict[str, Any], ...]:
    traced = search.problem.traced
    found = (
        *findings.of_target(search.target.kind),
        *findings.of_program(traced),
        *findings.of_loops(traced.graph),
    )
    return tuple(dataclasses.asdict(f) for f in found)


def _without_timeline(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a plan file: all but what is as long as the program or the model."""
    return {k: v for k, v in figures.items() if k not in ("timeline", "modules")}


def _rows(search: Search) -> tuple[Row, ...]:
    rows = []
    for candidate, figures in search.probes.hand_written_rows():
        note = "extrapolated from programs with repeated blocks cut out" if figures.folded else ""
        rows.append(Row(candidate.name, attributed(figures.as_measurement(), search.problem.arguments), note))
    return tuple(rows)


def _notes(search: Search, found: Found) -> tuple[str, ...]:
    notes = [f"chosen: {found.best.candidate.name}"]
    spent = found.search
    notes.append(
        f"searched {spent['total_seconds']:.0f} s: {spent['total_probes']} probes, {spent['total_compiles']} compiles"
    )
    for op in search.problem.graph.operations:
        if op.subprogram is not None and op.subprogram.kind is Nesting.REGION:
            where = f"{op.module or 'the function'} ({op.location})"
            notes.append(f"kept the model's own checkpoint region in {where}; own_regions='replace' plans inside it")
    return tuple(notes)
