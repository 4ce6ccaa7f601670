"""`rematplan fit`: the largest batch, length or depth that a chip has room for; several chips beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rematplan.cli.common import (
    DEFAULTS,
    ExecutorName,
    OffloadChoice,
    Options,
    OwnRegionsChoice,
    Progress,
    Sizes,
    WorkloadName,
    check_target,
    execute,
)
from rematplan.cli.workloads import load_factory, parse_keywords
from rematplan.errors import InputError
from rematplan.report.display import Displayed

_RANGE = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<low>\d[\d_]*)\.\.(?P<high>\d[\d_]*)?")


def fit(
    workload: WorkloadName,
    /,
    *sizes: Sizes,
    target: Annotated[
        list[str],
        Parameter(
            help="The chip to compile for, as `rematplan targets` lists them; give it again for each further chip.",
            negative=(),
        ),
    ],
    vary: Annotated[
        str, Parameter(help="The factory's whole number, and where to look: batch=1.. or length=128..4096.")
    ],
    multiple_of: Annotated[int, Parameter(help="Try only multiples of this.")] = 1,
    slowdown: Annotated[
        float | None,
        Parameter(
            help="The most that the plan may take: 1.1 is a tenth longer than no checkpointing at the same value."
        ),
    ] = None,
    budget: Annotated[
        str | None, Parameter(help="Device memory for the whole step: 12GiB, 600MiB, 12GB, 80%; default all there is.")
    ] = None,
    reserve: Annotated[
        str | None, Parameter(help="Part of the budget to keep free for what else lives there: 1GiB, 5%.")
    ] = None,
    price: Annotated[
        list[str] | None,
        Parameter(help="TARGET=PRICE of one device for an hour, in any currency: tpu-v5e=1.20.", negative=()),
    ] = None,
    own_regions: OwnRegionsChoice = "keep",
    offload: OffloadChoice = "never",
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="Write the plan of the largest to this file; one target.")
    ] = None,
    executor: ExecutorName = None,
    options: Options = DEFAULTS,
) -> None:
    """Find the largest batch, length or depth that fits the chip, with its plan; say which chip is the cheapest."""
    name, low, high = parse_range(vary)
    prices = parse_prices(price or ())
    if output is not None and len(target) != 1:
        raise InputError(f"-o writes the plan of one target, and {len(target)} were given; give one, or leave out -o.")
    for each in target:
        check_target(each, budget=budget, reserve=reserve)

    def action(progress: Progress) -> Displayed:
        import rematplan

        return rematplan.fit(
            load_factory(workload),
            vary=name,
            low=low,
            high=high,
            multiple_of=multiple_of,
            targets=target,
            budget=budget,
            reserve=reserve or 0,
            slowdown=slowdown,
            keywords=parse_keywords(sizes),
            prices=prices,
            own_regions=own_regions,
            offload=offload,
            progress=progress,
        )

    def contents(record: Displayed) -> str:
        return json.dumps(record.to_json()["rows"][0]["plan"], indent=1) + "\n"

    only = target[0] if len(target) == 1 else ""
    execute("fit", options, action, target=only, executor=executor, writes=output, contents=contents)


def parse_range(text: str) -> tuple[str, int, int | None]:
    """`batch=1..64`, or `batch=1..` without an end.

    Raises:
      InputError: it is something else.
    """
    match = _RANGE.fullmatch(text)
    if match is None or any(part and part.endswith("_") for part in (match["low"], match["high"])):
        raise InputError(
            f"{text!r} is not a range of a keyword; write batch=1.. (as far as memory reaches) or batch=8..512."
        )
    return match["name"], int(match["low"]), None if match["high"] is None else int(match["high"])


def parse_prices(words: Sequence[str]) -> dict[str, float]:
    """`tpu-v5e=1.20` words.

    Raises:
      InputError: one is something else, or a target has two.
    """
    prices: dict[str, float] = {}
    for word in words:
        target, separator, text = word.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = None
        if not separator or not target or price is None:
            raise InputError(f"{word!r} is not a price; write TARGET=NUMBER, such as tpu-v5e=1.20.")
        if target in prices:
            raise InputError(f"{target} has two prices, {prices[target]:g} and {price:g}; give one.")
        prices[target] = price
    return prices
