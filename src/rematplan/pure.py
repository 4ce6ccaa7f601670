"""The pure function of a call over NNX modules, and how to read its outputs.

Comes in: the structure of a call (`Signature`: all but its arrays). Goes out: `Program`, flat arrays -> flat arrays. It
runs the function on fresh copies of the modules and learns from every trace which state changed (`Outputs`). Holds no
array and none of the caller's modules. Knows nothing of who calls.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from rematplan.opened import Opened, Place, Shape, Static, close_tree, fill, open_tree, take_arrays
from rematplan.program.modules import scoped


@dataclass(frozen=True)
class LeafInfo:
    """What one flat input is.

    Attributes:
      path: of module state relative to its module (`blocks/0/attn/kernel`), else argument name and place in it.
      place: path in its argument.
      argument: position of the argument, or its name for keywords, bound `self` and arguments of a `functools.partial`.
      collection: the Variable's type (`Param`, `BatchStat`, `RngKey`, ...), `array` for everything else.
      differentiable: an inexact array that is an `nnx.Param` (or a subclass) or no Variable at all.
      module: whether it is state of an NNX object.
    """

    path: str
    place: str
    argument: int | str
    collection: str
    differentiable: bool
    module: bool

    @property
    def parameter(self) -> bool:
        """An inexact `nnx.Param`, or a subclass of it."""
        return self.module and self.differentiable and self.collection != "array"

    @property
    def optimizer(self) -> bool:
        """State of an `nnx.Optimizer`."""
        return self.collection.startswith("Opt")  # OptState, OptArray, OptVariable (flax 0.12)


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
class OpenedArgument:
    """What an argument is apart from its values; `static` holds one that is passed through untouched."""

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

    arguments: tuple[OpenedArgument, ...]
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
