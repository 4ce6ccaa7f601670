"""What one device holds and computes of a program that is spread over a mesh.

Comes in: a traced program whose inputs have shardings. Goes out: the same program with the bytes of every value and the
operations of every equation as one device has them. Nothing is guessed: the program is lowered with every value as a result,
the partitioner's own propagation (Shardy) says how each lies, and bodies of loops follow from how their loop's operands lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from rematplan import _jax_private
from rematplan.program import evaluate
from rematplan.program.graph import Nesting, Operation, Value
from rematplan.program.trace import Traced, nbytes
from rematplan.sharding import axis_names, mesh_of, own_spec


def per_device(traced: Traced, leaves: Sequence[Any]) -> Traced:
    """The program as one of its devices sees it.

    Args:
      leaves: its inputs, shapes with shardings; at least one lies on several devices.
    """
    mesh = mesh_of(leaves)
    if mesh is None:
        return traced
    specs = dict(zip(traced.graph.inputs, map(own_spec, leaves), strict=True))
    return _per_device(traced, specs, mesh)


def _per_device(traced: Traced, inputs: Mapping[int, PartitionSpec], mesh: AbstractMesh) -> Traced:
    specs = _with_constants(traced, {**inputs, **_propagated(traced, inputs, mesh)})
    bodies = {
        index: _per_device(body, _inside(traced, index, specs, body), mesh) for index, body in traced.bodies.items()
    }
    values = tuple(_value(traced, v, specs.get(v.id), mesh) for v in traced.graph.values)
    operations = tuple(_operation(traced, op, specs, bodies, mesh) for op in traced.graph.operations)
    return replace(traced, graph=replace(traced.graph, values=values, operations=operations), bodies=bodies)


def _propagated(traced: Traced, inputs: Mapping[int, PartitionSpec], mesh: AbstractMesh) -> dict[int, PartitionSpec]:
    """How every computed array lies."""
    computed = [
        o
        for equation in traced.equations
        for o in equation.outputs
        if o >= 0 and nbytes(traced.avals[o]) and not jnp.issubdtype(traced.avals[o].dtype, jax.dtypes.extended)
    ]
    leaves = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, inputs.get(i, PartitionSpec())))
        for i, aval in ((i, traced.avals[i]) for i in traced.graph.inputs)
    ]
    text = jax.jit(_every_value(traced, computed)).trace(*leaves).lower(lowering_platforms=("tpu",)).as_text()
    return dict(zip(computed, _jax_private.propagated_specs(text), strict=True))


def _with_constants(traced: Traced, specs: dict[int, PartitionSpec]) -> dict[int, PartitionSpec]:
    """With what depends on no input lying as its first reader of the same shape does.

    The partitioner makes such values once for each reader, so that the one that is asked for has no reader to follow.
    """
    graph = traced.graph
    varies = set(graph.inputs)
    for op in graph.operations:
        if not varies.isdisjoint(op.inputs):
            varies.update(op.outputs)
    found = dict(specs)
    for op in reversed(graph.operations):
        for v in op.inputs:
            spec = found.get(op.outputs[0]) if op.outputs else None
            same = bool(op.outputs) and graph.values[v].shape == graph.values[op.outputs[0]].shape
            if spec is not None and same and v not in varies and not _axes(found.get(v)):
                found[v] = spec
    return found


def _every_value(traced: Traced, values: Sequence[int]) -> Callable[..., list[Any]]:
    def function(*leaves: Any) -> list[Any]:
        env = dict(zip(traced.graph.inputs, leaves, strict=True))
        env.update(traced.constants)
        evaluate.run(traced.equations, env)
        return [env[v] for v in values]

    return function


def _inside(traced: Traced, index: int, specs: Mapping[int, PartitionSpec], body: Traced) -> dict[int, PartitionSpec]:
    """How the inputs of a loop's body lie: like the loop's operands, stacked ones without their first dimension."""
    equation, subprogram = traced.equations[index], traced.graph.operations[index].subprogram
    assert subprogram is not None
    held = dict(zip(equation.variables(), equation.inputs, strict=True))
    found: dict[int, PartitionSpec] = {}
    for position, (atom, inner) in enumerate(zip(equation.eqn.invars, body.graph.inputs, strict=True)):
        spec = PartitionSpec() if isinstance(atom, jex.Literal) else specs.get(held[atom], PartitionSpec())
        stacked = subprogram.kind is Nesting.LOOP and position >= subprogram.constants + subprogram.carries
        found[inner] = PartitionSpec(*spec[1:]) if stacked else spec
    return found


def _operation(
    traced: Traced, op: Operation, specs: Mapping[int, PartitionSpec], bodies: Mapping[int, Traced], mesh: AbstractMesh
) -> Operation:
    """Operations of one device: its part of the result, and of what a product sums over."""
    subprogram = op.subprogram
    if op.index in bodies and subprogram is not None:
        inner = bodies[op.index].graph
        flops = subprogram.length * sum(each.flops for each in inner.operations)
        sent = subprogram.length * sum(each.sent_bytes for each in inner.operations)
        return replace(op, flops=flops, sent_bytes=sent, subprogram=replace(subprogram, graph=inner))
    axes = max((_axes(specs.get(v)) for v in op.outputs), key=len, default=frozenset[str]())
    sent = 0.0
    if op.primitive == "dot_general" and len(op.inputs) == 2 and op.outputs:
        summed, sent = _product(traced, op, specs, mesh)
        axes |= summed
    return replace(op, flops=op.flops / _size(axes, mesh), sent_bytes=sent)


def _product(
    traced: Traced, op: Operation, specs: Mapping[int, PartitionSpec], mesh: AbstractMesh
) -> tuple[frozenset[str], float]:
    """Axes that a product sums over, and the bytes that a device sends in rings to gather operands and to reduce the sum."""
    contracted, batch = traced.equations[op.index].eqn.params["dimension_numbers"]
    left, right = (specs.get(v) for v in op.inputs)
    summed = _axes(left, contracted[0]) & _axes(right, contracted[1])
    result, sent, position = specs.get(op.outputs[0]), 0.0, len(batch[0])
    for side, (spec, value) in enumerate(zip((left, right), op.inputs, strict=True)):
        free = [d for d in range(len(traced.avals[value].shape)) if d not in (*contracted[side], *batch[side])]
        stays = {d: _axes(result, [n]) for n, d in enumerate(batch[side])}
        stays |= {d: _axes(result, [position + n]) for n, d in enumerate(free)}
        position += len(free)
        gathered = frozenset(axis for d in range(len(spec or ())) for axis in _axes(spec, [d]) - stays.get(d, summed))
        parts = _size(gathered, mesh)
        sent += (parts - 1) * _bytes(traced.avals[value], spec, mesh)
    parts = _size(summed, mesh)
    sent += 2 * (parts - 1) / parts * _bytes(traced.avals[op.outputs[0]], result, mesh)
    return summed, sent


def _size(axes: frozenset[str], mesh: AbstractMesh) -> int:
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def _axes(spec: PartitionSpec | None, dimensions: Sequence[int] | None = None) -> frozenset[str]:
    """Mesh axes that split an array, or some of its dimensions."""
    entries = () if spec is None else spec if dimensions is None else [spec[d] for d in dimensions if d < len(spec)]
    return frozenset(axis for entry in entries for axis in axis_names(entry))


def _value(traced: Traced, value: Value, spec: PartitionSpec | None, mesh: AbstractMesh) -> Value:
    if spec is None or not value.bytes:
        return value
    parts = math.prod(_axes_parts(entry, mesh) for entry in spec)
    return replace(value, bytes=_bytes(traced.avals[value.id], spec, mesh), parts=parts)


def _bytes(aval: Any, spec: PartitionSpec | None, mesh: AbstractMesh) -> int:
    """Of an array on one device."""
    sizes = list(map(int, aval.shape))
    for position, entry in enumerate((spec or ())[: len(sizes)]):
        sizes[position] = math.ceil(sizes[position] / _axes_parts(entry, mesh))  # what does not divide is padded
    return math.prod(sizes) * _jax_private.itemsize(aval.dtype)


def _axes_parts(entry: Any, mesh: AbstractMesh) -> int:
    return math.prod(mesh.shape.get(name, 1) for name in axis_names(entry))
