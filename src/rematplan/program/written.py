"""The checkpointing that a user wrote: every region in a program, where it stands and what its policy does there.

Comes in: a traced program. Goes out: a `WrittenRegion` for each `jax.checkpoint` or `nnx.remat`, also inside of loops,
calls and other regions, and every name that `checkpoint_name` gives. Policies are asked, not guessed: each is called for
every operation of its region, as JAX does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from rematplan import _jax_private
from rematplan.program import flops
from rematplan.program.recomputed import runs_again_anyway
from rematplan.program.residuals import with_residuals
from rematplan.program.trace import CALLBACKS, COLLECTIVES, Traced, nbytes, region_body, trace_jaxpr
from rematplan.scopes import module_path

_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True)
class Place:
    """Where something stands: module path, the user's source line, and how many times a step runs it."""

    module: str = ""
    location: str = ""
    times: int = 1


@dataclass(frozen=True)
class Seen:
    """An operation in a region: what it is, its size, and what the policy said of its result."""

    primitive: str
    name: str
    bytes: int
    flops: float
    place: Place
    is_saved: bool
    is_offloaded: bool
    is_carry: bool
    is_read: bool  # by another operation in the region: only then may it have to be computed again
    has_batch_dimensions: bool


@dataclass(frozen=True)
class WrittenRegion:
    """A region that the user wrote.

    Attributes:
      depth: how many regions stand around it.
      in_loop: whether it is in the body of a loop.
      policy: the policy itself, or None.
      asked: names that the policy mentions; empty if it mentions none.
      seen: the operations inside, those of nested calls and loops included, those of nested regions not.
      named_but_recomputed: names that the policy saves although the backward pass reads the value as it was before it got
        its name, and so computes it again.
      flops: of one execution of everything inside, regions inside included.
      holds_regions: whether further regions stand inside.
      holds_rules: whether it holds a `custom_vjp`, whose forward rule JAX asks the policy about, and not what is seen here.
    """

    place: Place
    depth: int
    in_loop: bool
    prevent_cse: bool
    policy: Any
    asked: frozenset[str]
    seen: tuple[Seen, ...]
    named_but_recomputed: tuple[str, ...]
    flops: float
    holds_regions: bool
    holds_rules: bool

    @property
    def names(self) -> frozenset[str]:
        """Names given inside."""
        return frozenset(s.name for s in self.seen if s.name)

    @property
    def policy_name(self) -> str:
        """What the user called to make the policy, as far as it can be told."""
        if self.policy is None:
            return "None"
        qualified = getattr(self.policy, "__qualname__", type(self.policy).__name__)
        return qualified.split(".<locals>")[0]


@dataclass(frozen=True)
class Written:
    """Everything about checkpointing in a program as the user wrote it.

    Attributes:
      names: every name given anywhere.
    """

    regions: tuple[WrittenRegion, ...]
    names: frozenset[str]


def written(traced: Traced) -> Written:
    """Reads what the user wrote."""
    regions: list[WrittenRegion] = []
    names: set[str] = set()
    for eqn, place, context in _walk([(e.eqn, e.location) for e in traced.equations], Place(), _Context()):
        name = _jax_private.given_name(eqn)
        if name:
            names.add(name)
        if region_body(eqn) is not None:
            regions.append(_region(eqn, place, context))
    return Written(tuple(regions), frozenset(names))


@dataclass(frozen=True)
class _Context:
    """Where a walk is: regions and loops around, and what the loop's next iteration takes over."""

    depth: int = 0
    in_loop: bool = False
    has_axes: bool = False  # in a shard_map: what communicates cannot be differentiated by itself
    carries: frozenset[Any] = frozenset()


def _walk(
    equations: Sequence[tuple[Any, str]], outer: Place, context: _Context
) -> Iterator[tuple[Any, Place, _Context]]:
    """Every equation, nested ones after the one that holds them."""
    for eqn, location in equations:
        place = _place(eqn, outer, location)
        yield eqn, place, context
        depth = context.depth + (region_body(eqn) is not None)
        for body in _bodies(eqn):
            in_loop = context.in_loop or eqn.primitive.name in _LOOPS
            has_axes = context.has_axes or eqn.primitive.name == "shard_map"
            inner = _Context(depth, in_loop, has_axes, _carries(eqn, body, context.carries))
            yield from _walk([(e, "") for e in body.eqns], _inside(eqn, place), inner)


def _place(eqn: Any, outer: Place, location: str = "") -> Place:
    module = module_path(str(eqn.source_info.name_stack)) or outer.module
    return Place(module, location or _jax_private.user_location(eqn.source_info) or outer.location, outer.times)


def _inside(eqn: Any, place: Place) -> Place:
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return Place(place.module, place.location, place.times * times)


def _bodies(eqn: Any) -> list[Any]:
    return [closed.jaxpr for _, closed in flops.nested_jaxprs(eqn)]


def _carries(eqn: Any, body: Any, outside: frozenset[Any]) -> frozenset[Any]:
    """Results of a nested program that a loop's next iteration takes over: this loop's, or those of the one around."""
    if eqn.primitive.name == "scan":
        _, carried = _jax_private.scan_sizes(eqn.params)
        return frozenset(v for v in body.outvars[:carried] if not isinstance(v, jex.Literal))
    if len(body.outvars) != len(eqn.outvars):
        return frozenset()
    pairs = zip(body.outvars, eqn.outvars, strict=True)
    return frozenset(inner for inner, v in pairs if v in outside and not isinstance(inner, jex.Literal))


def _region(eqn: Any, place: Place, context: _Context) -> WrittenRegion:
    policy, prevent_cse = _jax_private.region_parameters(eqn)
    (body,) = _bodies(eqn)
    seen = tuple(_seen(body, policy, place, _carries(eqn, body, context.carries)))
    saved = {s.name for s in seen if s.name and s.is_saved}
    return WrittenRegion(
        place=place,
        depth=context.depth,
        in_loop=context.in_loop,
        prevent_cse=prevent_cse,
        policy=policy,
        asked=names_in(policy),
        seen=seen,
        named_but_recomputed=_recomputed_all_the_same(body, saved) if saved and not context.has_axes else (),
        flops=flops.of_jaxpr(body),
        holds_regions=_holds(body, lambda e: region_body(e) is not None),
        holds_rules=_holds(body, lambda e: e.primitive.name.startswith("custom_vjp")),
    )


def _holds(body: Any, what: Callable[[Any], bool]) -> bool:
    return any(what(eqn) or any(_holds(inner, what) for inner in _bodies(eqn)) for eqn in body.eqns)


def _seen(body: Any, policy: Any, outer: Place, carries: frozenset[Any]) -> Iterator[Seen]:
    """The operations of a region, asked about by the policy."""
    readers: dict[Any, list[Any]] = {}
    for eqn in body.eqns:
        for v in eqn.invars:
            if not isinstance(v, jex.Literal):
                readers.setdefault(v, []).append(eqn)
    for eqn in body.eqns:
        place = _place(eqn, outer)
        if region_body(eqn) is not None:
            continue
        nested = _bodies(eqn)
        for inner in nested:
            yield from _seen(inner, policy, _inside(eqn, place), _carries(eqn, inner, carries))
        if nested:
            continue
        answer = _asked(policy, eqn)
        read_by = [reader for v in eqn.outvars for reader in readers.get(v, ())]
        names = [reader for reader in read_by if _jax_private.given_name(reader)]
        if names and len(names) == len(read_by) and answer == "recompute":
            answer = _asked(policy, names[0])  # nothing reads it but what gives it its name
        yield Seen(
            primitive=eqn.primitive.name,
            name=_jax_private.given_name(eqn),
            bytes=sum(nbytes(v.aval) for v in eqn.outvars) * place.times,
            flops=flops.of_equation(eqn) * place.times,
            place=place,
            is_saved=answer == "save",
            is_offloaded=answer == "offload",
            is_carry=any(v in carries for v in eqn.outvars),
            is_read=len(read_by) > len(names) or any(readers.get(v) for n in names for v in n.outvars),
            has_batch_dimensions=eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1]),
        )


def _asked(policy: Any, eqn: Any) -> str:
    """What becomes of the results of an equation under a policy."""
    if policy is None or (_jax_private.new_remat() and not _jax_private.kept_by_new_remat(policy)):
        return "recompute"
    try:
        return _jax_private.answer_of(policy, eqn)
    except Exception:  # noqa: BLE001  # the user's code, called for an operation that JAX may never ask it about
        return "recompute"


def names_in(policy: Any) -> frozenset[str]:
    """The names that a policy of `jax.checkpoint_policies` was made with."""
    found: set[str] = set()
    pending, met = [policy], set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in met:
            continue
        met.add(id(one))
        # `save_any_names_but_these` holds the names that it does not ask for
        held = getattr(one, "saveable_names", None)
        if isinstance(held, (set, frozenset, tuple, list)):
            found.update(n for n in held if isinstance(n, str))
        # In a function that is not JAX's own, a set of strings may be anything.
        asks = inspect.isfunction(one) and not one.__qualname__.startswith("save_any_names_but_these")
        if asks and one.__closure__ and one.__module__.startswith("jax."):
            for cell in one.__closure__:
                try:
                    held = cell.cell_contents
                except ValueError:  # never assigned
                    continue
                if isinstance(held, (set, frozenset, tuple, list)):
                    found.update(n for n in held if isinstance(n, str))
                elif callable(held):
                    pending.append(held)
    return frozenset(found)


def _recomputed_all_the_same(body: Any, saved: set[str]) -> tuple[str, ...]:
    """Saved names whose value the backward pass reads as it was before it got the name, whatever is differentiated.

    Each input is differentiated by itself, so that what only the gradient of some argument reads that may be none here does
    not count.
    """
    closed = body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())
    if any(v for v in closed.jaxpr.constvars):
        return ()
    count = len(closed.jaxpr.invars)
    flat = trace_jaxpr(closed, differentiated=range(count))
    alone = [
        {v for op in with_residuals(flat, frozenset({i})).graph.operations for v in op.needed} for i in range(count)
    ]
    reached = [each for each in alone if each]
    needed = set[int].intersection(*reached) if reached else set[int]()
    found = []
    for op, equation in zip(flat.graph.operations, flat.equations, strict=True):
        name = _jax_private.given_name(equation.eqn)
        if name not in saved or not op.inputs:
            continue
        source = op.inputs[0]
        maker = flat.graph.producer[source]
        if maker < 0:
            continue
        makes = flat.graph.operations[maker]
        by_rule = makes.primitive.startswith("custom_vjp") and runs_again_anyway(flat, makes)
        if source in needed or by_rule:
            found.append(name)
    return tuple(dict.fromkeys(found))


def callbacks(region: WrittenRegion) -> list[Seen]:
    """Callbacks that run again with the region: for what they do, or because their results are read."""
    does = [s for s in region.seen if s.primitive in CALLBACKS]
    return [s for s in does if s.primitive != "pure_callback" or (s.is_read and not s.is_saved)]


def collectives(region: WrittenRegion) -> list[Seen]:
    """Communication that is repeated with the region, since its result is read there and not saved."""
    return [s for s in region.seen if s.primitive in COLLECTIVES and s.is_read and not s.is_saved]
