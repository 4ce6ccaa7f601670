"""Opens a call over NNX modules into flat arrays, and closes it again.

Comes in: a function and its arguments, NNX modules among them. Goes out: `Lifted`: the arrays in a stable order, a
pure function of them that any JAX transformation accepts, and `finish`, which turns its outputs into the function's
result and writes the state that changed into the caller's modules, once. Only state that changed is an output: a
second copy of the parameters would cost their size in memory. Knows nothing of plans, policies or compilers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.arguments import Given, given
from rematplan.opened import Opened, Place, Shape, Static, close_tree, fill, is_node, join, open_tree, take_arrays
from rematplan.program.modules import scoped


@dataclass(frozen=True)
class LeafInfo:
    """What one flat input is.

    Attributes:
      path: of module state relative to its module (`blocks/0/attn/kernel`), else argument name and place in it.
      argument: position of the argument, or its name for keywords, bound `self` and arguments of a `functools.partial`.
      collection: the Variable's type (`Param`, `BatchStat`, `RngKey`, ...), `array` for everything else.
      differentiable: an inexact array that is an `nnx.Param` (or a subclass) or no Variable at all.
      module: whether it is state of an NNX object.
    """

    path: str
    argument: int | str
    collection: str
    differentiable: bool
    module: bool


@dataclass(frozen=True)
class OutputInfo:
    """What one flat output is.

    Attributes:
      kind: "result" or "state".
      path: as `LeafInfo.path`; of results the place in the returned value.
      source: of state, the input that it replaces; None for results and for state that did not exist before.
    """

    kind: str
    path: str
    source: int | None = None


@dataclass(frozen=True)
class _Argument:
    """What an argument is apart from its values; `opened` is None for a static one."""

    identity: int | str
    name: str
    keyword: bool
    treedef: Any = None
    definitions: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    static: Static | None = None

    def opened(self) -> Opened:
        return Opened(self.treedef, self.definitions, self.names, (), (), ())


@dataclass(frozen=True)
class Signature:
    """Everything about a call but its arrays: what each argument is, and what each value in them is."""

    arguments: tuple[_Argument, ...]
    shapes: tuple[Shape | Static, ...]

    def build(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any], list[tuple[str, Any]], Any]:
        """Positional arguments and keywords, NNX objects as fresh copies; those objects by path, and by index."""
        values = iter(fill(self.shapes, arrays))
        index_ref = nnx.graphlib.IndexMap()
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        nodes: list[tuple[str, Any]] = []
        for argument in self.arguments:
            if argument.static is not None:
                built = argument.static.value
            else:
                built, found = close_tree(argument.opened(), values, refs=index_ref)
                names = [n for n, d in zip(argument.names, argument.definitions, strict=True) if d is not None]
                nodes += zip(names, found, strict=True)
            if argument.keyword:
                kwargs[argument.name] = built
            else:
                args.append(built)
        return args, kwargs, nodes, index_ref

    def state(self) -> tuple[list[Any], list[Shape | Static]]:
        """Definitions of the NNX objects and what their values are."""
        definitions = [d for argument in self.arguments for d in argument.definitions]
        lengths = [1 if d is None else d.num_leaves for d in definitions]
        of_module = [d is not None for d, n in zip(definitions, lengths, strict=True) for _ in range(n)]
        shapes = [shape for shape, module in zip(self.shapes, of_module, strict=True) if module]
        return [d for d in definitions if d is not None], shapes


@dataclass(frozen=True)
class Outputs:
    """How flat outputs become a result and changes of the caller's modules; learnt from a trace.

    Attributes:
      result, result_shapes: the returned value, taken apart.
      state, shapes: the argument modules as they are after the call, and what their values are.
      sources: for each array among those values: the input that it still is, or None if it is an output.
      changed: positions of the values that are not what they were.
      restructured: modules gained or lost Variables or attributes, or static attributes changed.
    """

    result: Opened
    result_shapes: tuple[Shape | Static, ...]
    state: Opened
    shapes: tuple[Shape | Static, ...]
    sources: tuple[int | None, ...]
    changed: frozenset[int]
    restructured: bool
    infos: tuple[OutputInfo, ...]

    @property
    def results(self) -> int:
        """How many of the flat outputs are the result's."""
        return sum(info.kind == "result" for info in self.infos)


class Program:
    """The pure function of a lifted call. Holds no array and none of the caller's modules, so it may be kept.

    Attributes:
      signature: of the calls that it stands for.
      info: what each flat input is.
      outputs: how to read the flat outputs; None before the first trace.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        info: tuple[LeafInfo, ...],
        places: tuple[Place | None, ...],
        *,
        scopes: bool,
        check: Callable[[Any], None] | None,
    ):
        self.function = function
        self.signature = signature
        self.info = info
        self.places = places
        self.scopes = scopes
        self.check = check
        self.outputs: Outputs | None = None
        self.__name__ = getattr(function, "__name__", type(function).__name__)  # shown by jax in jaxprs and profiles

    def __call__(self, *arrays: Any) -> list[Any]:
        """Flat inputs -> flat outputs: the result's arrays, then the state that changed."""
        if not self.scopes:
            return self._run(arrays)
        try:
            return self._run(arrays)
        except Exception:
            # Module paths are stamped on the modules as static attributes. A model that compares two modules, or maps
            # over both, then sees a difference that is not its own: it runs without paths. If it fails again, the error
            # is the model's own.
            self.scopes = False
            outputs = None
            with contextlib.suppress(Exception):
                outputs = self._run(arrays)
            if outputs is None:
                self.scopes = True
                raise
            return outputs

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        args, kwargs, nodes, index_ref = self.signature.build(arrays)
        with scoped(nodes) if self.scopes else contextlib.nullcontext():
            result = self.function(*args, **kwargs)
        if self.check is not None:
            self.check(result)
        return self._collect(result, nodes, nnx.graphlib.RefMap.from_indexmap(index_ref), arrays)

    def _collect(self, result: Any, nodes: list[tuple[str, Any]], known: Any, arrays: Sequence[Any]) -> list[Any]:
        refs = nnx.graphlib.RefMap()
        names, modules = [name for name, _ in nodes], [node for _, node in nodes]
        state = open_tree(modules, refs=refs, known=known, names=names)
        shapes, found, places = take_arrays(state)
        opened = open_tree(result, refs=refs, known=known)
        result_shapes, results, result_places = take_arrays(opened)

        inputs = {place: i for i, place in enumerate(self.places) if place is not None}
        own = [inputs.get(place) for place in places]
        sources = _sources(found, own, arrays)
        new = [i for i, source in enumerate(sources) if source is None]
        definitions, shapes_before = self.signature.state()
        self.outputs = Outputs(
            result=opened.structure(),
            result_shapes=result_shapes,
            state=state.structure(),
            shapes=shapes,
            sources=tuple(sources),
            changed=frozenset(p.value for p, s, o in zip(places, sources, own, strict=True) if s is None or s != o),
            restructured=not _unchanged(definitions, state.definitions) or shapes_before != list(shapes),
            infos=tuple(OutputInfo("result", opened.path(place)) for place in result_places)
            + tuple(OutputInfo("state", state.path(places[i]), own[i]) for i in new),
        )
        return [jnp.asarray(array) for array in (*results, *(found[i] for i in new))]


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

    def abstract(self) -> Lifted:
        """Shapes in place of arrays, and without the caller's modules: for tracing only."""
        return Lifted(self.program, [abstract(leaf) for leaf in self.leaves], (), None)

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
    """
    function, calls = given(function, args, kwargs, static_argnums=static_argnums, static_argnames=static_argnames)
    refs = nnx.graphlib.RefMap()
    arguments: list[_Argument] = []
    shapes: list[Shape | Static] = []
    leaves: list[Any] = []
    infos: list[LeafInfo] = []
    places: list[Place | None] = []
    slots: list[Any] = []
    nodes = 0
    prefixes = _prefixes(calls)
    for call, prefix in zip(calls, prefixes, strict=True):
        if call.static:
            arguments.append(_Argument(call.identity, call.name, call.keyword, static=Static(call.value)))
            continue
        opened = open_tree(call.value, refs=refs, name=call.name)
        names = tuple(
            _relative(name, call.name, prefix) if definition is not None else name
            for name, definition in zip(opened.names, opened.definitions, strict=True)
        )
        opened = Opened(opened.treedef, opened.definitions, names, opened.values, opened.slots, opened.attributes)
        found_shapes, arrays, found = take_arrays(opened)
        arguments.append(_Argument(call.identity, call.name, call.keyword, opened.treedef, opened.definitions, names))
        shapes += found_shapes
        leaves += arrays
        infos += [_leaf_info(call, opened, place, array) for place, array in zip(found, arrays, strict=True)]
        # positions among the NNX objects of the whole call, which is what `_collect` opens
        order = {leaf: nodes + i for i, leaf in enumerate(i for i, d in enumerate(opened.definitions) if d is not None)}
        nodes += len(order)
        places += [Place(order[p.leaf], p.attribute, p.inner, value=-1) if p.leaf in order else None for p in found]
        slots += [slot for slot, (leaf, _) in zip(opened.slots, opened.attributes, strict=True) if leaf in order]
    program = Program(
        function, Signature(tuple(arguments), tuple(shapes)), tuple(infos), tuple(places), scopes=scopes, check=check
    )
    return Lifted(program, leaves, slots, nnx.graphlib.IndexMap.from_refmap(refs))


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, weak type and sharding of an array, without the array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None  # where a single array happens to lie is no part of the program
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=_weak(leaf), sharding=sharding)


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


def _leaf_info(call: Given, opened: Opened, place: Place, array: Any) -> LeafInfo:
    slot = opened.slots[place.value]
    inexact = bool(jnp.issubdtype(array.dtype, jnp.inexact))
    return LeafInfo(
        path=opened.path(place),
        argument=call.identity,
        collection="array" if slot is None else type(slot).__name__,
        differentiable=inexact and (slot is None or isinstance(slot, nnx.Param)),
        module=opened.definitions[place.leaf] is not None,
    )


def _sources(found: Sequence[Any], own: Sequence[int | None], inputs: Sequence[Any]) -> list[int | None]:
    """For each array after the call, the input that it is, by identity; its own place first."""
    counts = Counter(map(id, inputs))
    by_id = {id(array): i for i, array in enumerate(inputs) if counts[id(array)] == 1}
    return [
        place if place is not None and array is inputs[place] else by_id.get(id(array))
        for array, place in zip(found, own, strict=True)
    ]


def _unchanged(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether modules have the same attributes and the same static values as before."""
    try:
        return all(b.with_same_outer_index() == a for b, a in zip(before, after, strict=True))
    except Exception:  # noqa: BLE001 - static values of any type are compared; one that cannot be counts as changed
        return False


def _check_mutable(node: Any) -> None:
    """Raises Flax's own error if an NNX object belongs to another trace, as changing it directly would."""
    if isinstance(node, nnx.Variable):
        node.set_raw_value(node.get_raw_value())
    elif isinstance(node, nnx.Pytree):
        node.rematplan_check = None
        del node.rematplan_check


def _aval(leaf: Any) -> tuple[Any, ...]:
    return tuple(leaf.shape), leaf.dtype, _weak(leaf)


def _weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))
