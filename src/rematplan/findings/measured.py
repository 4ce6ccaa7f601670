"""Findings about a compiler's figures, and about a budget.

Comes in: measurements of hand-written configurations, a target, a budget. Goes out: findings.
"""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.program.graph import Graph, Nesting
from rematplan.records import Finding, Row
from rematplan.target.target import Kind
from rematplan.units import format_bytes, format_count

# Sums of residuals this many times what is alive at the peak mislead whoever takes them for memory.
FAR = 1.5
# More FLOPs than this share beyond those of the program as written are recomputation by the compiler.
MORE_FLOPS = 0.005
# Loops with a smaller share of the work change no ranking.
LOOP_SHARE = 0.1


def of_target(kind: Kind) -> tuple[Finding, ...]:
    """What figures of this kind of target cannot say."""
    if kind is not Kind.CPU:
        return ()
    return (
        Finding(
            "cpu-figures",
            "These figures are those of XLA's CPU compiler, which fuses and schedules unlike a TPU's or a GPU's and, without "
            "the option that rematplan sets, removes recomputation; they rank configurations at best. Name the chip you "
            "train on, for example --target tpu-v5e.",
        ),
    )


def of_rows(rows: Sequence[Row], *, residual_bytes: int) -> tuple[Finding, ...]:
    """What the figures of hand-written configurations say beside each other.

    Args:
      residual_bytes: what the program without checkpointing computes and keeps on one device, summed up.
    """
    by_name = {row.name: row.measurement for row in rows}
    plain, own = by_name.get("plain"), by_name.get("compiler")
    found = []
    if plain is not None and residual_bytes:
        alive = max(plain.peak_bytes - plain.argument_bytes, 1)
        if residual_bytes > FAR * alive:
            found.append(
                Finding(
                    "residuals-are-not-memory",
                    f"The residuals of the model without checkpointing sum to {format_bytes(residual_bytes)}, but beside its "
                    f"arguments only {format_bytes(alive)} are alive at the compiled peak: the compiler recomputes "
                    "elementwise chains inside of fusions, and what is kept dies at different times. Rank by compiled "
                    "figures, never by sums of residuals.",
                    bytes=residual_bytes - alive,
                )
            )
    if (
        plain is not None
        and own is not None
        and plain.flops
        and own.flops
        and own.flops > (1 + MORE_FLOPS) * plain.flops
    ):
        more = own.flops - plain.flops
        limit = f" of {format_bytes(own.limit_bytes)}" if own.limit_bytes else ""
        found.append(
            Finding(
                "compiler-rematerializes",
                f"Near the limit{limit} the compiler recomputes {format_count(more)}FLOP a step by itself "
                f"({more / plain.flops:.1%} of the program), where and when it likes. It is what a program gets that is "
                "not checkpointed; a plan under the same limit is the thing to compare it with.",
                flops=more,
            )
        )
    return tuple(found)


def of_loops(graph: Graph) -> tuple[Finding, ...]:
    """Loops whose FLOPs other tools count once."""
    total = sum(op.flops for op in graph.operations) or 1.0
    loops = [op for op in graph.operations if op.subprogram is not None and op.subprogram.kind is Nesting.LOOP]
    heavy = [
        op for op in loops if op.subprogram is not None and op.subprogram.length > 1 and op.flops > LOOP_SHARE * total
    ]
    missing = sum(op.flops * (1 - 1 / op.subprogram.length) for op in heavy if op.subprogram is not None)
    if not heavy:
        return ()
    return (
        Finding(
            "loop-flops",
            f"JAX's and XLA's cost analysis count the body of a loop once: {format_count(missing)}FLOP of the forward pass's "
            f"{format_count(total)}FLOP are missing there. Figures here count every iteration; do not mix them with those.",
            module=heavy[0].module,
            location=heavy[0].location,
            flops=missing,
        ),
    )


def of_budget(*, argument_bytes: int, output_bytes: int, budget_bytes: int) -> tuple[Finding, ...]:
    """A budget that no checkpointing can meet.

    Args:
      argument_bytes, output_bytes: of one step; outputs without those that reuse an argument's memory.
    """
    least = argument_bytes + output_bytes
    if budget_bytes >= least:
        return ()
    return (
        Finding(
            "budget-below-state",
            f"Parameters, inputs, gradients and results alone take {format_bytes(least)} of the step: checkpointing changes "
            f"none of that, so no plan meets {format_bytes(budget_bytes)}. Donate the state to the step, shard it, or keep it "
            "in a smaller dtype.",
            bytes=least - budget_bytes,
        ),
    )
