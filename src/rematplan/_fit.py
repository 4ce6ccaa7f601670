"""`fit`: the largest batch, length or depth that a chip has room for, with its plan; several chips beside each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rematplan.budgets import budget_or_memory
from rematplan.errors import InfeasibleBudget, InputError
from rematplan.program.configuration import Offload, OwnRegions
from rematplan.records import FitRecord, FitRow
from rematplan.search import _choice
from rematplan.search.capacity import Capacity, fixed_load
from rematplan.search.largest import NoValidValueError, Span, Trial, UnlimitedError, largest
from rematplan.sweep import Sweep
from rematplan.target.executors import ExecutorLike, using
from rematplan.target.target import Kind, Target, resolve

if TYPE_CHECKING:
    from rematplan.workload import Workload

Progress = Callable[[str], None]


def fit(
    factory: Callable[..., Workload],
    *,
    vary: str = "batch",
    low: int = 1,
    high: int | None = None,
    multiple_of: int = 1,
    targets: str | Target | Sequence[str | Target] = "tpu-v5e",
    budget: str | int | None = None,
    reserve: str | int = 0,
    slowdown: float | None = None,
    keywords: Mapping[str, Any] | None = None,
    prices: Mapping[str, float] | None = None,
    own_regions: OwnRegions | str = OwnRegions.KEEP,
    offload: Offload | str = Offload.NEVER,
    executor: ExecutorLike = None,
    progress: Progress | None = None,
) -> FitRecord:
    """The largest value of one of the factory's whole numbers that fits each target, with the plan for it.

    Values are tried where lines through known needs cross the budget, and the last two are looked at closely: the plan of the
    largest is compiled in full with the budget as the limit, and for the next value a plan was looked for in vain.

    Args:
      factory: makes the workload; a value that it, or the loss, refuses with an InputError is left out, and so is one that
        raises TypeError or ValueError once another value was accepted.
      vary: the keyword: batch, length, blocks, ...
      low, high: the least and the greatest value; without `high`, as far as memory reaches.
      multiple_of: only multiples of it are tried.
      targets: one name or several, as in `plan`; not `local`, which would run what does not fit.
      budget, reserve: as in `plan`, for each target; default all memory that the target's compiler sees.
      slowdown: the most that a step with the plan may take, in times of a step without checkpointing at the same value
        (by the same compiler, whether or not that fits); default anything.
      keywords: the factory's other arguments.
      prices: of one device for an hour, by target, in any currency; what a million units of `vary` cost follows.
      own_regions, offload, executor: as in `plan`.
      progress: called with a sentence whenever something long begins.

    Returns:
      A row for each target, also for those on which the least value does not fit.

    Raises:
      InputError: unknown names, a keyword that the factory does not have or that is no whole number, an empty range, no
        budget where the target has no memory figure, no valid value near `low`, or nothing that limits an open range.
      InfeasibleBudget: the least value fits no target; carries the smallest budget that would do.
      CompilerError: a compiler refused the program for a reason other than memory.
    """
    chosen = _targets(targets)
    limits = [budget_or_memory(budget, target=target, reserve=reserve) for target in chosen]
    by_name = _prices(prices or {}, chosen)
    span = _span(vary, low, high, multiple_of)
    if slowdown is not None and not (math.isfinite(slowdown) and slowdown > 0):
        raise InputError(f"a slowdown of {slowdown:g} is not possible; 1.1 allows a tenth more time, 1 none.")
    own, away = _choice(OwnRegions, own_regions, "own_regions"), _choice(Offload, offload, "offload")
    sweep = Sweep(factory, keywords or {}, vary)
    rows: list[FitRow] = []
    refusals: list[InfeasibleBudget] = []
    with using(executor):
        for target, limit in zip(chosen, limits, strict=True):
            capacity = Capacity(
                sweep,
                target,
                limit,
                slowdown=slowdown,
                own_regions=own,
                offload=away,
                progress=progress or (lambda _message: None),
            )
            rows.append(_row(capacity, span, by_name.get(target.name)))
            if rows[-1].best is None:
                refusals.append(_refusal(capacity))
    if len(refusals) == len(rows):
        raise _fits_nowhere(f"{vary}={span.first}", refusals)
    name = next((row.plan["workload"] for row in rows if row.plan is not None), sweep.name)
    return FitRecord(name, dict(keywords or {}), vary, low, high, multiple_of, slowdown, tuple(rows), sweep.skipped)


def _row(capacity: Capacity, span: Span, price: float | None) -> FitRow:
    begun = time.monotonic()
    try:
        plain = largest(span, capacity.try_plain, confirm=capacity.confirm_plain)
        # what fits without a plan fits with one, unless it has to be faster
        slower = capacity.slowdown is None or capacity.slowdown >= 1
        known = [Trial(plain.best.value, None, sure=False)] if plain.best is not None and slower else []
        planned = largest(
            span,
            capacity.try_plan,
            confirm=capacity.confirm_plan,
            known=known,
            # time has no such line
            fixed_load=fixed_load(plain.trials) if capacity.slowdown is None else None,
        )
    except NoValidValueError:
        raise capacity.sweep.nothing_valid(span.first) from None
    except UnlimitedError as error:
        vary = capacity.sweep.vary
        raise InputError(
            f"{vary}={error.trial.value} needs hardly more than {vary}={span.first} on {capacity.target.name}: memory does "
            f"not limit {vary}. Give the range an upper end."
        ) from None
    point = lambda trial, points: points[trial.value] if trial is not None else None
    target, best = capacity.target, planned.best
    return FitRow(
        target=target.name,
        memory_bytes=target.memory_bytes,
        device_count=target.device_count,
        budget_bytes=capacity.limit_bytes,
        plain=point(plain.best, capacity.plain),
        plain_above=point(plain.above, capacity.plain),
        best=point(best, capacity.planned),
        above=point(planned.above, capacity.planned),
        plan=capacity.plans[best.value].to_json() if best is not None else None,
        price_per_hour=price,
        tried=tuple(capacity.planned[value] for value in sorted(capacity.planned)),
        probes=capacity.probes,
        compiles=capacity.compiles,
        search_seconds=time.monotonic() - begun,
    )


def _refusal(capacity: Capacity) -> InfeasibleBudget:
    """Why the least value does not fit."""
    return capacity.refusals[min(capacity.refusals)]


def _fits_nowhere(what: str, refusals: Sequence[InfeasibleBudget]) -> InfeasibleBudget:
    nearest = min(refusals, key=lambda error: error.minimum_bytes)
    message = f"{what} does not fit: " + " ".join(map(str, refusals))
    return InfeasibleBudget(
        message, minimum_bytes=nearest.minimum_bytes, parts=nearest.parts, findings=nearest.findings
    )


def _targets(targets: str | Target | Sequence[str | Target]) -> list[Target]:
    given = [targets] if isinstance(targets, (str, Target)) else list(targets)
    chosen = [resolve(target) if isinstance(target, str) else target for target in given]
    if not chosen:
        raise InputError("no target was given; name at least one, such as tpu-v5e.")
    names = [target.name for target in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the target {twice} is given twice; name each once.")
    if any(target.kind is Kind.LOCAL for target in chosen):
        raise InputError("fit tries values that do not fit, and the target local runs what it measures; name the chip.")
    return chosen


def _prices(prices: Mapping[str, float], targets: Sequence[Target]) -> dict[str, float]:
    names = [target.name for target in targets]
    for name, price in prices.items():
        if resolve(name).name not in names:
            raise InputError(f"a price is given for {name}, which is none of the targets ({', '.join(names)}).")
        if not (math.isfinite(price) and price > 0):
            raise InputError(f"the price of {name}, {price:g}, is not positive; give that of one device for an hour.")
    return {resolve(name).name: float(price) for name, price in prices.items()}


def _span(vary: str, low: int, high: int | None, multiple_of: int) -> Span:
    """The values to look among."""
    for name, value in (("the least value", low), ("the greatest value", high), ("multiple_of", multiple_of)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} of {vary}, {value!r}, is not a positive whole number.")
    span = Span(low, high, multiple_of)
    if span.last < span.first:
        of = f" multiple of {multiple_of}" if multiple_of > 1 else " value"
        raise InputError(f"there is no{of} from {low} to {high} for {vary}; give another range.")
    return span
