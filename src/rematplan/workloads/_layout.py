"""How the built-in models lie on a mesh: which axes there are, which parameters they split, and where activations lie.

Axes are those of large JAX code bases: `data` splits the batch, `fsdp` splits the batch and every large parameter, `model`
splits the heads, hidden features and vocabulary of transformers (columns of the first product of a pair, rows of the second).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rematplan.errors import InputError

_BATCH, _PARAMETERS, _FEATURES = ("data", "fsdp"), "fsdp", "model"
_COLUMNS = ("qkv", "q", "k", "v", "up", "gate", "head")
_ROWS = ("out", "down")


def mesh_axes(name: str, mesh: str | Mapping[str, int] | None, *, tensor_parallel: bool) -> dict[str, int] | None:
    """Sizes of a mesh's axes, from `data=4,model:4` as the command line has it (`data:4,model:4`) or from a mapping.

    Raises:
      InputError: it cannot be read, or names an axis that the model does not split anything over.
    """
    if mesh is None:
        return None
    known = (*_BATCH, _FEATURES) if tensor_parallel else _BATCH
    if isinstance(mesh, str):
        pairs = [part.replace("=", ":").partition(":") for part in mesh.split(",")]
        if not all(separator and size.strip().isdigit() for _, separator, size in pairs):
            raise InputError(f"{name}: mesh={mesh!r} is no mesh; write sizes of axes, as in mesh=data:4,{known[-1]}:4.")
        sizes = {axis.strip(): int(size) for axis, _, size in pairs}
    else:
        sizes = dict(mesh)
    for axis, size in sizes.items():
        if axis not in known or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(
                f"{name}: mesh axis {axis!r} of size {size!r} is none; the axes are {', '.join(known)}, their sizes numbers "
                "of devices from 1."
            )
    return sizes


def parameters(mesh: Mapping[str, int]) -> Callable[[str, Any], PartitionSpec]:
    """The layout of each parameter by its path and shape."""
    fsdp, model = mesh.get(_PARAMETERS, 1), mesh.get(_FEATURES, 1)

    def spec(path: str, leaf: Any) -> PartitionSpec:
        *_, module, kind = ["", "", *path.split("/")]
        shape = leaf.shape
        entries: list[str | None] = [None] * len(shape)
        split = _split_dimension(module, kind, len(shape)) if model > 1 else None
        if split is not None and shape[split] % model == 0:
            entries[split] = _FEATURES
        if kind in ("kernel", "embedding") and fsdp > 1:
            # of a stacked parameter the first dimension is that of the layers, which a loop goes through one by one
            first = 0 if len(shape) > 3 else len(shape) - 2
            left = [d for d in range(first, len(shape)) if entries[d] is None and shape[d] % fsdp == 0]
            if left:
                entries[max(left, key=lambda d: shape[d])] = _PARAMETERS
        return PartitionSpec(*entries)

    return spec


def batch(mesh: Mapping[str, int]) -> PartitionSpec:
    """The layout of inputs: their first dimension over every axis that splits the batch."""
    axes = tuple(axis for axis in _BATCH if mesh.get(axis, 1) > 1)
    return PartitionSpec(axes) if axes else PartitionSpec()


def laid_out(x: jax.Array, *dimensions: str | None) -> jax.Array:
    """An activation where it belongs on the mesh of the trace; itself where there is none.

    Args:
      dimensions: "batch", "model" or None for each dimension; those left out lie whole on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(mesh.shape) & {*_BATCH, _FEATURES}:
        return x
    entries: list[Any] = []
    for size, what in zip(x.shape, dimensions, strict=False):
        axes = tuple(a for a in (_BATCH if what == "batch" else (what,)) if a is not None and mesh.shape.get(a, 1) > 1)
        entries.append(axes if axes and size % math.prod(mesh.shape[a] for a in axes) == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def splits_features() -> bool:
    """Whether the trace is for a mesh that splits features over devices."""
    return jax.sharding.get_abstract_mesh().shape.get(_FEATURES, 1) > 1


def _split_dimension(module: str, kind: str, rank: int) -> int | None:
    """The dimension of a parameter that tensor parallelism splits."""
    if kind == "embedding":
        return rank - 2 if module == "embed" else None
    if kind == "kernel" and module in _COLUMNS + _ROWS:
        return rank - 1 if module in _COLUMNS else rank - 2
    return rank - 1 if kind == "bias" and module in _COLUMNS else None
