"""A record -> the configurations that a reader can look at, beside each other.

Comes in: the JSON of a verb's record. Goes out: `Choices`: plans and hand-written configurations with their figures, in
the order in which they are shown. The HTML report, the notebook display and the pictures read this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from rematplan.report.figures import fits, same_clock, seconds_source, time_or_dash
from rematplan.report.summary import NOT_CHECKPOINTING
from rematplan.target.chips import chips
from rematplan.units import format_bytes

Record = Mapping[str, Any]


class ChoiceKind(Enum):
    """Who decided what is saved."""

    PLAN = "plan"
    HAND_WRITTEN = "hand-written"
    COMPILER = "the compiler's own"
    MEASURED = "measured"  # one measurement, which does not say of what configuration


@dataclass(frozen=True)
class Choice:
    """One configuration.

    Attributes:
      figures: keys of a measurement.
      plan: a plan file's document, None for what is not a plan.
      decisions: its name in the record's model; empty where the model says nothing of it.
    """

    name: str
    kind: ChoiceKind
    figures: Record
    plan: Record | None = None
    decisions: str = ""

    @property
    def has_timeline(self) -> bool:
        """Whether the figures are of this very program, so that its schedule is known."""
        return bool((self.figures.get("timeline") or {}).get("position"))


@dataclass(frozen=True)
class Choices:
    """What a record has to choose from.

    Attributes:
      default, compared: positions of the configuration that is shown first, and of the one that it is held against.
      budget_bytes: None where there was none.
      model: keys of `records.Model`, None where the record has none.
    """

    items: tuple[Choice, ...]
    default: int
    compared: int | None
    target: str
    budget_bytes: int | None = None
    model: Record | None = None

    @property
    def timed(self) -> tuple[Choice, ...]:
        """Those that can be points of time against memory; a chart takes two of them."""
        found = tuple(c for c in self.items if c.figures.get("seconds") is not None)
        return found if len(found) > 1 else ()

    @property
    def plain(self) -> Choice | None:
        """No checkpointing, if it was measured."""
        return next((c for c in self.items if c.name == "plain"), None)

    def fitting(self) -> tuple[Choice, ...]:
        """Those that keep the budget; without one, those that the chip has room for, as far as that is known."""
        limit = memory_bytes(self.target) if self.budget_bytes is None else self.budget_bytes
        return tuple(c for c in self.items if fits(c.figures, limit))

    def best_by_hand(self) -> Choice | None:
        """The fastest hand-written checkpointing that fits; None if none does or times cannot be compared."""
        shown = self.items[self.default].figures
        by_hand = [
            c
            for c in self.fitting()
            if c.kind is ChoiceKind.HAND_WRITTEN and c.name not in NOT_CHECKPOINTING and same_clock(c.figures, shown)
        ]
        return min(by_hand, key=lambda c: c.figures["seconds"], default=None)


def choices(verb: str, record: Record) -> Choices | None:
    """The configurations of a record; None for records of verbs that measure none."""
    made = _MAKERS.get(verb)
    return made(record) if made else None


def memory_bytes(target: str) -> int | None:
    """What the compiler of a target lets a program have on one device; None where the list of chips does not say."""
    chip = chips().get(target.partition(":")[0])
    return None if chip is None else chip.compiler_memory_bytes or None


def row_texts(found: Choices, choice: Choice) -> dict[str, Any]:
    """One line of a table of configurations, as text; `fits` is empty without a budget, `timeline` a truth value."""
    figures, plain = choice.figures, found.plain
    against = ""
    if plain is not None and plain is not choice and same_clock(figures, plain.figures):
        against = f"{figures['seconds'] / plain.figures['seconds'] - 1:+.1%}"
    return {
        "name": choice.name,
        "kind": choice.kind.value,
        "needs": format_bytes(figures["required_bytes"]),
        "peak": format_bytes(figures["peak_bytes"]),
        "time": time_or_dash(figures.get("seconds")),
        "against": against,
        "fits": "" if found.budget_bytes is None else "yes" if fits(figures, found.budget_bytes) else "no",
        "source": str(figures.get("source", "")),
        "timeline": choice.has_timeline,
    }


def _of_plan(record: Record) -> Choices | None:
    if not record["measured"]:
        return None
    budget = record["budget_bytes"]
    plan = Choice("plan", ChoiceKind.PLAN, record["measured"], record["plan"], "plan")
    items = (plan, *_rows(record["baselines"]))
    return Choices(items, 0, _other(items, 0), record["measured"]["target"], budget, record.get("model"))


def _of_frontier(record: Record) -> Choices:
    points: list[Choice] = []
    for number, point in enumerate(record["points"]):
        name = f"plan, {format_bytes(point['required_bytes'])}"
        name += f" ({number + 1})" if any(p.name == name for p in points) else ""
        points.append(Choice(name, ChoiceKind.PLAN, point, point["plan"], f"point {number}"))
    items = (*points, *_rows(record["baselines"]))
    return Choices(items, 0, _other(items, 0), record["target"], None, record.get("model"))


def _of_comparison(record: Record) -> Choices:
    items = _rows(record["rows"])
    found = Choices(items, 0, None, record["target"], record["budget_bytes"], record.get("model"))
    fitting = found.fitting()
    smallest = min(fitting or items, key=lambda c: c.figures["required_bytes"])
    best = min(_of_one_clock(fitting), key=lambda c: c.figures["seconds"], default=smallest)
    default = items.index(best)
    return replace(found, default=default, compared=_other(items, default))


def _of_one_clock(fitting: Sequence[Choice]) -> list[Choice]:
    """Those whose times may be compared: by the clock that timed most of them, and of two the one of the first."""
    timed = [c for c in fitting if c.figures.get("seconds")]
    clocks = Counter(seconds_source(c.figures) for c in timed)
    return [c for c in timed if seconds_source(c.figures) == clocks.most_common(1)[0][0]]


def _of_measurement(record: Record) -> Choices:
    name = str(record.get("name") or "measured")
    return Choices((Choice(name, ChoiceKind.MEASURED, record),), 0, None, record["target"], record.get("limit_bytes"))


def _rows(rows: Sequence[Record]) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            row["name"],
            ChoiceKind.COMPILER if row["name"] == "compiler" else ChoiceKind.HAND_WRITTEN,
            row,
            decisions="" if row["name"] == "compiler" else row["name"],
        )
        for row in rows
    )


def _other(items: Sequence[Choice], shown: int) -> int | None:
    """What to hold the shown one against: no checkpointing, else whatever else has a timeline."""
    others = [n for n, c in enumerate(items) if n != shown and c.has_timeline]
    return next((n for n in others if items[n].name == "plain"), others[0] if others else None)


_MAKERS = {"plan": _of_plan, "frontier": _of_frontier, "compare": _of_comparison, "measure": _of_measurement}
