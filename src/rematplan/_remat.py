"""`remat`: checkpointing as a decorator, for functions of NNX modules and for plain JAX functions.

Comes in: a function, and a policy or a plan. Goes out: a function with the same signature and the same results whose
derivative recomputes. One transformation for every form: the call is opened (`lift`), its pure function goes through
`jax.checkpoint` or through the plan, and the outputs are closed again, so that module state comes out once and alike.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from rematplan import _jax_private
from rematplan.captured import captured, explain
from rematplan.errors import InputError, PlanMismatch
from rematplan.lift import Lifted, Program, lift

if TYPE_CHECKING:
    from rematplan._plan import Plan

F = TypeVar("F", bound=Callable[..., Any])
PureFunction = Callable[..., Sequence[Any]]

# Traces kept for each decorated function, by structure, static values, shapes and dtypes. A loop that passes a new
# Python number every time must not keep them all.
KEPT_TRACES = 64


class OnMismatch(Enum):
    """What to do when a plan is not for the function it is given to."""

    #: Raise `PlanMismatch`.
    RAISE = "raise"
    #: Run without the plan, with a warning.
    PLAIN = "plain"


class CapturedModuleWarning(UserWarning):
    """A function under `remat` uses a module that it is not passed."""


class PlanMismatchWarning(UserWarning):
    """A plan is not for this function, which runs without it."""


@overload
def remat(
    f: F,
    /,
    *,
    policy: Callable[..., Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    on_mismatch: OnMismatch | str = OnMismatch.RAISE,
) -> F: ...


@overload
def remat(
    f: None = None,
    /,
    *,
    policy: Callable[..., Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    on_mismatch: OnMismatch | str = OnMismatch.RAISE,
) -> Callable[[F], F]: ...


def remat(
    f: Callable[..., Any] | None = None,
    /,
    *,
    policy: Callable[..., Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool = True,
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    on_mismatch: OnMismatch | str = OnMismatch.RAISE,
) -> Any:
    """Makes the derivative of a function recompute instead of keep: `nnx.remat` and `jax.checkpoint` in one, or a plan.

    Use it bare (`@remat`), with arguments (`@remat(policy=...)`) or as a function, on functions and methods, under
    `jax.jit`, `nnx.jit`, `nnx.grad`, `nnx.value_and_grad`, `jax.grad` and `vmap`. Module state that the function writes
    (batch statistics, random counts, sown values, new Variables, static attributes) reaches the caller's modules once.

    Args:
      f: the function; without it, a decorator is returned.
      policy: what may be kept, as in `jax.checkpoint`. None keeps nothing.
      static_argnums, static_argnames: arguments to pass through untouched. Python numbers, strings, functions and None
        are static without being named.
      prevent_cse: as in `jax.checkpoint`; False only inside a `scan`.
      plan: a `Plan`, its dict, or the path of its file; decides what is kept instead of a policy.
      on_mismatch: "raise" `PlanMismatch` when the plan is for another function, or run "plain" with a warning.

    Returns:
      A function of the same arguments with the same results, of the same shapes and dtypes. With a plan, another batch
      size will do; the plan's figures then no longer count.

    Raises:
      InputError: a plan together with a policy or with prevent_cse, or a plan file that cannot be read; when called, a function
        that captures a module, with a plan.
      PlanMismatch: the file is no plan, or, when called, the plan is for another function.
    """
    if f is None:
        return functools.partial(
            remat,
            policy=policy,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            prevent_cse=prevent_cse,
            plan=plan,
            on_mismatch=on_mismatch,
        )
    if not callable(f):
        raise InputError(f"remat takes a function, but got a {type(f).__name__}")
    if plan is not None and policy is not None:
        raise InputError("a plan already says what is kept: give either plan= or policy=, not both")
    if plan is not None and not prevent_cse:
        raise InputError("a plan already says where common subexpressions may be merged: leave out prevent_cse=")
    if _jax_private.new_remat() and not _jax_private.kept_by_new_remat(policy):
        raise InputError(
            f"JAX's new rematerialization (jax_remat3) ignores the policy {getattr(policy, '__qualname__', policy)!r} without "
            "a word and would save nothing: it knows save_only_these_names, save_any_names_but_these, dots_saveable and "
            "dots_with_no_batch_dims_saveable. Use one of these, a plan, or JAX_REMAT3=0."
        )
    try:
        mismatch = OnMismatch(on_mismatch)
    except ValueError:
        raise InputError(f"on_mismatch is 'raise' or 'plain', not {on_mismatch!r}") from None

    # read here, so that a file that cannot be read fails where the function is decorated
    loaded = None if plan is None else _load(plan)
    if loaded is None:

        def transform(lifted: Lifted) -> PureFunction:
            return jax.checkpoint(lifted.pure, policy=policy, prevent_cse=prevent_cse)
    else:

        def transform(lifted: Lifted) -> PureFunction:
            return _planned(lifted, loaded, mismatch)

    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    kept = _Kept()

    @functools.wraps(f)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        lifted = lift(f, args, kwargs, static_argnums=numbers, static_argnames=names, scopes=plan is not None)
        outside = captured(f)
        if outside and plan is not None:
            raise InputError(explain(f, outside))
        if outside:
            warnings.warn(explain(f, outside), CapturedModuleWarning, stacklevel=2)
        # What a function captures is no part of the key: such a trace must not be used again.
        program, function = kept.get(lifted, transform) if not outside else (lifted.program, transform(lifted))
        return lifted.using(program).finish(function(*lifted.leaves))

    return rematerialized


class _Kept:
    """Transformed functions by the structure they were made for, so that JAX finds its own traces of them again."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, tuple[Program, PureFunction]] = OrderedDict()

    def get(self, lifted: Lifted, transform: Callable[[Lifted], PureFunction]) -> tuple[Program, PureFunction]:
        # what is set around the call, such as the precision of products, is part of a trace
        key = lifted.key, _jax_private.trace_context()
        entry = self._entries.get(key)
        if entry is None:
            # without arrays: what is kept must not keep the caller's parameters alive
            entry = self._entries[key] = (lifted.program, transform(lifted.abstract()))
        self._entries.move_to_end(key)
        while len(self._entries) > KEPT_TRACES:
            self._entries.popitem(last=False)
        return entry


def _load(plan: Any) -> Plan:
    from rematplan._plan import Plan  # without a plan, none of this is needed

    return Plan.load(plan)


def _planned(lifted: Lifted, plan: Plan, mismatch: OnMismatch) -> PureFunction:
    from rematplan.apply import planned

    try:
        return planned(lifted, plan)
    except PlanMismatch as error:
        if mismatch is OnMismatch.RAISE:
            raise
        warnings.warn(f"{error} It runs without the plan.", PlanMismatchWarning, stacklevel=4)
        return lifted.pure
