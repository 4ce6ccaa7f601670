"""Chains for the solver's tests, and two referees that share nothing with it: brute force and an integer program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from rematplan.planner.chain import Chain, Choice, Pick, Selection, Span
from rematplan.planner.simulate import replay


@st.composite
def small_chains(draw: st.DrawFn, *, most_blocks: int = 5) -> Chain:
    """Random chains: single blocks always have a choice, longer spans sometimes."""
    blocks = draw(st.integers(1, most_blocks))
    size = st.integers(0, 12)
    spans = []
    for start in range(blocks):
        for stop in range(start + 1, min(blocks, start + 3) + 1):
            if stop > start + 1 and not draw(st.booleans()):
                continue
            labels = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
            choices = tuple(
                Choice(label, draw(size), draw(size), draw(size), float(draw(st.integers(0, 20)))) for label in labels
            )
            spans.append(Span(start, stop, choices))
    gradients = tuple(draw(size) for _ in range(blocks)) if draw(st.booleans()) else ()
    return Chain(blocks, tuple(spans), draw(size), gradients, draw(size))


def uniform_chain(blocks: int, *, choices: tuple[Choice, ...], longest: int = 1, **fixed: object) -> Chain:
    """Equal blocks; spans of several blocks keep as one, and need and cost as all of them."""
    spans = []
    for start in range(blocks):
        for stop in range(start + 1, min(blocks, start + longest) + 1):
            n = stop - start
            scaled = tuple(
                Choice(
                    c.label, c.kept_bytes, n * c.forward_workspace_bytes, n * c.backward_workspace_bytes, n * c.seconds
                )
                for c in choices
            )
            spans.append(Span(start, stop, scaled))
    return Chain(blocks, tuple(spans), **fixed)  # type: ignore[arg-type]


def all_selections(chain: Chain, start: int = 0) -> Iterator[Selection]:
    """Every selection of the blocks from `start` on."""
    if start == chain.block_count:
        yield ()
        return
    for span in chain.spans:
        if span.start == start:
            for rest in all_selections(chain, span.stop):
                for choice in span.choices:
                    yield (Pick(span, choice), *rest)


def by_brute_force(
    chain: Chain, budget_bytes: int, *, switch_seconds: Callable[[str, str], float] | None = None
) -> float | None:
    """Seconds of the fastest selection that the replay accepts."""
    replays = [replay(chain, s, switch_seconds=switch_seconds) for s in all_selections(chain)]
    return min((r.seconds for r in replays if r.peak_bytes <= budget_bytes), default=None)


def by_integer_program(chain: Chain, budget_bytes: int) -> float | None:
    """Seconds of the fastest selection by HiGHS: one binary a pick; a pick's limits hold only where it is taken."""
    picks = [Pick(s, c) for s in chain.spans for c in s.choices]
    room = budget_bytes - chain.base_bytes
    if room < sum(chain.gradient_bytes):
        return None
    kept = np.array([p.choice.kept_bytes for p in picks], dtype=float)
    covers = np.array([[p.span.start <= b < p.span.stop for p in picks] for b in range(chain.block_count)], dtype=float)
    constraints = [LinearConstraint(covers, 1, 1), LinearConstraint(kept[None, :], ub=room - chain.turn_bytes)]
    big = kept.sum() + sum(chain.gradient_bytes) + 1000
    for i, pick in enumerate(picks):
        earlier = np.array([q.span.stop <= pick.span.start for q in picks]) * kept
        forward = pick.choice.forward_workspace_bytes
        backward = pick.choice.kept_bytes + sum(chain.gradient_bytes[pick.span.stop :])
        backward += pick.choice.backward_workspace_bytes
        row = earlier.copy()
        row[i] += big
        constraints.append(LinearConstraint(row[None, :], ub=room - max(forward, backward) + big))
    seconds = np.array([p.choice.seconds for p in picks])
    options = {"mip_rel_gap": 0.0}
    result = milp(
        seconds, constraints=constraints, integrality=np.ones(len(picks)), bounds=Bounds(0, 1), options=options
    )
    return float(result.fun) if result.success else None
