"""Findings about what the backward pass keeps.

Comes in: residuals with module, shape and operation. Goes out: findings.
"""

from __future__ import annotations

from collections.abc import Sequence

from rematplan.records import Finding, Residual
from rematplan.units import format_bytes

# What is kept and cheap has to be this much of all residuals to be worth a word.
CHEAP_SHARE = 0.1
# A function of one input whose derivative keeps so many values of the input's shape.
CHEAP_COUNT = 3
_ELEMENTWISE = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type cos cosh div eq erf erf_inv exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt select_n sign sin sinh sqrt "
    "square stop_gradient sub tan tanh xor".split()
)


def of_residuals(
    residuals: Sequence[Residual], *, stretches: Sequence[tuple[int, ...]], from_state: Sequence[Residual] = ()
) -> tuple[Finding, ...]:
    """Values that cost memory and are hardly worth it.

    Args:
      stretches: for each residual, where it stands: equal for two without a matrix product between them.
      from_state: those that a loop computes from parameters alone.
    """
    total = sum(r.bytes for r in residuals)
    is_much = sum(r.bytes for r in from_state) >= CHEAP_SHARE * total
    return (*_cheap(residuals, stretches), *(_stacked(from_state) if is_much else ()))


def _stacked(from_state: Sequence[Residual]) -> tuple[Finding, ...]:
    if not from_state:
        return ()
    size = sum(r.bytes for r in from_state)
    first = max(from_state, key=lambda r: r.bytes)
    return (
        Finding(
            "scan-stacks-state",
            f"A loop keeps {format_bytes(size)} that it computes from parameters alone ({first.operation} to {first.dtype}), "
            "stacked over its iterations: another copy of the module's state, which lives from the forward pass to the "
            "backward pass. Checkpoint the loop's body, so that this is computed again, or cast the stacked parameters once "
            "before the loop.",
            module=first.module,
            location=first.location,
            bytes=size,
        ),
    )


def _cheap(residuals: Sequence[Residual], stretches: Sequence[tuple[int, ...]]) -> tuple[Finding, ...]:
    """Cheap values that are kept several times over beside dear ones."""
    total = sum(r.bytes for r in residuals)
    groups: dict[tuple[object, ...], list[Residual]] = {}
    for r, stretch in zip(residuals, stretches, strict=True):
        if r.operation in _ELEMENTWISE:
            groups.setdefault((stretch, r.module, r.shape, r.location), []).append(r)
    several = [g for g in groups.values() if len(g) >= CHEAP_COUNT]
    spare = sum(sum(r.bytes for r in g) - max(r.bytes for r in g) for g in several)
    if not total or spare < CHEAP_SHARE * total:
        return ()
    worst = max(several, key=lambda g: sum(r.bytes for r in g))
    return (
        Finding(
            "cheap-residuals",
            f"{format_bytes(spare)} of {format_bytes(total)} of residuals are elementwise values that one value of the same "
            f"shape would give again: {len(worst)} of {'x'.join(map(str, worst[0].shape)) or 'a scalar'} here alone (a gelu "
            "keeps five times its input). A matrix product beside them costs as many bytes and far more to compute again. "
            "Compilers fuse some of it away; a region that saves the products and not these makes sure.",
            module=worst[0].module,
            location=worst[0].location,
            bytes=spare,
        ),
    )
