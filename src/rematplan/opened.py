"""A tree with NNX objects in it, taken apart: structure here, arrays there.

Comes in: any pytree, its leaves arrays, NNX objects (modules, Variables, random streams, optimizers), numbers, strings,
functions. Goes out: hashable structure and a flat list of arrays, and the way back. Built on `nnx.flatten` and
`nnx.unflatten`, on which `nnx.jit` stands too, so shared and tied objects stay shared. Knows nothing of functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NUMBERS = (bool, int, float, complex)


class Array:
    """Marks the place of an array in a structure. There is one: `ARRAY`."""

    def __repr__(self) -> str:
        return "ARRAY"


ARRAY = Array()


@dataclass(frozen=True, eq=False)
class Static:
    """A value that is part of the structure. Unlike Python's `==`, tells True from 1 and 1 from 1.0, in tuples too."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        return self.value is other.value or _identity(self.value) == _identity(other.value)

    def __hash__(self) -> int:
        return hash(_identity(self.value))


def _identity(value: Any) -> tuple[Any, ...]:
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, tuple):
        return type(value), tuple(map(_identity, value))
    return type(value), value


@dataclass(frozen=True)
class Nested:
    """A value that is no single array, as the tuple of arrays in a sown `nnx.Intermediate`."""

    treedef: Any
    leaves: tuple[Array | Static, ...]


Shape = Array | Nested


@dataclass(frozen=True)
class Place:
    """Where an array is: leaf of the tree, attribute path in the NNX object there, path in that attribute's value.

    Two trees with the same objects have the same places, whatever Variables were added between them.
    """

    leaf: int
    attribute: tuple[Any, ...]
    inner: str
    value: int = field(compare=False)  # position among the values


@dataclass(frozen=True)
class Opened:
    """A tree taken apart.

    Attributes:
      treedef: of the tree, its NNX objects being leaves.
      definitions: for each leaf of the tree the graph definition, None if it is no NNX object.
      names: for each leaf of the tree its path, the root's name first.
      values: for each attribute with data, and each other leaf, its value.
      slots: for each value the Variable that holds it, else None.
      attributes: for each value (leaf of the tree, attribute path).
    """

    treedef: Any
    definitions: tuple[Any, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    slots: tuple[nnx.Variable[Any] | None, ...]
    attributes: tuple[tuple[int, tuple[Any, ...]], ...]

    def path(self, place: Place) -> str:
        return join(self.names[place.leaf], *place.attribute, place.inner)

    def structure(self) -> Opened:
        """Itself without values: holds no array."""
        return Opened(self.treedef, self.definitions, self.names, (), (), ())


def is_node(x: Any) -> bool:
    """Whether NNX, and not JAX, knows what is inside."""
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def is_array(x: Any) -> bool:
    """Whether JAX can take it as an array: tracers, numpy and abstract arrays too, plain numbers not."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUmM"  # objects, strings and dates are data for Python
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.generic, jax.Ref))


def join(*parts: Any) -> str:
    """`blocks`, 0, `attn` -> `blocks/0/attn`; empty parts are left out."""
    return "/".join(text for part in parts if (text := str(part)))


def open_tree(tree: Any, *, refs: Any, known: Any = None, name: str = "", names: Sequence[str] | None = None) -> Opened:
    """Takes a tree apart.

    Args:
      refs: `RefMap` of the objects seen so far, shared by all trees of a call; grows.
      known: `RefMap` of objects that had an index before; the definitions refer to it.
      name: path of the tree itself.
      names: paths of the leaves, instead of their places in the tree.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)
    definitions: list[Any] = []
    values: list[Any] = []
    slots: list[nnx.Variable[Any] | None] = []
    attributes: list[tuple[int, tuple[Any, ...]]] = []
    for position, (_, leaf) in enumerate(with_paths):
        if not is_node(leaf):
            definitions.append(None)
            values.append(leaf)
            slots.append(None)
            attributes.append((position, ()))
            continue
        definition, state = nnx.flatten(leaf, ref_index=refs, ref_outer_index=known, graph=True)
        definitions.append(definition)
        for path, slot in zip(state.paths, state.leaves, strict=True):
            variable = slot if isinstance(slot, nnx.Variable) else None
            values.append(slot if variable is None else variable.get_raw_value())
            slots.append(variable)
            attributes.append((position, tuple(path)))
    if names is None:
        names = [join(name, *_parts(path)) for path, _ in with_paths]
    return Opened(treedef, tuple(definitions), tuple(names), tuple(values), tuple(slots), tuple(attributes))


def close_tree(opened: Opened, values: Iterator[Any], *, refs: Any, outer: Any = None) -> tuple[Any, list[Any]]:
    """The tree again, from values in the same order; and its NNX objects.

    Args:
      refs: `IndexMap` of the objects built so far, shared by all trees of a call; grows.
      outer: `IndexMap` of existing objects to change in place where a definition refers to one. Default: all are new.
    """
    items: list[Any] = []
    nodes: list[Any] = []
    for definition in opened.definitions:
        if definition is None:
            items.append(next(values))
            continue
        state = [next(values) for _ in range(definition.num_leaves)]
        node = nnx.unflatten(definition, state, index_ref=refs, outer_index_outer_ref=outer)
        items.append(node)
        nodes.append(node)
    return jax.tree.unflatten(opened.treedef, items), nodes


def take_arrays(opened: Opened) -> tuple[tuple[Shape | Static, ...], list[Any], list[Place]]:
    """What each value is, the arrays in them, and where those are. A number in a module is an array."""
    shapes: list[Shape | Static] = []
    arrays: list[Any] = []
    places: list[Place] = []
    for index, (value, (leaf, attribute)) in enumerate(zip(opened.values, opened.attributes, strict=True)):
        of_module = opened.definitions[leaf] is not None
        if is_array(value) or (of_module and isinstance(value, NUMBERS)):
            shapes.append(ARRAY)
            arrays.append(_array(value))
            places.append(Place(leaf, attribute, "", index))
            continue
        if not of_module:
            shapes.append(Static(value))
            continue
        inner, treedef = jax.tree_util.tree_flatten_with_path(value)
        kinds: list[Array | Static] = []
        for path, x in inner:
            if is_array(x) or isinstance(x, NUMBERS):
                kinds.append(ARRAY)
                arrays.append(_array(x))
                places.append(Place(leaf, attribute, join(*_parts(path)), index))
            else:
                kinds.append(Static(x))
        shapes.append(Nested(treedef, tuple(kinds)))
    return tuple(shapes), arrays, places


def fill(shapes: Sequence[Shape | Static], arrays: Sequence[Any]) -> list[Any]:
    """The values again, from arrays in the order of `take_arrays`."""
    rest = iter(arrays)
    values: list[Any] = []
    for shape in shapes:
        if isinstance(shape, Array):
            values.append(next(rest))
        elif isinstance(shape, Static):
            values.append(shape.value)
        else:
            leaves = [next(rest) if isinstance(kind, Array) else kind.value for kind in shape.leaves]
            values.append(jax.tree.unflatten(shape.treedef, leaves))
    return values


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, (*NUMBERS, np.generic)) else x


def _parts(path: Sequence[Any]) -> list[Any]:
    """JAX's key path as plain keys."""
    return [next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key) for key in path]
