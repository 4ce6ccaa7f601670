"""Where arrays lie on a mesh of devices, said before there are any: mesh and partition specs -> shardings of shapes.

Comes in: a mesh as the user gives it, partition specs by argument, and the flat leaves of a call. Goes out: leaves whose
`sharding` says what each device holds. Meshes are abstract: they have axes and sizes, and no devices, so that a program for 512
of them is traced and lowered on a laptop. Knows nothing of targets or plans.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rematplan import _jax_private
from rematplan.errors import InputError
from rematplan.opened import is_node, open_tree, take_arrays

if TYPE_CHECKING:
    from rematplan.pure import LeafInfo

# around what says where results lie; `target/locations.py` knows by it that no line of the user's is behind that
LAYOUT_SCOPE = "rematplan_layout"

# How one argument lies: a function of path and array, or specs by path in the argument
Layout = Callable[[str, Any], PartitionSpec | None] | Mapping[str, PartitionSpec | None]


def abstract_mesh(mesh: Mapping[str, int] | Mesh | AbstractMesh) -> AbstractMesh:
    """The mesh without its devices; of a mapping every axis is `Auto`, so that the compiler places what nobody placed.

    Raises:
      InputError: it is no mesh, or an axis has no positive size.
    """
    if isinstance(mesh, Mesh):
        return mesh.abstract_mesh
    if isinstance(mesh, AbstractMesh):
        return mesh
    if not isinstance(mesh, Mapping) or not mesh:
        raise InputError(
            f"mesh={mesh!r} is no mesh; give the sizes of its axes, as in {{'data': 4, 'model': 2}}, or a jax Mesh."
        )
    for name, size in mesh.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"mesh axis {name!r} has size {size!r}; write a positive whole number of devices.")
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def mesh_of(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh that leaves lie on; None if they all lie on one device.

    Raises:
      InputError: they lie on different ones.
    """
    found: AbstractMesh | None = None
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size < 2:
            continue
        mesh = abstract_mesh(sharding.mesh)
        if found is not None and mesh.shape != found.shape:
            raise InputError(
                f"arguments lie on different meshes, {dict(found.shape)} and {dict(mesh.shape)}; one step runs on one mesh."
            )
        found = found or mesh
    return found


def in_mesh(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which partition specs without a mesh are those of the mesh that leaves lie on."""
    mesh = mesh_of(leaves)
    if mesh is None or jax.sharding.get_abstract_mesh() == mesh:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def placed(
    leaves: Sequence[Any], infos: Sequence[LeafInfo], mesh: AbstractMesh, layouts: Sequence[Layout]
) -> list[Any]:
    """Abstract leaves with a sharding each.

    Args:
      infos: what each leaf is; `argument` is the position among `layouts`, keywords are replicated.
      layouts: by positional argument, from `layout_of`; what they leave open lies as the leaf says itself, or on every device.

    Raises:
      InputError: a spec that its array cannot have.
    """
    found: list[Any] = []
    for leaf, info in zip(leaves, infos, strict=True):
        position = info.argument if isinstance(info.argument, int) else -1
        layout: Layout = layouts[position] if 0 <= position < len(layouts) else {}
        spec = layout.get(info.place) if isinstance(layout, Mapping) else layout(info.path, leaf)
        if spec is None:
            spec = own_spec(leaf)
        _check(spec, info.path, leaf.shape, mesh)
        found.append(leaf.update(sharding=NamedSharding(mesh, spec)))
    return found


def own_spec(leaf: Any) -> PartitionSpec:
    """How an array or shape says that it lies; whole on every device if it says nothing."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a partition spec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def mesh_of_devices(mesh: AbstractMesh, devices: Sequence[Any]) -> Mesh:
    """The mesh on the first of these devices; there are enough."""
    shape = tuple(mesh.shape.values())
    return Mesh(np.array(devices[: mesh.size]).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)


def on_abstract_mesh(leaf: Any) -> Any:
    """The same abstract leaf; if it lies on devices, on their mesh without them."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, AbstractMesh):
        return leaf
    return leaf.update(sharding=NamedSharding(sharding.mesh.abstract_mesh, sharding.spec))


def layout_of(entry: Any, argument: Any, name: str) -> Layout:
    """How one positional argument lies.

    Args:
      entry: None (as its arrays say, else on every device); a PartitionSpec for all of its arrays; a function of path and
        array; a mapping of paths to specs; or a tree of specs like the argument, `nnx.get_partition_spec` of a model included.

    Raises:
      InputError: it is none of these, or has a spec for a path at which there is no array.
    """
    if entry is None:
        return {}
    if isinstance(entry, PartitionSpec):
        return lambda path, leaf: entry
    if callable(entry) and not isinstance(entry, Mapping):
        function: Any = entry
        return function
    holds_modules = any(map(is_node, jax.tree.leaves(argument, is_leaf=is_node)))
    if not holds_modules and not (isinstance(entry, Mapping) and any(isinstance(k, str) and "/" in k for k in entry)):
        try:
            entry = jax.tree.broadcast(entry, argument, is_leaf=_is_spec)
        except ValueError as error:
            raise InputError(f"specs of {name} are no tree like it: {error}") from error
    listed, _ = jax.tree_util.tree_flatten_with_path(entry, is_leaf=_is_spec)
    specs = {"/".join(map(_key, _without_values(path))): spec for path, spec in listed}
    _check_paths([path for path, spec in specs.items() if spec is not None], argument, name)
    return specs


def shard_bytes(leaf: Any) -> int:
    """Bytes of an array on one device, unpadded."""
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if isinstance(sharding, NamedSharding) else leaf.shape
    return math.prod(map(int, shape)) * _jax_private.itemsize(leaf.dtype)


def constrained(value: Any, like: Any) -> Any:
    """The array, laid out as a leaf of the same shape, where the compiler would otherwise choose."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size < 2 or value.shape != like.shape:
        return value
    if any(kind is not AxisType.Auto for kind in sharding.mesh.axis_types):
        return value  # explicit axes are part of types, which agree already
    with jax.named_scope(LAYOUT_SCOPE):
        return jax.lax.with_sharding_constraint(value, sharding)


def _check(spec: PartitionSpec, path: str, shape: Sequence[int], mesh: AbstractMesh) -> None:
    if not isinstance(spec, PartitionSpec):
        raise InputError(f"the spec of {path} is {spec!r}; write a jax.sharding.PartitionSpec or None.")
    if len(spec) > len(shape):
        raise InputError(f"{path} has {len(shape)} dimensions, but its spec {spec} is for {len(spec)}.")
    used: set[str] = set()
    for size, entry in zip(shape, spec, strict=False):
        names = axis_names(entry)
        for axis in names:
            if axis not in mesh.shape:
                raise InputError(
                    f"the spec of {path} names the axis {axis!r}, but the mesh has {', '.join(map(repr, mesh.shape))}."
                )
            if axis in used:
                raise InputError(f"the spec of {path}, {spec}, names the axis {axis!r} twice.")
            used.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts:
            raise InputError(
                f"{path} has shape {tuple(shape)}, of which {size} cannot be split over {parts} devices ({spec}); choose a "
                "size that they divide, or leave that dimension whole."
            )


def _check_paths(paths: Sequence[str], argument: Any, name: str) -> None:
    opened = open_tree(argument, refs=nnx.graphlib.RefMap())
    there = [opened.path(place) for place in take_arrays(opened)[2]]
    for path in paths:
        if path not in there:
            close = difflib.get_close_matches(path, there, n=1, cutoff=0.0)
            nearest = f"the nearest of its paths is {close[0]!r}" if close else "it holds none"
            raise InputError(f"specs of {name} name {path!r}, where it has no array; {nearest}.")


def _without_values(path: Sequence[Any]) -> list[Any]:
    """A key path without the steps from a Variable into its value; a module may have an attribute of that name."""
    attribute = jax.tree_util.GetAttrKey
    return [
        key
        for key, inner in zip(path, [*path[1:], None], strict=True)
        if not (isinstance(key, attribute) and key.name == "value" and not isinstance(inner, attribute))
    ]


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
