"""What the user wants to train: a loss function, its arguments, and the step around it.

Comes in: the user's function, NNX modules and arrays, or only their shapes. Goes out: `Workload`, which opens the loss
into flat arrays, builds the training step around it, and makes real arguments when numbers are to be compared. No array
is made for tracing. Knows nothing of compilers or plans.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from rematplan import step as steps
from rematplan.captured import captured, explain
from rematplan.errors import InputError, PlanMismatch
from rematplan.lift import LeafInfo, Lifted, Program, lift
from rematplan.materialize import random_array
from rematplan.sharding import abstract_mesh, in_mesh, layout_of, mesh_of, placed
from rematplan.step import PureLoss, StepFunction
from rematplan.units import format_bytes, format_count

SHOWN_LEAVES = 8  # of a workload's arrays in an error message


class Workload:
    """A loss function with its arguments, and the training step around it.

    Args:
      loss_fn: `loss_fn(*args, **kwargs)` -> scalar or (scalar, auxiliary results). A function, a bound method, a
        `functools.partial`. The `nnx.Param` of its first module argument are differentiated; without modules, the
        inexact arrays of its first argument.
      args, kwargs: NNX modules, arrays and anything else. Arrays may be `jax.ShapeDtypeStruct`, modules the result of
        `nnx.eval_shape`.
      optimizer: an optax transformation; the step is then gradient and update, its state donated. Default: the step is
        `value_and_grad`.
      step: `make_step(loss_fn)` -> train step, a function of `args` and `kwargs`: the user's own step. What its `jit` donates
        is donated; where it is none, the module state that it replaces.
      init: makes real arguments where `args` are only shapes: `init()` or `init(seed)` -> the positional arguments.
      has_aux: whether `loss_fn` returns a pair. Default: seen from what it returns.
      name: for reports. Default: the name of `loss_fn`.
      mesh: the devices that the step runs on together: sizes of named axes, `{"data": 4, "model": 2}`, or a mesh of JAX's. No
        device has to be there. Default: the mesh on which the arguments' arrays lie; none means one device.
      specs: how positional arguments lie on the mesh, one entry each: None (as its arrays say, else whole on every device), a
        `PartitionSpec` for all of its arrays, a function `(path, array) -> PartitionSpec or None`, a mapping of paths to
        specs, or a tree of specs like the argument (`nnx.get_partition_spec` of a model's state included).

    Raises:
      InputError: arguments that do not fit `loss_fn`, or a model that it captures instead of taking it as an argument.
        A loss that is no scalar is found by tracing what `lift` or `step` return.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        /,
        *args: Any,
        optimizer: Any = None,
        step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        init: Callable[..., Any] | None = None,
        has_aux: bool | None = None,
        name: str | None = None,
        mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
        specs: Sequence[Any] = (),
        **kwargs: Any,
    ):
        if not callable(loss_fn):
            raise InputError(f"a Workload needs a loss function first, but got a {type(loss_fn).__name__}")
        if optimizer is not None and step is not None:
            raise InputError("give either optimizer= (gradient and update) or step= (your own train step), not both")
        if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise InputError(
                "optimizer= takes an optax transformation such as optax.adam(1e-3), but got a "
                f"{type(optimizer).__name__}; an nnx.Optimizer belongs among the arguments, with step= for the train "
                "step that uses it"
            )
        self.loss_fn = loss_fn
        self.args = args
        self.kwargs = kwargs
        self.optimizer = optimizer
        self.make_step = step
        self.init = init
        self.has_aux = has_aux
        self.name = name or _name(loss_fn)
        self._lifted: dict[bool, Lifted] = {}
        if specs and mesh is None:
            raise InputError("specs= say how arguments lie on a mesh; give mesh= too, e.g. mesh={'data': 4}.")
        if len(specs) > len(args):
            raise InputError(f"specs= has {len(specs)} entries, but there are {len(args)} positional arguments.")
        self.mesh = None if mesh is None else abstract_mesh(mesh)
        self._layouts = [layout_of(s, a, f"argument {n}") for n, (s, a) in enumerate(zip(specs, args, strict=False))]
        _check_call(step(loss_fn) if step is not None else loss_fn, args, kwargs)
        names = captured(loss_fn)
        if names:
            raise InputError(explain(loss_fn, names))

    def lift(self, *, scopes: bool = False) -> Lifted:
        """The loss, opened; with `step=`, as the step calls it. Of several calls, the one with the most bytes of arguments.

        Args:
          scopes: give every operation its module's path.
        """
        if scopes not in self._lifted:
            if self.make_step is None:
                opened = self._laid_out(
                    lift(self.loss_fn, self.args, self.kwargs, scopes=scopes, check=self._check_result)
                )
            else:
                opened = self._observe(self.make_step, scopes=scopes)
            self._lifted[scopes] = opened
        return self._lifted[scopes]

    @property
    def differentiated(self) -> tuple[int, ...]:
        """Positions of the leaves that are differentiated."""
        info = self.lift().info
        model = _model_argument(info)
        if model is not None:
            return tuple(i for i, leaf in enumerate(info) if leaf.argument == model and leaf.parameter)
        found = tuple(
            i for i, leaf in enumerate(info) if leaf.argument == 0 and leaf.differentiable and not leaf.module
        )
        if not found:
            raise InputError(
                f"{self.name} has nothing to differentiate: no argument holds an nnx.Param, and its first argument "
                "holds no array of a floating or complex dtype. Pass the model, or the parameters, as first argument."
            )
        return found

    def step(
        self, pure_loss: PureLoss | None = None, *, elsewhere: Callable[[Lifted], PureLoss] | None = None
    ) -> StepFunction:
        """The whole training step as a pure function of flat arrays.

        Args:
          pure_loss: in place of the loss as the user wrote it: flat leaves -> flat outputs, as `lift().pure`.
          elsewhere: makes what stands in the place of `pure_loss` where the user's step calls the loss with other shapes than
            those of `lift()`; raises PlanMismatch where that is another program.
        """
        lifted = self.lift(scopes=True)
        if self.make_step is not None:
            routed = self.make_step(self._routed(lifted, pure_loss, elsewhere))
            return steps.own_step(self._laid_out(lift(routed, self.args, self.kwargs)))
        if self.optimizer is None:
            return steps.value_and_grad(lifted, pure_loss, self.differentiated)
        model = _model_argument(lifted.info)
        if model is None:
            raise InputError(
                f"optimizer= updates the nnx.Param of a model, but no argument of {self.name} holds one. For "
                "parameters that are plain arrays give the whole train step with step=."
            )
        held = steps.abstract_optimizer(lifted.argument(model, lifted.leaves), self.optimizer)
        return steps.optimizer_step(lifted, pure_loss, self.differentiated, optimizer=held, argument=model)

    def materialize(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments as real arrays, with fresh modules.

        What the workload has as arrays is copied, so that a step may donate it; the rest comes from `init`, or is
        random by dtype and collection: parameters and inputs normal, other state between 0.5 and 1.5, integers 0.
        """
        opened = self._open()
        args, kwargs = opened.build(self._real_leaves(opened, seed))
        first = len(args) - len(self.args)  # what a partial or a method binds comes first
        return tuple(args[first:]), {name: kwargs[name] for name in self.kwargs}

    def inputs(self, seed: int = 0) -> list[Any]:
        """Real arrays for the leaves of `step()`, in order; values as in `materialize`."""
        opened = self._open()
        leaves = self._real_leaves(opened, seed)
        model = _model_argument(opened.info)
        if self.optimizer is None or model is None:
            return leaves
        optimizer = nnx.Optimizer(opened.argument(model, leaves), self.optimizer, wrt=nnx.Param)
        return [*leaves, *lift(_nothing, (optimizer,), {}).leaves]

    def _laid_out(self, opened: Lifted) -> Lifted:
        """The call with shapes in place of arrays, each with where it lies on the mesh."""
        shapes = opened.abstract()
        if self.mesh is None:
            return shapes
        # what a partial or a method binds comes first
        bound = len(opened.program.signature.arguments) - len(self.args) - len(self.kwargs)
        infos = [_shifted(info, bound) for info in shapes.info]
        return shapes.abstract(placed(shapes.leaves, infos, self.mesh, self._layouts))

    def _open(self) -> Lifted:
        """The call of the loss, or of the user's step, with the arrays that there are."""
        function = self.loss_fn if self.make_step is None else self.make_step(self.loss_fn)
        return lift(function, self.args, self.kwargs)

    def _real_leaves(self, opened: Lifted, seed: int) -> list[Any]:
        leaves = list(opened.leaves)
        if self.init is not None and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            made = self.init(seed) if inspect.signature(self.init).parameters else self.init()
            args = made if isinstance(made, tuple) else (made,)
            real = lift(opened.program.function, args, self.kwargs)
            same = [(a.shape, a.dtype) for a in real.leaves] == [(a.shape, a.dtype) for a in leaves]
            if not same or real.program.signature != opened.program.signature:
                raise InputError(
                    f"init of {self.name} returned {_shapes(real)}, but the workload's arguments are "
                    f"{_shapes(opened)}; it must return the positional arguments, with the same modules, shapes and "
                    "dtypes."
                )
            leaves = list(real.leaves)
        return [
            random_array(leaf, info, seed=seed, position=i) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.copy()
            for i, (leaf, info) in enumerate(zip(leaves, opened.info, strict=True))
        ]

    def _observe(self, make_step: Callable[..., Any], *, scopes: bool) -> Lifted:
        """The loss as the user's step calls it, shapes only: what is planned is what runs inside."""
        seen: list[Lifted] = []

        def recorder(*args: Any, **kwargs: Any) -> Any:
            lifted = lift(self.loss_fn, args, kwargs, scopes=scopes, check=self._check_result)
            seen.append(lifted.abstract())
            return lifted.finish(lifted.pure(*lifted.leaves))

        outer = self._laid_out(lift(make_step(recorder), self.args, self.kwargs))
        with in_mesh(outer.leaves):
            jax.eval_shape(outer.pure, *outer.leaves)
        if not seen:
            raise InputError(
                f"the step of {self.name} never called the loss that make_step was given; make_step(loss_fn) must "
                "return a train step that differentiates its argument loss_fn."
            )
        return _like(max(seen, key=_bytes), outer)  # the first of the largest

    def _routed(
        self, planned: Lifted, pure_loss: PureLoss | None, elsewhere: Callable[[Lifted], PureLoss] | None
    ) -> Callable[..., Any]:
        """The loss for the user's step: a function of the user's arguments that runs the flat loss."""
        others: dict[Hashable, tuple[Program, PureLoss]] = {}

        def other(lifted: Lifted) -> tuple[Program, PureLoss]:
            if lifted.key not in others:
                try:
                    if elsewhere is None:
                        raise PlanMismatch("what was planned is one program")
                    others[lifted.key] = lifted.program, elsewhere(lifted.abstract())
                except PlanMismatch as error:
                    raise InputError(
                        f"the step of {self.name} calls its loss with {_different(lifted, planned)}, and a plan is for one "
                        f"function ({error}). Plan one call at a time: let make_step(loss_fn) give loss_fn to the call that is "
                        "planned, and to the other call the function itself, or its rp.remat(..., plan=...)."
                    ) from error
            return others[lifted.key]

        def loss(*args: Any, **kwargs: Any) -> Any:
            lifted = lift(self.loss_fn, args, kwargs, scopes=True, check=self._check_result)
            if pure_loss is None:
                return lifted.finish(lifted.pure(*lifted.leaves))
            program, function = (planned.program, pure_loss) if lifted.key == planned.key else other(lifted)
            return lifted.using(program).finish(function(*lifted.leaves))

        loss.__name__ = self.name
        return loss

    def _check_result(self, result: Any) -> None:
        """Raises InputError if what the loss returns cannot be differentiated."""
        pair = isinstance(result, tuple) and len(result) == 2
        if self.has_aux is True and not pair:
            raise InputError(
                f"{self.name} must return (loss, auxiliary results) with has_aux=True; it returns {_shown(result)}"
            )
        loss = result[0] if pair and self.has_aux is not False else result
        shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
        if shape == () and dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            return
        raise InputError(
            f"{self.name} must return a scalar loss of a floating dtype, or (loss, auxiliary results); it returns "
            f"{_shown(result)}. Reduce the loss to one number, for example with .mean() or .sum()."
        )

    def __repr__(self) -> str:
        opened = self._open()
        model = _model_argument(opened.info)
        parameters = [
            leaf
            for leaf, info in zip(opened.leaves, opened.info, strict=True)
            if (info.argument == model and info.parameter if model is not None else info.argument == 0)
        ]
        size = f"{format_count(sum(math.prod(p.shape) for p in parameters))} in {len(parameters)} arrays"
        step = (
            "own train step"
            if self.make_step
            else "value_and_grad"
            if self.optimizer is None
            else "gradient and update"
        )
        inputs = ", ".join(
            f"{info.path} {leaf.dtype}{list(leaf.shape)}"
            for leaf, info in zip(opened.leaves, opened.info, strict=True)
            if not info.module and (model is not None or info.argument != 0)
        )
        total = format_bytes(sum(math.prod(p.shape) * p.dtype.itemsize for p in parameters))
        lines = (f"parameters  {size}, {total}", f"inputs      {inputs or 'none'}", f"step        {step}")
        return "\n  ".join((f"Workload {self.name}", *lines))


def _like(inner: Lifted, outer: Lifted) -> Lifted:
    """A call inside of a step with its arrays where the step's arguments of the same path lie, as far as these say."""
    mesh = mesh_of(outer.leaves)
    if mesh is None:
        return inner
    known = {info.path: leaf for info, leaf in zip(outer.info, outer.leaves, strict=True)}

    def laid_out(leaf: Any, info: LeafInfo) -> Any:
        like = known.get(info.path)
        if like is None or like.sharding is None or len(like.shape) != len(leaf.shape):
            return leaf
        try:
            like.sharding.shard_shape(leaf.shape)
        except ValueError:  # a part of the argument, such as a microbatch, that the devices do not divide
            return leaf
        return leaf.update(sharding=like.sharding)

    return inner.abstract([laid_out(leaf, info) for leaf, info in zip(inner.leaves, inner.info, strict=True)])


def _shifted(info: LeafInfo, bound: int) -> LeafInfo:
    """The same leaf, its argument counted without the first ones that a partial or a method binds."""
    return replace(info, argument=info.argument - bound) if isinstance(info.argument, int) else info


def _model_argument(info: Sequence[LeafInfo]) -> int | str | None:
    """The first argument that holds an `nnx.Param`."""
    return next((leaf.argument for leaf in info if leaf.parameter), None)


def _check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # built in: Python cannot tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join([*(type(a).__name__ for a in args), *(f"{k}=" for k in kwargs)]) or "nothing"
        raise InputError(
            f"the arguments ({names}) do not fit {_name(function)}{signature}: {error}. Pass them after the function: "
            "Workload(loss_fn, model, batch)."
        ) from None


def _name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # functools.partial has no name
    return getattr(inner, "__name__", type(inner).__name__)


def _shapes(lifted: Lifted) -> str:
    return _listed(_arrays(lifted))


def _arrays(lifted: Lifted) -> list[str]:
    return [f"{i.path} {leaf.dtype}{list(leaf.shape)}" for leaf, i in zip(lifted.leaves, lifted.info, strict=True)]


def _listed(arrays: Sequence[str]) -> str:
    more = len(arrays) - SHOWN_LEAVES
    return ", ".join(arrays[:SHOWN_LEAVES]) + (f" and {more} more" if more > 0 else "")


def _different(lifted: Lifted, planned: Lifted) -> str:
    """What one call of the loss is given and another is not."""
    here, there = (set(_arrays(call)) for call in (lifted, planned))
    if here == there:
        return "arguments of other structure and equal shapes"
    one, other = (
        _listed([text for text in _arrays(a) if text not in b]) for a, b in ((lifted, there), (planned, here))
    )
    return f"{one or 'less'} in one call and {other or 'less'} in another"


def _bytes(lifted: Lifted) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in lifted.leaves)


def _shown(result: Any) -> str:
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    if shape is not None and dtype is not None:
        return f"an array {dtype}{list(shape)}"
    if isinstance(result, tuple):
        return "(" + ", ".join(map(_shown, result)) + ")"
    return f"a {type(result).__name__}"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in where a call is only opened."""
