"""A configuration and a traced program -> the same program, checkpointed.

Comes in: `Traced` and a `Configuration`. Goes out: a function of the program's flat inputs. Each region runs under
`jax.checkpoint` with its saved values named; everything else runs as traced. Knows no solver and no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from rematplan import _jax_private, scopes
from rematplan._plan import Plan
from rematplan.errors import InputError, PlanMismatch
from rematplan.lift import Lifted
from rematplan.loops import Iterations, in_parts
from rematplan.named import named_in_derivative
from rematplan.naming import difference, module_fingerprints, resolve
from rematplan.program import evaluate
from rematplan.program.alike import in_module, inside_of, shared
from rematplan.program.configuration import Configuration, LoopPlan, OwnRegions, Region
from rematplan.program.residuals import is_inexact, with_named_residuals
from rematplan.program.saving import honoured, is_complex
from rematplan.program.trace import Detail, Equation, Traced, shape_of, trace


def planned(lifted: Lifted, plan: Plan) -> Callable[..., list[Any]]:
    """The lifted function under a plan, as a function of its flat inputs that returns its flat outputs.

    Args:
      lifted: opened with `scopes=True`, so that values have the names that the plan uses.

    Raises:
      PlanMismatch: the plan was made for another function; the message says what changed.
    """
    traced = _structure(lifted, plan.own_regions)
    bodies = {index: body.graph for index, body in traced.bodies.items()}
    configuration = resolve(plan, traced.graph, bodies)
    return configured(_named(traced, configuration), configuration)


def transferred(
    lifted: Lifted, traced: Traced, configuration: Configuration, *, own_regions: OwnRegions = OwnRegions.KEEP
) -> Callable[..., list[Any]]:
    """What `configured(traced, configuration)` is, for another call of the same function: another batch size, as a rule.

    Args:
      lifted: the other call, opened with `scopes=True`.
      own_regions: as `traced` was traced.

    Raises:
      PlanMismatch: the other call runs another program.
    """
    other = _structure(lifted, own_regions)
    if other.graph.fingerprint != traced.graph.fingerprint:
        raise PlanMismatch(difference(module_fingerprints(traced.graph), module_fingerprints(other.graph)))
    return configured(_named(other, configuration), configuration)


def _structure(lifted: Lifted, own_regions: OwnRegions) -> Traced:
    """The lifted function, traced for what a plan's names need."""
    # whoever calls decides what is differentiated, so every inexact input counts
    inexact = [i for i, leaf in enumerate(lifted.leaves) if is_inexact(leaf)]
    return trace(lifted.pure, lifted.leaves, differentiated=inexact, detail=Detail.STRUCTURE, own_regions=own_regions)


def _named(traced: Traced, configuration: Configuration) -> Traced:
    """The program with what the derivatives of its saved values read, bodies of loops included."""
    bodies = dict(traced.bodies)
    for index, loop in configuration.loops:
        for body in loop.variants():
            bodies[index] = _named(bodies[index], body)
    saved = {v for region in configuration.all_regions() for v in region.saved}
    return with_named_residuals(replace(traced, bodies=bodies), saved)


def configured(traced: Traced, configuration: Configuration) -> Callable[..., list[Any]]:
    """The program under a configuration, as a function of its flat inputs that returns its flat outputs.

    Raises:
      PlanMismatch: a region holds an operation that must run exactly once (a callback or an ordered effect), regions overlap,
        or the parts of a loop are not all of its iterations.
      InputError: regions inside regions under an implementation of remat that does not honour them.
    """
    configuration = honoured(traced, configuration)
    if _jax_private.new_remat():
        _refuse_under_new_remat(configuration)
    _check(traced, configuration.regions, 0, len(traced.equations))
    for index, loop in configuration.loops:
        _check_loop(traced.equations[index], traced.bodies[index], loop)
    applied = _Applied(traced, configuration)

    def function(*leaves: Any) -> list[Any]:
        env = dict(zip(traced.graph.inputs, leaves, strict=True))
        env.update(traced.constants)
        applied.run(Region(0, len(traced.equations), inner=configuration.regions), env)
        return evaluate.outputs(traced, env)

    return function


def _refuse_under_new_remat(configuration: Configuration) -> None:
    """Raises InputError for what JAX's new remat does not honour (jax 0.10.2), instead of running something else."""
    chunks = any(part.chunk for _, loop in configuration.loops for part in loop.parts)
    if chunks or any(region.inner for region in configuration.regions):
        # there an inner region keeps what it saves from the first forward pass on
        raise InputError(
            "the plan has regions inside regions, which do not hold under JAX's new remat (jax_remat3): inner regions would "
            "keep their values all the time and need more memory than planned. Set JAX_REMAT3=0, or plan with a larger "
            "budget, for which one level of regions is enough."
        )
    if any(region.offloaded for region in configuration.regions):
        raise InputError(
            "the plan keeps values in the host's memory, which JAX's new remat (jax_remat3) turns into recomputing them "
            "without a word. Set JAX_REMAT3=0, or plan without offloading."
        )


def _check(traced: Traced, regions: Sequence[Region], start: int, stop: int) -> None:
    position = start
    for region in regions:
        if region.start < position or region.stop > stop:
            raise PlanMismatch(f"regions overlap or run past what they stand in at operation {region.start}")
        position = region.stop
        for name in (traced.graph.values[v].name for v in region.saved if is_complex(traced, v)):
            raise PlanMismatch(
                f"JAX cannot save complex numbers in a region (0.10.2), but the plan names {name!r}; plan again"
            )
        for op in traced.graph.operations[region.start : region.stop]:
            if op.barrier:
                raise PlanMismatch(
                    f"the region from operation {region.start} to {region.stop} would run {op.name} ({op.location}) "
                    "twice: callbacks and ordered effects stay outside regions; end the region before it"
                )
        _check(traced, region.inner, region.start, region.stop)


@dataclass(frozen=True)
class _Code:
    """A checkpointed function: values of `inputs` -> values of `outputs`."""

    function: Callable[..., list[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Applied:
    """Runs a configured program. Regions that are the same run one function, which JAX differentiates once."""

    def __init__(self, traced: Traced, configuration: Configuration):
        self._traced = traced
        self._configuration = configuration
        self._last_use = traced.graph.last_use()
        self._shared = shared(traced, configuration)
        self._codes: dict[tuple[Region, str | None], _Code] = {}
        self._outermost = frozenset(configuration.regions)

    def run(
        self, region: Region, env: dict[int, Any], names: Mapping[int, str] | None = None, module: str | None = None
    ) -> None:
        """Evaluates what a region holds; inner regions under their own `jax.checkpoint`.

        Args:
          names: by id, the values to name.
          module: what the scope around this code says; operations say the rest. None if they say all themselves.
        """
        position = region.start
        for inner in region.inner:
            self._run_operations(position, inner.start, env, names or {}, module)
            self._run_region(inner, env, module)
            position = inner.stop
        self._run_operations(position, region.stop, env, names or {}, module)

    def _run_operations(
        self, start: int, stop: int, env: dict[int, Any], names: Mapping[int, str], module: str | None
    ) -> None:
        traced = self._traced
        for index in range(start, stop):
            equation, operation = traced.equations[index], traced.graph.operations[index]
            loop = self._configuration.loop(index)
            named = {o: names[o] for o in equation.outputs if o in names and _can_be_named(equation)}
            own = bool(named) and not set(named).isdisjoint(operation.needed)
            if module is not None:
                equation = in_module(equation, module, operation.module)
            if loop is not None:
                function = _loop(equation, traced.bodies[index], loop)
            elif own:
                function = named_in_derivative(equation, named)
            else:
                function = evaluate.as_function(equation)
            results = function(*[env[i] for i in equation.inputs])
            for output, result in zip((o for o in equation.outputs if o >= 0), results, strict=True):
                env[output] = checkpoint_name(result, named[output]) if output in named and not own else result

    def _run_region(self, region: Region, env: dict[int, Any], module: str | None) -> None:
        same = self._shared[region]
        scope: AbstractContextManager[Any] = nullcontext()
        if not same.alone:
            path = inside_of(module or "", same.module)
            if path:
                scope = jax.named_scope(scopes.module_scope(path) if module is None else scopes.scope_inside(path))
            module = self._shared[same.original].module
        code = self._code(same.original, module)
        own = lambda v: v if same.values is None else same.values[v]
        with scope:
            results = code.function(*[env[own(i)] for i in code.inputs])
        env.update(zip(map(own, code.outputs), results, strict=True))

    def _code(self, region: Region, module: str | None) -> _Code:
        if (region, module) not in self._codes:
            self._codes[region, module] = self._make(region, module)
        return self._codes[region, module]

    def _make(self, region: Region, module: str | None) -> _Code:
        values = self._traced.graph.values
        equations = self._traced.equations[region.start : region.stop]
        defined = {o for e in equations for o in e.outputs if o >= 0}
        inputs = tuple(dict.fromkeys(i for e in equations for i in e.inputs if i not in defined))
        outputs = tuple(o for e in equations for o in e.outputs if o >= 0 and self._last_use[o] >= region.stop)
        names = {v: self._name(values[v].name, region, module) for v in region.saved}

        def body(*arguments: Any) -> list[Any]:
            env = dict(zip(inputs, arguments, strict=True))
            self.run(region, env, names, module)
            return [env[o] for o in outputs]

        function = jax.checkpoint(body, policy=_policy(region, names), prevent_cse=region.prevent_cse)
        return _Code(function, inputs, outputs)

    def _name(self, full: str, region: Region, module: str | None) -> str:
        """What a saved value is called in the code of its region: the same in every region that runs that code."""
        if module is None:
            return full
        relative = inside_of(module, full)
        if region in self._outermost:
            return relative
        # JAX asks the policies of all regions around a value: its name must not be one of theirs
        return f"{scopes.without_indices(module)}/{relative}".removeprefix("/")


def _can_be_named(equation: Equation) -> bool:
    """Whether a result may get a name: under JAX's new remat none that JAX folds to a literal, which then cannot be lowered
    (0.10.2). Nothing is lost: what has no inputs costs nothing to compute again.
    """
    return bool(equation.inputs) or not _jax_private.new_remat()


def _policy(region: Region, names: Mapping[int, str]) -> Callable[..., Any] | None:
    if region.policy is not None:
        return getattr(jax.checkpoint_policies, region.policy)
    if region.offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(names[v] for v in region.saved - region.offloaded),
            names_which_can_be_offloaded=sorted(names[v] for v in region.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    # a list of names means the same under both of JAX's remat implementations; None is full recompute
    return jax.checkpoint_policies.save_only_these_names(*sorted(names.values())) if names else None


def _loop(equation: Equation, body: Traced, plan: LoopPlan) -> Callable[..., Sequence[Any]]:
    """The loop under its plan."""
    if plan.body is None:
        return in_parts(equation, _iterations(equation, body, plan))
    function = configured(body, plan.body)
    shapes = [shape_of(body.avals[i]) for i in body.graph.inputs]
    closed = jax.make_jaxpr(function)(*shapes)
    eqn = equation.eqn.replace(params={**equation.eqn.params, "jaxpr": closed})
    return evaluate.as_function(Equation(eqn, equation.inputs, equation.outputs))


def _check_loop(equation: Equation, body: Traced, plan: LoopPlan) -> None:
    """Raises what `_loop` would raise, which is called only when the program is traced."""
    if plan.body is None:
        _iterations(equation, body, plan)
    else:
        configured(body, plan.body)


def _iterations(equation: Equation, body: Traced, plan: LoopPlan) -> list[Iterations]:
    """The parts of a loop, each with the function of its iterations."""
    left = equation.eqn.params["length"]
    found: list[Iterations] = []
    for part in plan.parts:
        count = left if part.iterations is None else part.iterations
        regions = part.body.regions
        whole = len(regions) == 1 and (regions[0].start, regions[0].stop) == (0, len(body.equations))
        if not 0 < count <= left or not whole:
            raise PlanMismatch(
                f"a part of the loop takes {count} of the {left} iterations left, with {len(regions)} regions in its body; "
                "every iteration runs once, in one region around the whole body"
            )
        left -= count
        found.append(Iterations(*_in_region(body, part.body, regions[0]), count, part.chunk))
    if left:
        raise PlanMismatch(f"{left} iterations of the loop are in no part of it")
    return found


def _in_region(
    body: Traced, configuration: Configuration, region: Region
) -> tuple[Callable[..., list[Any]], Callable[..., Any] | None]:
    """A loop's body as it runs inside of a region, and the region's policy."""
    _check(body, (region,), 0, len(body.equations))
    if _jax_private.new_remat():
        _refuse_under_new_remat(configuration)
    applied = _Applied(body, configuration)
    names = {v: body.graph.values[v].name for v in region.saved}

    def function(*leaves: Any) -> list[Any]:
        env = dict(zip(body.graph.inputs, leaves, strict=True))
        env.update(body.constants)
        applied.run(region, env, names)
        return evaluate.outputs(body, env)

    return function, _policy(region, names)
