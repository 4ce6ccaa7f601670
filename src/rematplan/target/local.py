"""The device in this machine, or several of them: compiled and run here, in the caller's process.

Comes in: a function of flat arrays. Goes out: a `Measurement` whose time was measured, and whose memory is what the
compiler allocated, or what the device's allocator saw where it keeps count; of several devices the fullest. Nothing is
cached: a measured time belongs to its moment.

What the allocator saw is all that it held at once: beside the step also what else this process has on the device, such as the
caller's model, if that lies there, even if the step donates its like; constants of the program; and what is lost where buffers
do not pack.

    measured = measure_here(step, leaves, target=resolve("local"))
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rematplan.errors import InputError
from rematplan.sharding import in_mesh, mesh_of, mesh_of_devices, own_spec
from rematplan.target.chips import chips
from rematplan.target.cost import program_cost
from rematplan.target.dumps import scheduled_text
from rematplan.target.hlo import parse
from rematplan.target.measurement import Measurement, Source
from rematplan.target.stated import stated
from rematplan.target.target import Target
from rematplan.target.timeline import live_ranges

_RUNS = 5  # the median of which counts, after one run to warm up
_ENOUGH_SECONDS = 10.0  # no further run is begun after this
_SPREAD = 0.02  # standard deviation of made-up floating-point inputs: small enough that deep models stay finite
# XLA:CPU merges a recomputation with its original unless told not to; see backends.py
_CPU_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def measure_here(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    *,
    target: Target,
    donated: Sequence[int] = (),
    limit_bytes: int | None = None,
    seed: int = 0,
) -> Measurement:
    """Compile a function for `jax.devices()[0]`, run it a few times, and take the median.

    Args:
      leaves: arrays, used as they are, or shapes, for which arrays are made: zeros for integers, small random numbers
        else.
      donated: indices of arguments whose buffers the outputs may reuse.
    """
    import jax

    from rematplan._jax_private import release

    devices, leaves = _on_devices(leaves)
    start = time.monotonic()
    options: dict[str, Any] = dict(_CPU_OPTIONS) if devices[0].platform == "cpu" else {}
    with in_mesh(leaves):
        traced = jax.jit(function, donate_argnums=tuple(donated), keep_unused=True).trace(*leaves)
        lowered = traced.lower()
        compiled = lowered.compile(compiler_options=options)
    release(traced)
    compile_seconds = time.monotonic() - start
    arguments = [_real(leaf, seed + index, devices[0]) for index, leaf in enumerate(leaves)]
    del leaves  # what was only placed for this must not live beside the copies that are donated
    before = _allocator_peak(devices)
    seconds = _median_seconds(compiled, arguments, tuple(donated))
    after = _allocator_peak(devices)
    own_peak = _own_peak(before, after)
    text = compiled_text(lowered, compiled, options)
    measured = _measurement(target, compiled, text, seconds, compile_seconds, limit_bytes, own_peak)
    return replace(measured, devices=len(devices))


def _on_devices(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The devices to run on, and the leaves on their mesh: the first device, or as many as the leaves' mesh has.

    Raises:
      InputError: this machine has fewer.
    """
    import jax
    from jax.sharding import NamedSharding

    mesh = mesh_of(leaves)
    if mesh is None:
        return jax.devices()[:1], list(leaves)
    found = jax.devices()
    if len(found) < mesh.size:
        raise InputError(
            f"the arguments lie on a mesh of {mesh.size} devices, and this machine has {len(found)}; plan for a target of "
            f"{mesh.size} devices, or, to try it on the CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}."
        )
    real = mesh_of_devices(mesh, found)
    if not mesh.are_all_axes_auto and mesh != real.abstract_mesh:
        raise InputError(
            "explicit mesh axes are part of the types that were traced, and this mesh has no devices; to run here, make the "
            "workload's mesh of the devices that there are, with jax.make_mesh."
        )

    def placed(leaf: Any) -> Any:
        sharding = NamedSharding(real, own_spec(leaf))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=sharding)
        return jax.device_put(leaf, sharding)

    return found[: mesh.size], [placed(leaf) for leaf in leaves]


def _real(leaf: Any, seed: int, device: Any) -> Any:
    import jax
    import jax.numpy as jnp

    from rematplan.materialize import random_keys

    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if mesh_of([leaf]) is not None else jax.device_put(leaf, device)
    place = device if leaf.sharding is None else leaf.sharding
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(random_keys(leaf, seed), place)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), place)
    noise = _SPREAD * jax.random.normal(jax.random.key(seed), leaf.shape, jnp.float32)
    return jax.device_put(noise.astype(leaf.dtype), place)


def _median_seconds(compiled: Any, arguments: list[Any], donated: tuple[int, ...]) -> float:
    """Of some runs, each with donated arguments of its own; consumes the arguments.

    Those that are donated wait in the host's memory: on the device the allocator would count them twice.
    """
    import jax

    waiting = {index: _OnHost(arguments[index]) for index in donated}
    for index in donated:
        arguments[index] = None
    seconds: list[float] = []
    began = time.monotonic()
    for run in range(_RUNS + 1):
        given = list(arguments)
        for index, array in waiting.items():
            given[index] = array.on_device()
        jax.block_until_ready(given)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        if run:  # the first one warms up
            seconds.append(time.perf_counter() - start)
        if seconds and time.monotonic() - began > _ENOUGH_SECONDS:
            break
    return statistics.median(seconds)


class _OnHost:
    """An array in the host's memory, for any number of copies where it was."""

    def __init__(self, array: Any):
        import jax
        import jax.numpy as jnp
        import numpy as np

        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        self._implementation = jax.random.key_impl(array) if is_key else None
        data = jax.random.key_data(array) if is_key else array
        self._place = data.sharding
        self._data = np.array(data)  # not a view: on CPU the array itself would stay

    def on_device(self) -> Any:
        import jax

        data = jax.device_put(self._data, self._place, may_alias=False)
        return data if self._implementation is None else jax.random.wrap_key_data(data, impl=self._implementation)


def _allocator_peak(devices: Sequence[Any]) -> int | None:
    """Of the fullest device."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return max(known, default=None)


def _own_peak(before: int | None, after: int | None) -> int | None:
    """The allocator's peak if this program raised it; it is kept for the life of the process and cannot be reset."""
    return after if before is not None and after is not None and after > before else None


def compiled_text(lowered: Any, compiled: Any, options: dict[str, Any]) -> str:
    """The compiled program as text; where jaxlib cannot read it back, from the dump of a second compile."""
    with tempfile.TemporaryDirectory(prefix="rematplan-dump-") as folder:

        def dumped() -> Path:
            lowered.compile(compiler_options={**options, "xla_dump_to": folder})
            return Path(folder)

        return scheduled_text(compiled.as_text, dumped)


def _measurement(
    target: Target,
    compiled: Any,
    text: str,
    seconds: float,
    compile_seconds: float,
    limit_bytes: int | None,
    own_peak: int | None,
) -> Measurement:
    stats = compiled.memory_analysis()
    module = parse(text)
    cost = program_cost(module, chips()["cpu"])  # for operations and bytes only; the time was measured
    required = (
        stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes - stats.alias_size_in_bytes
    )
    return Measurement(
        target=target.name,
        source=Source.RUN,
        peak_bytes=required if own_peak is None else own_peak,
        required_bytes=required,
        **stated(stats, cost),
        seconds=seconds,
        limit_bytes=limit_bytes,
        fits_limit=None if limit_bytes is None else required <= limit_bytes,
        compile_seconds=compile_seconds,
        sources={
            "peak_bytes": "compiled" if own_peak is None else "run",
            "required_bytes": "compiled",
            "flops": "counted in the compiled program",
            "seconds": "run",
        },
        timeline=live_ranges(module)[1],
    )
