"""Programs that a compiler refuses under a budget: what that costs, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rematplan import search as searches
from rematplan import workloads
from rematplan.errors import InfeasibleBudget
from rematplan.search.planning import JUST_ABOVE, Search
from rematplan.target.target import Kind, resolve


class Refusing:
    """A problem's `compile` that refuses under limits below what programs would use."""

    def __init__(self, search: Search):
        self._compile = search.problem.compile
        self.would_use = 0
        self.asked: list[tuple[object, int]] = []

    def __call__(self, name, configuration, options, **more):
        m = self._compile(name, configuration, options, **more)
        self.asked.append((configuration, options.limit_bytes))
        if options.limit_bytes is None or options.limit_bytes >= self.would_use:
            return m
        return replace(m, fits_limit=False, required_bytes=max(self.would_use, options.limit_bytes + 1))


@pytest.fixture
def search() -> Search:
    search = Search(workloads.mlp(blocks=6, features=64, batch=1024), resolve("cpu"), progress=lambda _: None)
    search.plan(None, finalists=1)
    return search


@pytest.fixture
def refusing(search, monkeypatch) -> Refusing:
    made = Refusing(search)
    monkeypatch.setattr(search.problem, "compile", made)
    return made


def test_what_would_use_more_than_a_budget_is_not_compiled_for_it_again(search, refusing):
    smallest = search.probes.smallest_bytes()
    refusing.would_use = 2 * smallest
    with pytest.raises(InfeasibleBudget):
        search.plan(int(1.2 * smallest))
    first, refusing.asked = {configuration for configuration, _ in refusing.asked}, []
    assert first
    with pytest.raises(InfeasibleBudget):
        search.plan(int(1.3 * smallest))
    assert not first & {configuration for configuration, _ in refusing.asked}
    found = search.plan(int(2.1 * smallest))
    assert found.best.measurement.fits_limit


def test_what_was_refused_is_open_again_where_it_may_fit(search, refusing):
    smallest = search.probes.smallest_bytes()
    refusing.would_use = int(1.5 * smallest)
    with pytest.raises(InfeasibleBudget):
        search.plan(int(1.4 * smallest))
    refused = {configuration for configuration, _ in refusing.asked}
    assert refused <= set(search._compiled_before(int(1.3 * smallest)))
    assert refused <= set(search._compiled_before(refusing.would_use - 1))
    assert not refused & set(search._compiled_before(refusing.would_use))
    assert search.plan(refusing.would_use).best.measurement.fits_limit


def test_nothing_above_the_reach_is_compiled(search, refusing):
    smallest = search.probes.smallest_bytes()
    search.plan(int(1.05 * smallest), reach=1.0)
    measured = search.probes.measured
    assert refusing.asked
    for configuration, limit in refusing.asked:
        assert measured[configuration].figures.required_bytes <= limit


def test_the_smallest_end_of_a_frontier_on_tpu_is_begun_where_predictions_allow(search, monkeypatch):
    asked, tries = [], []

    def plan(budget, *, finalists, most_compiles, reach):
        asked.append((budget, reach))
        tries.append(most_compiles)
        if len(asked) < 4:
            raise InfeasibleBudget("no", minimum_bytes=0, parts={}, findings=())
        return "found"

    monkeypatch.setattr(search, "plan", plan)
    smallest = search.probes.smallest_bytes()
    for target, first, reach in (
        (search.target, smallest, JUST_ABOVE),
        (resolve("tpu-v5e"), int(1.01 * smallest), 1.0),
    ):
        asked.clear()
        tries.clear()
        monkeypatch.setattr(search, "target", target)
        assert (target.kind is Kind.TPU) == (reach == 1.0)
        assert searches._smallest(search) == "found"
        assert [r for _, r in asked] == [reach] * 4
        assert all(most <= 2 for most in tries) == (target.kind is Kind.TPU)
        budgets = [b for b, _ in asked]
        growth = [after / before for before, after in pairwise(budgets)]
        assert budgets[0] == first and growth == pytest.approx([1.01, 1.01**2, 1.01**4], rel=1e-4)
