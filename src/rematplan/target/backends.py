"""What a compile child does for each kind of target: StableHLO text -> `Measurement`. Runs only inside a child.

    measure({"target": "tpu-v5e", "stablehlo": ..., "method": "probe", ...})
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
import time
from dataclasses import replace
from functools import cache
from typing import Any

from rematplan.target.chips import Chip, gpu_target_config
from rematplan.target.cost import program_cost
from rematplan.target.hlo import Module, parse
from rematplan.target.measurement import Measurement, Source
from rematplan.target.target import Kind, Target, resolve
from rematplan.target.timeline import live_ranges

_MIB = 1 << 20
# no instruction is this large, so the compiler's own rematerialization finds nothing to do
_TPU_REMATERIALIZATION_OFF = {"xla_tpu_rematerialization_min_size_in_bytes": 1 << 40}
_GPU_REMATERIALIZATION_OFF = {"xla_disable_hlo_passes": "rematerialization"}
# XLA:CPU expands optimization barriers and then merges the recomputation with the original; without this it ignores remat
_CPU_HONOURS_REMAT = {"xla_disable_hlo_passes": "cse_barrier_expander"}
_NEED = re.compile(r"Memory Space: default.*\nTotal bytes: (\d+)")
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "HLO temporaries")


def measure(request: dict[str, Any]) -> Measurement:
    """Compile as the request asks and read the figures.

    Raises whatever the compiler raises, except that a TPU program that does not fit its limit is a measurement.
    """
    start = time.monotonic()
    target = resolve(request["target"])
    backend = {Kind.TPU: _tpu, Kind.GPU: _gpu, Kind.CPU: _cpu}[target.kind]
    measured = backend(target, request)
    return replace(measured, compile_seconds=time.monotonic() - start)


@cache
def _devices(kind: Kind, chip_name: str, topology: str) -> list[Any]:
    """Compile-only devices of a topology, or the CPU."""
    import jax
    from jax.experimental import topologies

    chip = resolve(chip_name).chip
    assert chip is not None
    if kind is Kind.TPU:
        extra = {k: v for k, v in chip.topology.items() if k != "name"}
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **extra).devices
    if kind is Kind.GPU:
        config = gpu_target_config(chip)
        return topologies.get_topology_desc("x", "cuda", target_config=config, topology=topology).devices
    return jax.devices("cpu")


def _compile(target: Target, request: dict[str, Any], options: dict[str, Any]) -> Any:
    from rematplan._jax_private import compile_stablehlo

    assert target.chip is not None
    devices = _devices(target.kind, target.chip.name, target.topology)[: request["num_devices"]]
    return compile_stablehlo(
        request["stablehlo"],
        devices,
        options={**options, **request["compiler_options"]},
        load=target.kind is Kind.CPU,
    )


# TPU


def _tpu(target: Target, request: dict[str, Any]) -> Measurement:
    probe = _tpu_probe(target, request)
    if request["method"] == "probe":
        limit = request["limit_bytes"]
        return replace(probe, limit_bytes=limit, fits_limit=None if limit is None else probe.required_bytes <= limit)
    return _tpu_full(target, request, probe)


def _tpu_probe(target: Target, request: dict[str, Any]) -> Measurement:
    """Bytes that the program needs and its schedule, without generating code.

    The compiler is told that HBM is only as large as arguments + outputs: it schedules and assigns buffers as usual, finds
    that it does not fit, dumps its report, and stops. A smaller limit would distort the schedule.
    """
    limit_mib = (request["argument_bytes"] + request["output_bytes"]) // _MIB
    options = {**_TPU_REMATERIALIZATION_OFF, "xla_tpu_max_hbm_size_mib": limit_mib}
    with tempfile.TemporaryDirectory(prefix="rematplan-probe-") as folder:
        try:
            _compile(target, request, {**options, "xla_dump_to": folder})
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        report = _read_one(folder, "*memory-usage-report.txt")
        text = _read_one(folder, "*after_optimizations.txt")
    need = int(_NEED.search(report)[1])  # pyright: ignore[reportOptionalSubscript]
    return _tpu_measurement(target, request, parse(text), need_bytes=need)


def _tpu_full(target: Target, request: dict[str, Any], probe: Measurement) -> Measurement:
    limit = request["limit_bytes"]
    options: dict[str, Any] = {}
    if request["rematerialization"] == "off":
        options.update(_TPU_REMATERIALIZATION_OFF)
    if limit is not None:
        options["xla_tpu_max_hbm_size_mib"] = limit // _MIB
    try:
        executable = _compile(target, request, options)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return replace(probe, limit_bytes=limit, fits_limit=False)
    stats = executable.get_compiled_memory_stats()
    module = parse(executable.hlo_modules()[0].to_string())
    code = stats.generated_code_size_in_bytes
    measured = _tpu_measurement(target, request, module, need_bytes=probe.required_bytes - probe.code_bytes, code_bytes=code)
    return replace(
        measured,
        source=Source.COMPILED,
        peak_bytes=stats.peak_memory_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        limit_bytes=limit,
        fits_limit=None if limit is None else True,
        sources={**measured.sources, "peak_bytes": "compiled", "code_bytes": "compiled", "cycles": "compiled"},
    )


def _tpu_measurement(
    target: Target, request: dict[str, Any], module: Module, *, need_bytes: int, code_bytes: int | None = None
) -> Measurement:
    chip = _chip(target)
    timeline_peak, timeline = live_ranges(module)
    cost = program_cost(module, chip)
    code = estimated_code_bytes(module) if code_bytes is None else code_bytes
    arguments, outputs = request["argument_bytes"], request["output_bytes"]
    return Measurement(
        target=target.name,
        source=Source.PROBED,
        peak_bytes=timeline_peak,
        required_bytes=max(need_bytes, timeline_peak) + code,
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=max(need_bytes, timeline_peak) - arguments - outputs,
        code_bytes=code,
        flops=cost.flops,
        bytes_accessed=cost.bytes_accessed,
        cycles=cost.cycles,
        seconds=cost.roofline_seconds if cost.cycles is None else cost.cycles / chip.clock_hz,
        sources={
            "peak_bytes": "probed",
            "required_bytes": "probed",
            "code_bytes": "estimated from the schedule",
            "flops": "counted in the scheduled program",
            "seconds": "roofline" if cost.cycles is None else "cycles",
        },
        timeline=timeline,
        costs=cost.instructions,
    )


def estimated_code_bytes(module: Module) -> int:
    return 0


# GPU


def _gpu(target: Target, request: dict[str, Any]) -> Measurement:
    """Probe and full compile are the same on GPU, where a full compile takes seconds."""
    options = dict(_GPU_REMATERIALIZATION_OFF) if request["rematerialization"] == "off" else {}
    return _allocated(target, request, _compile(target, request, options), Source.COMPILED)


# CPU


def _cpu(target: Target, request: dict[str, Any]) -> Measurement:
    return _allocated(target, request, _compile(target, request, _CPU_HONOURS_REMAT), Source.COMPILED)


def _allocated(target: Target, request: dict[str, Any], executable: Any, source: Source) -> Measurement:
    """A measurement where the program needs arguments + outputs + temporaries - aliased (GPU, CPU)."""
    chip, limit = _chip(target), request["limit_bytes"]
    stats = executable.get_compiled_memory_stats()
    module = parse(executable.hlo_modules()[0].to_string())
    cost = program_cost(module, chip)
    timeline_peak, timeline = live_ranges(module)
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    required = held + stats.temp_size_in_bytes
    on_gpu = target.kind is Kind.GPU
    return Measurement(
        target=target.name,
        source=source,
        peak_bytes=timeline_peak if on_gpu else required,
        required_bytes=required,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        flops=cost.flops,
        bytes_accessed=cost.bytes_accessed,
        seconds=cost.roofline_seconds,
        limit_bytes=limit,
        fits_limit=None if limit is None else required <= limit,
        sources={
            "peak_bytes": "live ranges of the compiled schedule" if on_gpu else "compiled",
            "required_bytes": "compiled",
            "flops": "counted in the compiled program",
            "seconds": "roofline" if on_gpu else "roofline of a generic CPU",
        },
        timeline=timeline,
        costs=cost.instructions,
    )


def _chip(target: Target) -> Chip:
    assert target.chip is not None
    return target.chip


def _is_out_of_memory(error: Exception) -> bool:
    return any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _read_one(folder: str, pattern: str) -> str:
    """The text of the one file that the compiler dumped under this name."""
    found = sorted(glob.glob(os.path.join(folder, pattern)))
    if not found:
        raise RuntimeError(f"the compiler dumped no {pattern}; it dumped {sorted(os.listdir(folder))[:5]}")
    with open(found[-1], encoding="utf-8") as file:
        return file.read()
