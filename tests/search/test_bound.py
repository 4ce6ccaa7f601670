"""The bound of a plan: no plan of the families that were searched is faster by the search's prices, margins or not."""

from __future__ import annotations

import pytest

from rematplan import workloads
from rematplan._jax_private import new_remat
from rematplan.search import probing
from rematplan.search.candidates import MIXED
from rematplan.search.mixing import fastest, mixes
from rematplan.search.nesting import NESTED, fastest_nest, nested
from rematplan.search.planning import Search
from rematplan.target.target import resolve


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(workloads.mlp(blocks=6, features=64, batch=1024), resolve("cpu"), progress=lambda _: None)


@pytest.fixture(scope="module")
def deep() -> Search:
    """Probed with most of its blocks cut out, so that mixtures are predicted and made to need less than the budget."""
    patch = pytest.MonkeyPatch()
    patch.setattr("rematplan.search.problem.FEWEST_FOLDED_OPERATIONS", 60)
    search = Search(workloads.mlp(blocks=24, features=32, batch=512), resolve("cpu"), progress=lambda _: None)
    assert search.problem.folds
    patch.undo()
    return search


def uniform(search: Search):
    return [p for p in search.probes.repriced() if p.candidate.grouping != MIXED]


def between(search: Search, share: float) -> int:
    needs = [p.figures.required_bytes for p in search.probes.measured.values()]
    return int(min(needs) + share * (max(needs) - min(needs)))


@pytest.mark.parametrize("which", ["search", "deep"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_no_mixture_that_fits_is_faster_than_the_bound(which, share, request, monkeypatch):
    search = request.getfixturevalue(which)
    monkeypatch.setattr(probing, "UNPROBED_MARGIN", 0.1)
    budget = between(search, share)
    search.probes.begin(budget)
    for margin in (0, budget // 10):
        bound = min(search.probes.make(budget, {}, mixed_margin=margin)) * (1 - 1e-9)  # sums in another order
        plain = search.probes.plain
        for mix in mixes(search.problem, plain, uniform(search), budget_bytes=budget, count=3):
            assert bound <= mix.predicted_seconds
        chain = fastest(search.problem, plain, uniform(search), budget_bytes=budget)
        assert chain is not None and bound <= chain


@pytest.mark.skipif(new_remat(), reason="regions are not nested under JAX_REMAT3=1")
@pytest.mark.parametrize("share", [0.1, 0.4, 0.9])
def test_no_nest_that_fits_is_faster_than_the_bound(search, share):
    budget, plain, priced = between(search, share), search.probes.plain, uniform(search)
    bound = fastest_nest(search.problem, plain, priced, budget_bytes=budget)
    found = nested(search.problem, plain, priced, budget_bytes=budget)
    assert found is not None and bound is not None and found.candidate.grouping == NESTED
    assert bound * (1 - 1e-9) <= found.predicted_seconds
    assert fastest_nest(search.problem, plain, priced, budget_bytes=1) is None
