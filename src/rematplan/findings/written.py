"""Findings about a program as the user wrote it: regions, policies, names, loops and captured arrays.

Comes in: a traced program. Goes out: findings, one for each source line and code.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

from rematplan import _jax_private
from rematplan.findings.configured import NOTHING, of_spans
from rematplan.program.graph import Graph, Nesting, Operation
from rematplan.program.recomputed import PRODUCTS
from rematplan.program.trace import Traced, nbytes
from rematplan.program.written import Place, Written, WrittenRegion, callbacks, collectives, written
from rematplan.records import Finding
from rematplan.units import format_bytes, format_count

SAVES_ALL_BUT = "save_anything_except_these_names"
# A captured array below this size is a table or a mask, and nobody trains it.
CAPTURED_BYTES = 1 << 16

Rule = Callable[[WrittenRegion, Written], Iterator[Finding]]


def of_program(traced: Traced) -> tuple[Finding, ...]:
    """What the user's function holds already."""
    found = written(traced)
    each = [f for region in found.regions for rule in RULES for f in rule(region, found)]
    return (
        *_own_regions(found),
        *_once(each),
        *_useless(traced.graph, found),
        *_captured(traced),
        *_opaque(traced.graph),
    )


def _once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for each code and source line, with the sum of what is at stake."""
    kept: dict[tuple[str, str], list[Finding]] = {}
    for f in findings:
        kept.setdefault((f.code, f.location), []).append(f)
    merged = []
    for (code, location), same in kept.items():
        sizes = [f.bytes for f in same if f.bytes is not None]
        work = [f.flops for f in same if f.flops is not None]
        times = ""
        if len(same) > 1:
            summed = "; what is at stake is the sum of all, other figures are of one" if sizes or work else ""
            times = f" This holds {len(same)} times here{summed}."
        first = same[0]
        size, flops = sum(sizes) if sizes else None, sum(work) if work else None
        merged.append(Finding(code, first.message + times, first.module, location, size, flops))
    return tuple(merged)


def _finding(code: str, message: str, place: Place, *, size: int | None = None, flops: float | None = None) -> Finding:
    return Finding(code, message, place.module, place.location, size, flops)


# ---------------------------------------------------------------------------------------------- regions and their policies


def _policy(region: WrittenRegion, found: Written) -> Iterator[Finding]:
    """What the policy saves of what is in its region."""
    work = region.flops * region.place.times
    if region.policy is None and not work:
        return
    if region.policy is None:
        yield _finding(
            "no-policy",
            f"A region without a policy (policy=None) saves nothing inside: up to {format_count(work)}FLOP run a second "
            "time in every step. That is full recomputation, not 'save everything'. If it is what you want, "
            "policy=nothing_saveable says so; else name values and pass save_only_these_names, or leave the region out.",
            region.place,
            flops=work,
        )
        return
    if _jax_private.new_remat() and not _jax_private.kept_by_new_remat(region.policy):
        yield _finding(
            "callable-policy",
            f"JAX's new rematerialization (JAX_REMAT3) does not follow the policy {region.policy_name} and says nothing: "
            "the region saves nothing. It follows save_only_these_names, save_any_names_but_these, dots_saveable and "
            "dots_with_no_batch_dims_saveable. Name the values and use the first.",
            region.place,
            flops=work,
        )
        return
    if region.holds_rules or region.holds_regions:
        return  # the policy is also asked about a forward rule's residuals, and not about what is in regions inside
    kept = [s for s in region.seen if s.is_saved or s.is_offloaded]
    values = [s for s in region.seen if not s.name]
    if region.policy_name == SAVES_ALL_BUT:
        yield _finding(
            "save-anything-except-names",
            "save_anything_except_these_names saves everything, the named values too: a value and its named copy are two "
            "values, and the unnamed one is saved. The region frees nothing. Use save_only_these_names with what is dear, "
            "or save_any_names_but_these.",
            region.place,
            size=sum(s.bytes for s in values),
        )
    elif values and all(s.is_saved for s in region.seen) and region.policy_name != NOTHING:
        yield _finding(
            "policy-saves-everything",
            f"The policy {region.policy_name} saves every value of its region: nothing is freed, and the compiler can no "
            "longer fuse across the region's boundary. Leave the region out, or save less.",
            region.place,
            size=sum(s.bytes for s in values),
        )
    elif not kept and region.policy_name != NOTHING and work:
        yield _finding(
            "policy-saves-nothing",
            f"The policy {region.policy_name} saves nothing in its region: {_why_nothing(region, found)} "
            f"Up to {format_count(work)}FLOP run a second time in every step.",
            region.place,
            flops=work,
        )
    elif region.asked:
        missing = sorted(region.asked - region.names)
        if missing and kept:
            listed = ", ".join(map(repr, missing))
            yield _finding(
                "name-not-found",
                f"The policy {region.policy_name} asks for {listed}, which is not given in its region: "
                f"{_hint(missing, region, found)}",
                region.place,
            )


def _why_nothing(region: WrittenRegion, found: Written) -> str:
    if region.asked:
        return f"it asks for {', '.join(map(repr, sorted(region.asked)))}. {_hint(sorted(region.asked), region, found)}"
    products = [s for s in region.seen if s.primitive in PRODUCTS]
    if products and all(s.has_batch_dimensions or s.primitive != "dot_general" for s in products):
        return (
            "every product there has batch dimensions (attention scores, vmap over both operands, an einsum over experts) or "
            "is a convolution, and this policy saves products without them. dots_saveable saves these too; so does a name."
        )
    return "no operation there is of the kind that it may save. Name the values that are dear to compute."


def _hint(missing: list[str], region: WrittenRegion, found: Written) -> str:
    outside = [n for n in missing if n in found.names]
    if outside:
        listed = ", ".join(map(repr, outside))
        return f"{listed} is given outside of the region, where its policy does not reach. Name the value inside."
    close = [c for n in missing for c in difflib.get_close_matches(n, sorted(region.names), n=1)]
    known = ", ".join(map(repr, sorted(region.names)))
    if close:
        return f"did you mean {', '.join(map(repr, close))}? Names in the region: {known}."
    return f"names in the region: {known}." if known else "checkpoint_name gives no name in the region."


def _saved_yet_recomputed(region: WrittenRegion, _: Written) -> Iterator[Finding]:
    for name in region.named_but_recomputed:
        named = [s for s in region.seen if s.name == name]
        yield _finding(
            "saved-yet-recomputed",
            f"{name!r} is saved, and computed again all the same: the backward pass reads the value as it was before "
            "checkpoint_name, because another operation takes the unnamed one, or because the operation that makes it needs "
            "its own result (exp, tanh, a custom_vjp). Let everything read what checkpoint_name returns, and in a custom_vjp "
            "name the residuals in its forward rule. A plan's names stand where they are read.",
            named[0].place,
            size=sum(s.bytes for s in named),
        )


def _hinders_nothing(region: WrittenRegion, _: Written) -> Iterator[Finding]:
    if not region.prevent_cse and not region.in_loop:
        yield _finding(
            "prevent-cse-off",
            "prevent_cse=False outside of a loop: the compiler may find that what the region computes again is what it has "
            "already, keep that, and undo the checkpointing; nothing then says so. It is for the bodies of scan, where the "
            "loop itself keeps both apart. Leave prevent_cse on.",
            region.place,
            flops=region.flops * region.place.times,
        )


def _nested(region: WrittenRegion, _: Written) -> Iterator[Finding]:
    if region.depth:
        again = region.depth * region.flops * region.place.times
        yield _finding(
            "nested-regions",
            f"This region stands inside {region.depth} other{'s' if region.depth > 1 else ''}: what is in it runs "
            f"up to {region.depth + 1} times more than without checkpointing, where one region runs it once more. That is "
            "right where memory is so short that one level of regions does not fit; else take one of them out.",
            region.place,
            flops=again,
        )


def _replayed(region: WrittenRegion, _: Written) -> Iterator[Finding]:
    for s in callbacks(region)[:1]:
        yield _finding(
            "replayed-callback",
            f"A callback ({s.primitive}) stands in a region: it runs in the forward pass, and again when the region is "
            "computed again, with the same values. Move it out of the region, or count on it running twice. Plans of "
            "rematplan put no callback into a region.",
            s.place,
        )
    sent = collectives(region)
    if sent:
        size = sum(s.bytes for s in sent)
        yield _finding(
            "replayed-collective",
            f"A region repeats communication ({', '.join(sorted({s.primitive for s in sent}))}): {format_bytes(size)} are "
            "received a second time in every step. Save its result by name, which costs these bytes of memory.",
            sent[0].place,
            size=size,
        )


def _offloaded(region: WrittenRegion, _: Written) -> Iterator[Finding]:
    away = [s for s in region.seen if s.is_offloaded]
    outside = [s for s in away if not region.in_loop and s.place.times == region.place.times]
    if outside:
        yield _finding(
            "offload-outside-loop",
            "A value is kept in the host's memory outside of a loop: compilers do not reliably free the device's copy there, "
            "and the peak has been seen to rise. Offload inside of a scan over layers, or recompute.",
            outside[0].place,
            size=sum(s.bytes for s in outside),
        )
    carried = [s for s in away if s.is_carry]
    if carried:
        yield _finding(
            "offload-carry",
            "What the loop hands to its next iteration is kept in the host's memory: the next iteration needs it on the "
            "device at once, and the loop keeps it as its carry as well. Offload a value inside the iteration.",
            carried[0].place,
            size=sum(s.bytes for s in carried),
        )


RULES: tuple[Rule, ...] = (_policy, _saved_yet_recomputed, _hinders_nothing, _nested, _replayed, _offloaded)


# -------------------------------------------------------------------------------------------------------- whole programs


def _own_regions(found: Written) -> Iterator[Finding]:
    own = [r for r in found.regions if r.depth == 0]
    for location in dict.fromkeys(r.place.location for r in own):
        here = [r for r in own if r.place.location == location]
        inside = sum(len(r.seen) for r in here)
        regions = "a region" if len(here) == 1 else f"{len(here)} regions"
        yield Finding(
            "own-region",
            f"The model checkpoints {inside} operations by itself, in {regions} kept as written: what a policy or plan "
            "saves lies outside. To have it planned, plan with own_regions='replace', or remove it.",
            module=here[0].place.module,
            location=location,
            flops=sum(r.flops * r.place.times for r in here),
        )


def _useless(graph: Graph, found: Written) -> tuple[Finding, ...]:
    """The user's own regions that cannot lower the peak."""
    own = [op for op in graph.operations if op.subprogram is not None and op.subprogram.kind is Nesting.REGION]
    top = [r for r in found.regions if r.depth == 0 and not r.in_loop and r.place.times == 1]
    if len(own) != len(top):
        return ()  # some stand in calls that keep shardings: which is which is not known
    bare = [
        op
        for op, r in zip(own, top, strict=True)
        if not (r.holds_regions or r.holds_rules or any(s.is_saved or s.is_offloaded for s in r.seen))
    ]
    last = (own[-1].index, own[-1].index + 1) if own else None
    return of_spans(graph, [(op.index, op.index + 1) for op in bare], last=last)


def _captured(traced: Traced) -> Iterator[Finding]:
    inexact = ("float", "complex")
    floating = [a for a in traced.constants.values() if any(t in str(getattr(a, "dtype", "")) for t in inexact)]
    size = sum(nbytes(a) for a in floating)
    if size >= CAPTURED_BYTES:
        yield Finding(
            "closure-capture",
            f"The function uses arrays of {format_bytes(size)} from outside instead of taking them as arguments: each is a "
            "constant of the compiled program. Nothing differentiates it, and a trace that is kept does not see a later "
            "value. If it is a parameter or data, pass it as an argument.",
            bytes=size,
        )


def _with_bodies(graph: Graph) -> Iterator[Operation]:
    """The operations of a program and of the bodies of its loops."""
    for op in graph.operations:
        yield op
        if op.subprogram is not None and op.subprogram.kind is Nesting.LOOP:
            yield from _with_bodies(op.subprogram.graph)


def _opaque(graph: Graph) -> Iterator[Finding]:
    """Loops without a fixed length and branches: one finding for each source line."""
    ops = [op for op in _with_bodies(graph) if op.primitive in ("while", "cond")]
    for location, op in {op.location: op for op in reversed(ops)}.items():
        yield Finding(
            "one-operation",
            f"A {op.primitive} is one operation for the planner: it runs again as a whole or not at all, and nothing inside "
            "is saved by name. A loop of fixed length is planned inside if it is written with scan.",
            module=op.module,
            location=location,
            flops=op.flops,
        )
