"""The same selection with like picks side by side.

Comes in: a `Chain` and a selection. Goes out: a selection of the same picks, in an order that a reader and a compiler
see as few runs. Where blocks repeat, many orders cost the same and the solver returns any of them.
"""

from __future__ import annotations

from rematplan.planner.chain import Chain, Choice, Pick, Selection, Span
from rematplan.planner.simulate import replay


def tidy(chain: Chain, selection: Selection) -> Selection:
    """Moves picks past their neighbours until like ones stand together; what keeps least comes first.

    A pick moves only to where the chain offers a choice with the same label and figures, so seconds do not change. If
    the peak would be higher than before, the selection is returned as it was.
    """
    spans = {(s.start, s.stop): s for s in chain.spans}
    picks = list(selection)
    moved = True
    while moved:
        moved = False
        for i in range(len(picks) - 1):
            if _order(picks[i]) > _order(picks[i + 1]):
                swapped = _swap(spans, picks[i], picks[i + 1])
                if swapped is not None:
                    picks[i : i + 2] = swapped
                    moved = True
    tidied = tuple(picks)
    return tidied if replay(chain, tidied).peak_bytes <= replay(chain, selection).peak_bytes else selection


def _order(pick: Pick) -> tuple[float, str, int]:
    """Kept bytes for each block: what is kept late is freed early."""
    length = pick.span.stop - pick.span.start
    return pick.choice.kept_bytes / length, pick.choice.label, length


def _swap(spans: dict[tuple[int, int], Span], left: Pick, right: Pick) -> tuple[Pick, Pick] | None:
    start, stop = left.span.start, right.span.stop
    middle = start + right.span.stop - right.span.start
    first = _same(spans.get((start, middle)), right.choice)
    second = _same(spans.get((middle, stop)), left.choice)
    return (first, second) if first is not None and second is not None else None


def _same(span: Span | None, choice: Choice) -> Pick | None:
    return Pick(span, choice) if span is not None and choice in span.choices else None
