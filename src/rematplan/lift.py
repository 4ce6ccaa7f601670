"""Opens a call over NNX modules into flat arrays, and closes it again.

Comes in: a function and its arguments, NNX modules among them. Goes out: `Lifted`: the arrays in a stable order, a
pure function of them that any JAX transformation accepts, and `finish`, which turns its outputs into the function's
result and writes the state that changed into the caller's modules, once. Only state that changed is an output: a
second copy of the parameters would cost their size in memory. Knows nothing of plans, policies or compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from rematplan.arguments import Given, given
from rematplan.captured import held
from rematplan.errors import InputError
from rematplan.opened import Opened, Place, Shape, Static, close_tree, fill, is_node, join, open_tree, take_arrays
from rematplan.pure import LeafInfo, OpenedArgument, OutputInfo, Outputs, Program, Signature
from rematplan.sharding import in_mesh, on_abstract_mesh

__all__ = ["LeafInfo", "Lifted", "OutputInfo", "Program", "abstract", "lift"]


class Lifted:
    """One call, opened: `finish(pure(*leaves))` is the call itself.

    Attributes:
      leaves: arrays, tracers or `jax.ShapeDtypeStruct`, in a stable order.
      info: what each of them is.
      pure: flat leaves -> flat outputs (the result's arrays, then changed state). Traceable any number of times; runs
        on copies of the modules.
    """

    def __init__(self, program: Program, leaves: Sequence[Any], slots: Sequence[Any], objects: Any):
        self.program = program
        self.leaves = tuple(leaves)
        self._slots = slots  # the caller's Variable, or None, for each value of a module
        self._objects = objects  # the caller's NNX objects by index

    @property
    def pure(self) -> Callable[..., list[Any]]:
        return self.program

    @property
    def info(self) -> tuple[LeafInfo, ...]:
        return self.program.info

    @property
    def outputs(self) -> tuple[OutputInfo, ...]:
        """What each flat output is. Known after `pure` was traced."""
        return self._read().infos

    @property
    def key(self) -> Hashable:
        """Equal for calls with the same structure, static values, shapes and dtypes; unique if one is unhashable."""
        key = (self.program.signature, tuple(_aval(leaf) for leaf in self.leaves))
        try:
            hash(key)
        except TypeError:
            return object()
        return key

    def using(self, program: Program) -> Lifted:
        """The same call through the program of an earlier one that had an equal key."""
        return Lifted(program, self.leaves, self._slots, self._objects)

    def abstract(self, leaves: Sequence[Any] | None = None) -> Lifted:
        """Shapes in place of arrays, and without the caller's modules: for tracing only.

        Args:
          leaves: to take their place, such as shapes with shardings.
        """
        return Lifted(self.program, [abstract(leaf) for leaf in leaves or self.leaves], (), None)

    def build(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments and keywords from other leaves, with fresh modules."""
        args, kwargs, _, _ = self.program.signature.build(leaves)
        return args, kwargs

    def argument(self, identity: int | str, leaves: Sequence[Any]) -> Any:
        """One argument from other leaves, with fresh modules."""
        args, kwargs = self.build(leaves)
        values = [*args, *kwargs.values()]
        return next(v for a, v in zip(self.program.signature.arguments, values, strict=True) if a.identity == identity)

    def finish(self, flat_outputs: Sequence[Any]) -> Any:
        """The function's return value, after writing changed state into the caller's modules."""
        outputs = self._read()
        count = outputs.results
        objects = self._objects if self._objects is not None else nnx.graphlib.IndexMap()
        if outputs.restructured or outputs.changed:
            objects = self._write(outputs, flat_outputs[count:])
        values = iter(fill(outputs.result_shapes, flat_outputs[:count]))
        result, _ = close_tree(outputs.result, values, refs=nnx.graphlib.IndexMap(objects))
        return result

    def _read(self) -> Outputs:
        if self.program.outputs is None:
            with in_mesh(self.leaves):
                jax.eval_shape(self.program, *self.leaves)
        assert self.program.outputs is not None
        return self.program.outputs

    def _write(self, outputs: Outputs, state: Sequence[Any]) -> Any:
        """Changes the caller's modules; their objects by index as they are after the call."""
        new = iter(state)
        arrays = [next(new) if source is None else self.leaves[source] for source in outputs.sources]
        values = fill(outputs.shapes, arrays)
        variables = [self._slots[i] for i in outputs.changed] if not outputs.restructured else [None]
        if all(isinstance(variable, nnx.Variable) for variable in variables):
            for index in outputs.changed:
                self._slots[index].set_raw_value(values[index])  # refuses if the Variable is of another trace
            return self._objects
        for node in self._objects.values():
            _check_mutable(node)
        objects = nnx.graphlib.IndexMap()
        close_tree(outputs.state, iter(values), refs=objects, outer=self._objects)
        return objects


def lift(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    scopes: bool = False,
    check: Callable[[Any], None] | None = None,
) -> Lifted:
    """Opens the call `function(*args, **kwargs)` without making it.

    NNX objects anywhere in the arguments, in a `functools.partial` or bound to a method are opened; Python numbers,
    strings, functions and None pass through as they are. Arrays may be `jax.ShapeDtypeStruct`.

    Args:
      static_argnums, static_argnames: arguments to pass through untouched; they must be hashable to be cached on.
      scopes: run under `modules.scoped`, so that every operation carries its module's path.
      check: called with the function's return value during a trace; raises if it will not do.

    Raises:
      InputError: a module hidden in an argument that is no pytree; a mutable array.
    """
    function, calls = given(function, args, kwargs, static_argnums=static_argnums, static_argnames=static_argnames)
    refs = nnx.graphlib.RefMap()
    arguments: list[OpenedArgument] = []
    shapes: list[Shape | Static] = []
    leaves: list[Any] = []
    infos: list[LeafInfo] = []
    places: list[Place | None] = []
    slots: list[Any] = []
    nodes = 0
    prefixes = _prefixes(calls)
    for call, prefix in zip(calls, prefixes, strict=True):
        if call.static:
            arguments.append(OpenedArgument(call.identity, call.name, call.keyword, static=Static(call.value)))
            continue
        opened = open_tree(call.value, refs=refs, name=call.name)
        paths = [_relative(name, call.name, "") for name in opened.names]
        names = tuple(
            _relative(name, call.name, prefix) if definition is not None else name
            for name, definition in zip(opened.names, opened.definitions, strict=True)
        )
        opened = Opened(opened.treedef, opened.definitions, names, opened.values, opened.slots, opened.attributes)
        found_shapes, arrays, found = take_arrays(opened)
        _refuse_hidden_modules(found_shapes, call.name)
        arguments.append(
            OpenedArgument(call.identity, call.name, call.keyword, opened.treedef, opened.definitions, names)
        )
        shapes += found_shapes
        leaves += arrays
        infos += [
            _leaf_info(call, opened, paths[place.leaf], place, array)
            for place, array in zip(found, arrays, strict=True)
        ]
        # positions among the NNX objects of the whole call, which is what `_collect` opens
        order = {leaf: nodes + i for i, leaf in enumerate(i for i, d in enumerate(opened.definitions) if d is not None)}
        nodes += len(order)
        places += [Place(order[p.leaf], p.attribute, p.inner, value=-1) if p.leaf in order else None for p in found]
        slots += [slot for slot, (leaf, _) in zip(opened.slots, opened.attributes, strict=True) if leaf in order]
    _refuse_references(leaves, infos)
    program = Program(
        function, Signature(tuple(arguments), tuple(shapes)), tuple(infos), tuple(places), scopes=scopes, check=check
    )
    return Lifted(program, leaves, slots, nnx.graphlib.IndexMap.from_refmap(refs))


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, weak type and sharding of an array, without the array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return on_abstract_mesh(leaf)
    sharding = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size < 2:
        sharding = None  # where a single array happens to lie is no part of the program
    return on_abstract_mesh(jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf), weak_type=_weak(leaf), sharding=sharding))


def _refuse_hidden_modules(shapes: Sequence[Shape | Static], argument: str) -> None:
    """Raises InputError for an argument that is no pytree but holds a module: nothing could differentiate in there."""
    for value in (shape.value for shape in shapes if isinstance(shape, Static)):
        names = held(value)
        if names:
            kind = type(value).__name__
            raise InputError(
                f"argument {argument} is a {kind}, which JAX cannot look into, but its attribute {names[0]!r} holds an "
                f"NNX module: its parameters would get no gradient. Pass the module itself, or make {kind} an "
                "nnx.Module or a registered pytree."
            )


def _refuse_references(leaves: Sequence[Any], infos: Sequence[LeafInfo]) -> None:
    for leaf, info in zip(leaves, infos, strict=True):
        if isinstance(leaf, jax.Ref):
            raise InputError(
                f"{info.path} is a mutable array (jax.Ref), which jax.checkpoint cannot differentiate through. Make it "
                "an ordinary nnx.Variable (ref=False); its state is written back all the same."
            )


def _prefixes(calls: Sequence[Given]) -> list[str]:
    """What module paths start with: nothing in the first argument that holds a module, its name in the others."""
    found = False
    prefixes: list[str] = []
    for call in calls:
        holds = not call.static and any(map(is_node, jax.tree.leaves(call.value, is_leaf=is_node)))
        prefixes.append(call.name if found or not holds else "")
        found = found or holds
    return prefixes


def _relative(name: str, argument: str, prefix: str) -> str:
    return join(prefix, name.removeprefix(argument).removeprefix("/"))


def _leaf_info(call: Given, opened: Opened, path: str, place: Place, array: Any) -> LeafInfo:
    slot = opened.slots[place.value]
    inexact = bool(jnp.issubdtype(array.dtype, jnp.inexact))
    return LeafInfo(
        path=opened.path(place),
        place=join(path, *place.attribute, place.inner),
        argument=call.identity,
        collection="array" if slot is None else type(slot).__name__,
        differentiable=inexact and (slot is None or isinstance(slot, nnx.Param)),
        module=opened.definitions[place.leaf] is not None,
    )


_PROBE = "rematplan_probe"  # an attribute that no module has


def _check_mutable(node: Any) -> None:
    """Raises Flax's own error if an NNX object belongs to another trace, as changing it directly would."""
    if isinstance(node, nnx.Variable):
        node.set_raw_value(node.get_raw_value())
    elif isinstance(node, nnx.Pytree):
        setattr(node, _PROBE, None)
        delattr(node, _PROBE)


def _aval(leaf: Any) -> tuple[Any, ...]:
    return tuple(leaf.shape), _dtype(leaf), _weak(leaf)


def _dtype(leaf: Any) -> Any:
    """As JAX will see it: numpy's 64-bit numbers are 32-bit ones unless 64 bits are enabled."""
    extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)


def _weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))
