"""Plans for several devices against hand-written configurations, each device's memory and time.

    python -m benchmarks.sharded                                  # all cases: an hour on two quiet cores
    python -m benchmarks.sharded --only "gpt fsdp h100"

Every figure is of a full compile, on TPU with a budget as the compiler's limit. Budgets are what per-block, dots and plain
need: the least limits found under which they compile. A row holds if its plan is no slower (1 % for ties) than every
hand-written configuration that fits its budget, compiled under that budget: given little memory, the TPU's compiler makes
less code, which hides less communication.
`errors` are predictions before the plan's own compile; `replayed` are collectives that are made once more because regions
run again; `waiting` is time that communication adds (a ring over the chip's links, `chips.toml`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.target.measurement import Measurement

TIE = 1.01
STEP = 1.01  # from a limit that is refused to the next
MIB = 1 << 20
WRITTEN = ("plain", "per-block", "dots")
# GPT of 12 blocks, 16 sequences on each device that splits the batch; vision transformers of 64 images on each.
CASES: dict[str, tuple[str, Callable[[], rp.Workload]]] = {
    "gpt fsdp": ("tpu-v5e:4x4", lambda: workloads.gpt(blocks=12, batch=256, mesh="fsdp:16")),
    "gpt fsdp tensor": ("tpu-v5e:4x4", lambda: workloads.gpt(blocks=12, batch=64, mesh="fsdp:4,model:4")),
    "gpt fsdp v6e": ("tpu-v6e:2x4", lambda: workloads.gpt(blocks=12, batch=128, mesh="fsdp:8")),
    "gpt fsdp h100": ("gpu-h100:8", lambda: workloads.gpt(blocks=12, batch=128, mesh="fsdp:8")),
    "gpt fsdp tensor h100": ("gpu-h100:8", lambda: workloads.gpt(blocks=12, batch=64, mesh="fsdp:4,model:2")),
    "vit data h100": ("gpu-h100:8", lambda: workloads.vit(blocks=6, batch=512, mesh="data:8")),
    "vit data": ("tpu-v5e:4x4", lambda: workloads.vit(blocks=2, batch=1024, mesh="data:16")),
}


def row(name: str, measured: Measurement, *rest: str) -> list[str]:
    """Figures of one configuration."""
    replayed = sum(c.count for c in measured.collectives if c.step_pass == "recompute")
    return [
        name,
        f"{measured.required_bytes / MIB:.0f}",
        f"{1000 * (measured.seconds or 0.0):.2f}",
        f"{1000 * measured.waiting_seconds:.2f}",
        str(sum(c.count for c in measured.collectives)),
        str(replayed),
        *rest,
    ]


def at_its_need(work: rp.Workload, target: str, policy: str) -> Measurement:
    """A configuration under the least limit that is found for it; needs are estimates until the compiler has agreed."""
    measured, budget = rp.measure(work, target=target, policy=policy), 0
    while not measured.fits_limit:
        budget = max(measured.required_bytes, int(STEP * budget))
        measured = rp.measure(work, target=target, policy=policy, budget=budget)
    return replace(measured, required_bytes=budget)


def case(name: str, table: Table, progress: Console) -> None:
    """All rows of one workload."""
    target, make = CASES[name]
    work, begun = make(), time.monotonic()
    written: dict[str, Measurement] = {}
    for policy in WRITTEN:
        written[policy] = at_its_need(work, target, policy)
        table.add_row(f"{name}, {target}" if policy == "plain" else "", *row(policy, written[policy]))
    for policy, measured in sorted(written.items(), key=lambda each: each[1].required_bytes):
        budget = measured.required_bytes
        progress.print(f"{time.monotonic() - begun:.0f} s: {name}, a plan within {policy}")
        plan = rp.plan(work, budget=budget, target=target)
        found = plan.measurement
        assert found is not None
        seconds = found.seconds or 0.0
        smaller = [p for p, m in written.items() if m.required_bytes <= budget]
        held = {p: rp.measure(work, target=target, policy=p, budget=budget) for p in smaller}
        fastest, best = min((m.seconds or 0.0, p) for p, m in held.items() if m.fits_limit)
        errors = [plan.predicted[key] / getattr(found, key) - 1 for key in ("required_bytes", "seconds")]
        chosen = plan.notes[0].removeprefix("chosen: ")
        rest = (f"{seconds / fastest - 1:+.1%} {best}", *(f"{e:+.1%}" for e in errors))
        verdict = "" if seconds <= TIE * fastest else " SLOWER"
        table.add_row("", *row(f"plan within {policy}{verdict}", found, *rest, chosen))
    progress.print(f"{name}: {time.monotonic() - begun:.0f} s")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    table = Table("workload", "configuration", "need MiB", "ms", "waiting ms", "collectives", "replayed")
    for column in ("against best written", "need error", "time error", "chosen"):
        table.add_column(column)
    for name in given.only:
        case(name, table, Console(stderr=True))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
