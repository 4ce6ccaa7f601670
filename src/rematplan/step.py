"""A training step around a flat loss program, as a pure function of flat arrays.

Comes in: a loss as flat leaves -> flat outputs (`Lifted.pure`, or what a plan makes of it) and which leaves are
differentiated. Goes out: `StepFunction`: what a target's compiler gets. Knows nothing of plans or compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from rematplan.lift import Lifted, OutputInfo, abstract, lift
from rematplan.program.parameters import of_parameters
from rematplan.pure import LeafInfo
from rematplan.sharding import constrained, in_mesh, mesh_of, own_spec, placed

PureLoss = Callable[..., list[Any]]


@dataclass(frozen=True)
class StepFunction:
    """One training step.

    Attributes:
      function: flat arrays -> flat outputs.
      leaves: shapes and dtypes of the arrays.
      arguments: what each of them is.
      donated: positions of the arrays that the step replaces, and whose memory it may use.
      outputs: names what each flat output is: "loss", "aux", "gradient" and "state", or "result" where the step is the
        user's own. Call it after `function` was traced.
    """

    function: Callable[..., list[Any]]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    arguments: tuple[LeafInfo, ...]
    donated: tuple[int, ...]
    outputs: Callable[[], tuple[OutputInfo, ...]]

    def sources(self) -> tuple[int | None, ...]:
        """For each output the argument that it is laid out like: gradients and new state like what they are of."""
        return tuple(info.source for info in self.outputs())


def _laid_out(values: Sequence[Any], infos: Sequence[OutputInfo], leaves: Sequence[Any]) -> list[Any]:
    """Outputs on the devices that hold what they are of, as a training step keeps them; the compiler places the others."""
    if mesh_of(leaves) is None:
        return list(values)
    return [
        value if info.source is None else constrained(value, leaves[info.source])
        for value, info in zip(values, infos, strict=True)
    ]


def value_and_grad(lifted: Lifted, pure_loss: PureLoss | None, differentiated: tuple[int, ...]) -> StepFunction:
    """Loss, auxiliary results, gradients, changed state: the outputs of `nnx.value_and_grad` and no others."""
    loss_and_grads = _loss_and_grads(lifted, pure_loss, differentiated)

    def step(*leaves: Any) -> list[Any]:
        results, gradients, state = loss_and_grads(leaves)
        return _laid_out([*results, *gradients, *state], outputs(), lifted.leaves)

    def outputs() -> tuple[OutputInfo, ...]:
        results, state = _named(lifted)
        gradients = (OutputInfo("gradient", lifted.info[i].path, i) for i in differentiated)
        return (*results, *gradients, *state)

    return StepFunction(step, tuple(map(abstract, lifted.leaves)), tuple(lifted.info), (), outputs)


def optimizer_step(
    lifted: Lifted,
    pure_loss: PureLoss | None,
    differentiated: tuple[int, ...],
    *,
    optimizer: nnx.Optimizer[Any],
    argument: int | str,
) -> StepFunction:
    """Gradient and update: loss, auxiliary results, state and parameters after the step, optimizer after the step.

    Args:
      optimizer: its state may be abstract.
      argument: the argument that holds the model, as in `LeafInfo.argument`.
    """
    loss_and_grads = _loss_and_grads(lifted, pure_loss, differentiated)
    opened = lift(lambda optimizer: None, (optimizer,), {})
    count = len(lifted.leaves)
    all_leaves = (*map(abstract, lifted.leaves), *_like_parameters(opened, lifted, differentiated))

    def step(*leaves: Any) -> list[Any]:
        results, gradients, state = loss_and_grads(leaves[:count])
        after, created = list(leaves[:count]), []
        for info, value in zip(_named(lifted)[1], state, strict=True):
            if info.source is None:
                created.append(value)
            else:
                after[info.source] = value
        model = lifted.argument(argument, after)
        slots = list(after)
        for index, gradient in zip(differentiated, gradients, strict=True):
            slots[index] = gradient
        held = opened.argument(0, leaves[count:])
        held.update(model, nnx.state(lifted.argument(argument, slots), nnx.Param))
        updated = _state_leaves(model, lifted, argument)
        for index in differentiated:
            after[index] = updated[index]
        changed = [after[i] for i in _changed(lifted, differentiated)]
        held_after = lift(lambda optimizer: None, (held,), {}).leaves
        return _laid_out([*results, *created, *changed, *held_after], outputs(), all_leaves)

    def outputs() -> tuple[OutputInfo, ...]:
        results, state = _named(lifted)
        changed = (OutputInfo("state", lifted.info[i].path, i) for i in _changed(lifted, differentiated))
        held = (OutputInfo("state", i.path, count + n) for n, i in enumerate(opened.info))
        return (*results, *(s for s in state if s.source is None), *changed, *held)

    donated = (*_changed(lifted, differentiated), *range(count, len(all_leaves)))
    return StepFunction(step, all_leaves, (*lifted.info, *opened.info), donated, outputs)


def _like_parameters(optimizer: Lifted, lifted: Lifted, differentiated: Sequence[int]) -> list[Any]:
    """State of an optimizer; what it holds for each parameter lies on the mesh as the parameter does."""
    mesh = mesh_of(lifted.leaves)
    if mesh is None:
        return [abstract(leaf) for leaf in optimizer.leaves]
    parameters = {lifted.info[i].path: lifted.leaves[i] for i in differentiated}

    def spec(path: str, leaf: Any) -> PartitionSpec:
        parts = path.split("/")
        like = (parameters.get("/".join(parts[n:])) for n in range(len(parts)))
        found = next((p for p in like if p is not None and p.shape == leaf.shape), None)
        return own_spec(found)

    return placed([abstract(leaf) for leaf in optimizer.leaves], optimizer.info, mesh, [spec])


def own_step(lifted: Lifted) -> StepFunction:
    """The user's own train step, opened.

    Donated: what its own `jit` donates. Of a step that is not jitted as a whole: module state that it replaces, too.
    """
    with in_mesh(lifted.leaves):
        closed = jax.make_jaxpr(lifted.pure)(*lifted.leaves)
    donates = _donated_by_jit(closed.jaxpr)
    if not _is_one_jit(closed.jaxpr):
        donates |= {info.source for info in lifted.outputs if info.source is not None}
    donated = tuple(sorted(donates))
    run = jex.jaxpr_as_fun(closed)  # traced once; lowering runs this

    def step(*leaves: Any) -> list[Any]:
        return _laid_out(run(*leaves), lifted.outputs, lifted.leaves)

    leaves = tuple(map(abstract, lifted.leaves))
    return StepFunction(step, leaves, tuple(lifted.info), donated, lambda: lifted.outputs)


def _loss_and_grads(
    lifted: Lifted, pure_loss: PureLoss | None, differentiated: tuple[int, ...]
) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any], list[Any]]]:
    pure = lifted.pure if pure_loss is None else pure_loss

    def run(leaves: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        loss, parameters = of_parameters(pure, leaves, differentiated)
        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        results = len(_named(lifted)[0])
        return [value, *rest[: results - 1]], gradients, rest[results - 1 :]

    return run


def _named(lifted: Lifted) -> tuple[list[OutputInfo], list[OutputInfo]]:
    """The loss and auxiliary results, and the changed state, of a flat loss."""
    results = [info for info in lifted.outputs if info.kind == "result"]
    named = [OutputInfo("aux" if n else "loss", info.path) for n, info in enumerate(results)]
    return named, [info for info in lifted.outputs if info.kind == "state"]


def _changed(lifted: Lifted, differentiated: tuple[int, ...]) -> list[int]:
    """Leaves that a step with an update replaces."""
    return sorted({*differentiated, *(info.source for info in _named(lifted)[1] if info.source is not None)})


def _state_leaves(model: Any, lifted: Lifted, argument: int | str) -> dict[int, Any]:
    """The model's leaves by position among the call's leaves."""
    positions = [i for i, info in enumerate(lifted.info) if info.argument == argument]
    return dict(zip(positions, lift(lambda model: None, (model,), {}).leaves, strict=True))


def _is_one_jit(jaxpr: Any) -> bool:
    return len(jaxpr.eqns) == 1 and "donated_invars" in jaxpr.eqns[0].params


def _donated_by_jit(jaxpr: Any) -> set[int]:
    """Inputs that a jit at the top of the program donates."""
    position = {id(v): i for i, v in enumerate(jaxpr.invars)}
    return {
        position[id(var)]
        for eqn in jaxpr.eqns
        for var, donated in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False)
        if donated and id(var) in position
    }


def abstract_optimizer(model: Any, transformation: optax.GradientTransformation) -> nnx.Optimizer[Any]:
    """`nnx.Optimizer` over a model's `nnx.Param`, its state as shapes only."""
    return nnx.eval_shape(lambda m: nnx.Optimizer(m, transformation, wrt=nnx.Param), model)
