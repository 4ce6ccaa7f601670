"""What a compile child does for each kind of target: StableHLO text -> `Measurement`. Runs only inside a child.

measure({"target": "tpu-v5e", "stablehlo": ..., "method": "probe", ...})
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rematplan.errors import InputError
from rematplan.target import tpu
from rematplan.target.chips import Chip, gpu_target_config
from rematplan.target.cost import program_cost, step_seconds
from rematplan.target.hlo import parse
from rematplan.target.measurement import Measurement, Source
from rematplan.target.stated import stated
from rematplan.target.target import Kind, Target, resolve
from rematplan.target.timeline import live_ranges
from rematplan.target.workers import SCRATCH

_GPU_REMATERIALIZATION_OFF = {"xla_disable_hlo_passes": "rematerialization"}
_GPU_SHARE = 0.8  # of a card's memory, which the compiler's own rematerialization keeps a program below (jaxlib 0.10.2)
# Without a card to try tiles on, the compiler takes defaults, and refuses a product that has none: 64 x 196 rows, as in a
# vision transformer (jaxlib 0.10.2). It then has other kernels for it.
_NO_TILES = "find output tile sizes"
_GPU_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
_NO_TOPOLOGY = "INVALID_ARGUMENT"  # of libtpu, asked for sizes that no TPUs come in
# XLA:CPU expands optimization barriers and then merges the recomputation with the original; without this it ignores
# remat
_CPU_HONOURS_REMAT = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# These programs are read, not run: the same schedule and buffers in two thirds of the time (jaxlib 0.10.2)
_CPU_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def measure(request: dict[str, Any]) -> Measurement:
    """Compile as the request asks and read the figures.

    Raises InputError if the compiler knows no such topology, and otherwise whatever the compiler raises, except that a TPU
    program that does not fit its limit is a measurement.
    """
    start = time.monotonic()
    target = resolve(request["target"])
    chip = _chip(target)
    if target.kind is Kind.TPU:
        measured = tpu.measure(
            lambda options: _compile(target, request, options),
            target=target.name,
            chip=chip,
            argument_bytes=request["argument_bytes"],
            output_bytes=request["output_bytes"],
            full=request["method"] != "probe",
            once=request["once"],
            limit_bytes=request["limit_bytes"],
            own_rematerialization=request["rematerialization"] == "on",
        )
    else:
        measured = _allocated(target, chip, request)
    devices = math.prod(request["mesh_shape"])
    return replace(measured, devices=devices, compile_seconds=time.monotonic() - start)


def _compile(target: Target, request: dict[str, Any], options: dict[str, Any]) -> Any:
    from rematplan._jax_private import compile_stablehlo

    memory_bytes = _gpu_memory(_chip(target), request) if target.kind is Kind.GPU else 0
    devices = _devices(target.kind, _chip(target).name, target.topology, memory_bytes)
    return compile_stablehlo(
        request["stablehlo"],
        _mesh(tuple(request["mesh_shape"]), devices),
        options={**options, **request["compiler_options"]},
        load=target.kind is Kind.CPU,
    )


def _mesh(shape: tuple[int, ...], devices: list[Any]) -> list[Any]:
    """Devices in the order of a mesh of that shape: neighbours along its axes are neighbours on the chips' torus."""
    from jax.experimental import mesh_utils

    count = math.prod(shape)
    if count == 1:
        return devices[:1]
    try:
        return list(mesh_utils.create_device_mesh(shape, devices[:count]).flat)
    except (NotImplementedError, ValueError):  # no such mesh on this torus without splitting an axis of it
        return list(mesh_utils.create_device_mesh(shape, devices[:count], allow_split_physical_axes=True).flat)


def _gpu_memory(chip: Chip, request: dict[str, Any]) -> int:
    """Memory that a GPU's compiler is told of: the card's, or less, so that its own rematerialization begins at the limit."""
    limit = request["limit_bytes"]
    if request["rematerialization"] == "off" or limit is None:
        return chip.compiler_memory_bytes
    return min(chip.compiler_memory_bytes, math.ceil(limit / _GPU_SHARE))


@cache
def _devices(kind: Kind, chip_name: str, topology: str, memory_bytes: int) -> list[Any]:
    """Compile-only devices of a topology, or the CPU.

    Args:
      memory_bytes: of a GPU.
    """
    import jax
    from jax.experimental import topologies

    chip = _chip(resolve(chip_name))
    if kind is Kind.TPU:
        extra = {k: v for k, v in chip.topology.items() if k != "name"}
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=topology, **extra).devices
        except Exception as error:
            if _NO_TOPOLOGY not in str(error):
                raise
            said = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"target {chip_name}:{topology.partition(':')[2]}: the compiler refuses it: {said}."
            ) from error
    if kind is Kind.GPU:
        config = gpu_target_config(replace(chip, compiler_memory_bytes=memory_bytes))
        return topologies.get_topology_desc("x", "cuda", target_config=config, topology=topology).devices
    return jax.devices("cpu")


def _allocated(target: Target, chip: Chip, request: dict[str, Any]) -> Measurement:
    """GPU and CPU: a compile takes seconds, so a probe is one too, and arguments + outputs + temporaries are needed."""
    on_gpu = target.kind is Kind.GPU
    warnings: tuple[str, ...] = ()
    if on_gpu:
        off = _GPU_REMATERIALIZATION_OFF if request["rematerialization"] == "off" else {}
        executable, warnings = _compile_for_gpu(target, request, off)
    else:
        executable = _compile(target, request, {**_CPU_HONOURS_REMAT, **_CPU_QUICKLY})
    stats = executable.get_compiled_memory_stats()
    module = parse(executable.hlo_modules()[0].to_string())
    cost = program_cost(module, chip)
    timeline_peak, timeline = live_ranges(module)
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    required = held + stats.temp_size_in_bytes
    limit = request["limit_bytes"]
    return Measurement(
        target=target.name,
        source=Source.COMPILED,
        peak_bytes=min(timeline_peak, required) if on_gpu else required,
        required_bytes=required,
        **stated(stats, cost),
        seconds=step_seconds(
            cost.roofline_seconds, host_bytes=cost.host_bytes, waiting=cost.waiting_seconds, chip=chip
        ),
        limit_bytes=limit,
        fits_limit=None if limit is None else required <= limit,
        sources={
            "peak_bytes": "live ranges of the compiled schedule" if on_gpu else "compiled",
            "required_bytes": "compiled",
            "flops": "counted in the compiled program",
            "seconds": "roofline" if on_gpu else "roofline of a generic CPU",
        },
        timeline=timeline,
        modules=cost.modules,
        costs=cost.instructions,
        warnings=warnings,
    )


def _gpu_quickly() -> dict[str, Any]:
    """Options that change nothing but how long a compile takes.

    Variants of one model share most of their kernels, and assembling those takes most of the time: with a cache of kernels
    the second variant takes a third of it (jaxlib 0.10.2).
    """
    scratch = os.environ.get(SCRATCH)
    if not scratch:
        return {}
    return {
        "xla_gpu_kernel_cache_file": str(Path(scratch) / "kernels"),
        "xla_gpu_enable_llvm_module_compilation_parallelism": True,  # without it the cache is not used
    }


def _compile_for_gpu(target: Target, request: dict[str, Any], options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The executable, and what a reader should know of how it was compiled."""
    global _quick_options_known  # of this process's compiler
    quick = _gpu_quickly() if _quick_options_known else {}
    try:
        return _compile(target, request, {**options, **quick}), ()
    except Exception as error:
        text = str(error)
        if quick and "compile option" in text:  # they come and go with the compiler's versions
            _quick_options_known = False
            return _compile_for_gpu(target, request, options)
        if _NO_TILES not in text or options.keys() >= _GPU_WITHOUT_TRITON.keys():
            raise
        executable, _ = _compile_for_gpu(target, request, {**options, **_GPU_WITHOUT_TRITON})
        return executable, (f"compiled without Triton's matrix products: {text.splitlines()[0]}",)


_quick_options_known = True


def _chip(target: Target) -> Chip:
    if target.chip is None:
        raise ValueError(f"{target.name} is not compiled in a child")
    return target.chip
