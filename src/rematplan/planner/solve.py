"""The choice over a whole chain: the fastest selection whose peak fits a budget at every position.

Comes in: a `Chain`. Goes out: `Solution`s, exact (`labels.py`), each replayed by the referee (`simulate.py`) before it
is returned; the smallest budget; the frontier between the smallest and the fastest; the best few of different kinds.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import count

from rematplan.errors import InfeasibleBudget
from rematplan.planner.chain import Chain, Selection, describe
from rematplan.planner.labels import Found, Restriction, Search, SwitchSeconds
from rematplan.planner.simulate import Replay, replay
from rematplan.planner.tidy import tidy


@dataclass(frozen=True)
class Solution:
    """A selection that fits.

    Attributes:
      seconds: predicted, by the chain's prices.
      peak_bytes: the most that is live at any position, by replay.
      bound_seconds: no selection within the budget is faster; of several that `ranked` gives, none of a kind that it did not
        give before. Equal to `seconds` where the solver finished exactly.
      label: what was chosen, readable.
    """

    selection: Selection
    seconds: float
    peak_bytes: int
    bound_seconds: float
    label: str

    @property
    def kind(self) -> frozenset[str]:
        """The labels that occur."""
        return frozenset(p.choice.label for p in self.selection)


def solve(chain: Chain, *, budget_bytes: int, switch_seconds: SwitchSeconds | None = None) -> Solution:
    """The fastest selection whose peak is at most the budget.

    Args:
      switch_seconds: what two neighbouring spans cost each other, by their labels, in order; may be negative.

    Raises:
      InfeasibleBudget: no selection fits; carries the smallest budget that does and what it consists of.
    """
    search = Search(chain, switch_seconds=switch_seconds)
    found = search.fastest(budget_bytes=budget_bytes)
    if found is None:
        raise _infeasible(chain, budget_bytes)
    return _solution(chain, found, budget_bytes, switch_seconds)


def minimum_budget(chain: Chain) -> int:
    """The smallest peak of any selection, in bytes."""
    minimum = Search(chain).minimum_bytes
    assert minimum is not None  # a Chain holds at least one selection
    return minimum


def frontier(chain: Chain, *, points: int, switch_seconds: SwitchSeconds | None = None) -> tuple[Solution, ...]:
    """Solutions between the smallest budget and the peak of the fastest selection, faster with every step.

    Args:
      points: how many budgets are tried, evenly spaced; at least 2. Equal results are given once.
    """
    search = Search(chain, switch_seconds=switch_seconds)
    low = minimum_budget(chain)
    fastest = _solution(chain, _at(search, _enough(chain)), _enough(chain), switch_seconds)
    steps = max(1, points - 1)
    found: list[Solution] = []
    for i in range(steps + 1):
        budget = low + (fastest.peak_bytes - low) * i // steps
        solution = _solution(chain, _at(search, budget), budget, switch_seconds)
        if not found or solution.seconds < found[-1].seconds:
            found.append(solution)
    return tuple(found)


def ranked(
    chain: Chain, *, budget_bytes: int, points: int, switch_seconds: SwitchSeconds | None = None
) -> tuple[Solution, ...]:
    """The fastest selections of different kinds, fastest first: candidates to confirm by compiling.

    Two selections are of one kind if the same labels occur in them, however often and wherever; of each kind only the
    fastest counts. (Where the length of a span makes a difference worth a compile, let its labels say so.) Kinds are
    enumerated in order by splitting the rest after each find (Lawler 1972): another kind lacks one of the labels found,
    or holds all of them and one more.

    Args:
      points: how many solutions; fewer are returned if there are no more kinds.

    Raises:
      InfeasibleBudget: as `solve`.
    """
    everything = frozenset(c.label for s in chain.spans for c in s.choices)
    order = count()
    queue: list[tuple[float, int, Found, Restriction]] = []

    def push(restriction: Restriction) -> None:
        search = Search(chain, switch_seconds=switch_seconds, restriction=restriction)
        found = search.fastest(budget_bytes=budget_bytes)
        if found is not None:
            heapq.heappush(queue, (found.seconds, next(order), found, restriction))

    push(Restriction())
    if not queue:
        raise _infeasible(chain, budget_bytes)
    solutions: list[Solution] = []
    while queue and len(solutions) < points:
        _, _, found, restriction = heapq.heappop(queue)
        # each was looked for among kinds of its own: another may hide a faster one where the solver did not finish
        left = min((other.bound_seconds for _, _, other, _ in queue), default=found.seconds)
        found = replace(found, bound_seconds=min(found.bound_seconds, left))
        solutions.append(_solution(chain, found, budget_bytes, switch_seconds))
        if len(solutions) == points:
            break
        held: tuple[frozenset[str], ...] = restriction.required
        for label in sorted(solutions[-1].kind):
            push(Restriction(restriction.excluded | {label}, held))
            held = (*held, frozenset({label}))
        push(Restriction(restriction.excluded, (*held, everything - solutions[-1].kind)))
    return tuple(solutions)


def _at(search: Search, budget_bytes: int) -> Found:
    found = search.fastest(budget_bytes=budget_bytes)
    assert found is not None, f"no selection at {budget_bytes} bytes, which is not below the minimum"
    return found


def _enough(chain: Chain) -> int:
    """A budget that every selection fits."""
    choices = [c for s in chain.spans for c in s.choices]
    kept = sum(max(c.kept_bytes for c in s.choices) for s in chain.spans if s.choices)
    workspace = max(max(c.forward_workspace_bytes, c.backward_workspace_bytes) for c in choices)
    return chain.base_bytes + kept + sum(chain.gradient_bytes) + workspace + chain.turn_bytes


def _solution(chain: Chain, found: Found, budget_bytes: int, switch_seconds: SwitchSeconds | None) -> Solution:
    # with costs between neighbours the order is part of the solution
    selection = tidy(chain, found.selection) if switch_seconds is None else found.selection
    replayed = replay(chain, selection, switch_seconds=switch_seconds)
    assert replayed.peak_bytes <= budget_bytes, "the replay contradicts the solver"
    # the solver adds seconds in another order than the replay: what it solved exactly stays exact
    exact = found.bound_seconds == found.seconds
    bound = replayed.seconds if exact else min(found.bound_seconds, replayed.seconds)
    return Solution(selection, replayed.seconds, replayed.peak_bytes, bound, describe(selection))


def _infeasible(chain: Chain, budget_bytes: int) -> InfeasibleBudget:
    minimum = minimum_budget(chain)
    smallest = replay(chain, _at(Search(chain), minimum).selection)
    parts = _parts(chain, smallest)
    listed = ", ".join(f"{name} {size}" for name, size in parts.items())
    message = f"no selection fits {budget_bytes} bytes; the smallest peak is {minimum} bytes ({listed})"
    return InfeasibleBudget(message, minimum_bytes=minimum, parts=parts)


def _parts(chain: Chain, replayed: Replay) -> dict[str, int]:
    """What the peak consists of, without what is zero."""
    peak = replayed.peak
    parts = {
        "arguments and outputs": chain.base_bytes,
        "kept for the backward pass": peak.kept_bytes,
        "gradients": peak.gradient_bytes,
        f"workspace ({peak.phase.value})": peak.workspace_bytes,
    }
    return {name: size for name, size in parts.items() if size}
