"""Names of targets -> what to compile for.

Comes in: `"tpu-v5e"`, `"tpu-v5e:4x4"`, `"gpu-h100"`, `"gpu-h100:8"`, `"cpu"`, `"cpu:8"` or `"local"`. Goes out: a `Target`.
Whether a compiler is installed is looked up without loading it: the caller's process never loads a TPU or GPU compiler.

    target = resolve("tpu-v5e")
    target.memory_bytes, target.platform
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import math
import re
from dataclasses import dataclass
from enum import Enum

from rematplan.errors import InputError
from rematplan.target.chips import Chip, chips

CPU_DEVICES = 64  # virtual ones, at most
_NEAREST = 3  # names suggested for an unknown one
_SHAPE = re.compile(r"\d+(x\d+)*")
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_GPU_PACKAGES = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")


class Kind(Enum):
    """How a target's programs are compiled."""

    #: By libtpu.
    TPU = "tpu"
    #: By XLA's compiler for NVIDIA GPUs.
    GPU = "gpu"
    #: By XLA's compiler for CPUs.
    CPU = "cpu"
    #: For the device in this machine, and run there.
    LOCAL = "local"


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
      name: as the user wrote it, aliases replaced.
      chip: data-sheet facts; None for `local`.
      topology: name of the compiler's topology, e.g. "v5e:2x2" or "1x1x8"; empty for cpu and local.
      device_count: devices that a program may use; of a TPU's topology, whose sizes count chips, all of every chip.
      memory_bytes: per device, what the compiler lets a program have; None if unknown.
    """

    name: str
    kind: Kind
    chip: Chip | None = None
    topology: str = ""
    device_count: int = 1
    memory_bytes: int | None = None

    @property
    def platform(self) -> str:
        """JAX's name of the platform to lower for."""
        if self.kind is Kind.LOCAL:
            import jax

            platform = jax.default_backend()
            return "cuda" if platform == "gpu" else platform
        return {Kind.TPU: "tpu", Kind.GPU: "cuda", Kind.CPU: "cpu"}[self.kind]


@dataclass(frozen=True)
class TargetInfo:
    """One line of the list of targets.

    Attributes:
      memory_bytes: of one device, as sold; None if unknown.
      compiler_memory_bytes: what the compiler or the driver lets a program have; None if unknown.
      installed: whether the compiler is here.
      install: what to run if the compiler is missing; empty otherwise.
      source: the data sheet.
    """

    name: str
    title: str
    memory_bytes: int | None
    compiler_memory_bytes: int | None
    installed: bool
    install: str
    source: str


def resolve(name: str) -> Target:
    """The target of that name.

    Args:
      name: a chip ("tpu-v5e"), a chip with a topology ("tpu-v5e:4x4", "gpu-h100:8"), "cpu", "cpu:8" for eight virtual
        devices, or "local".

    Raises:
      InputError: unknown chip (with the nearest names), a topology that is none, or that has not as many axes as the chip's
        torus, or the compiler is not installed. Sizes that a compiler does not take are refused when it is asked.
    """
    base, _, shape = name.strip().partition(":")
    if base == "local":
        if shape:
            raise InputError(f"target {name!r}: local takes no topology; write local.")
        return Target("local", Kind.LOCAL)
    chip = _chip(base)
    if chip.kind == "cpu":
        return _cpu(name, shape, chip)
    if shape and (not _SHAPE.fullmatch(shape) or math.prod(_sizes(shape)) < 1):
        example = "gpu-h100:8" if chip.kind == "gpu" else "tpu-v5e:4x4"
        raise InputError(f"target {name!r}: {shape!r} is no topology; write sizes, e.g. {example}.")
    missing = _missing(chip.kind)
    if missing:
        raise InputError(f"target {name!r} needs the {chip.kind.upper()} compiler, which is not installed: {missing}")
    if shape and chip.kind == "tpu":
        _check_axes(name, shape, chip)
    count = math.prod(_sizes(shape)) * chip.devices_per_chip if shape else 1
    memory = chip.compiler_memory_bytes or None
    full_name = f"{chip.name}:{shape}" if shape else chip.name
    if chip.kind == "gpu":
        return Target(full_name, Kind.GPU, chip, f"1x1x{count}", count, memory)
    family = chip.topology["name"].partition(":")[0]
    topology = f"{family}:{shape}" if shape else chip.topology["name"]
    return Target(full_name, Kind.TPU, chip, topology, count, memory)


def _check_axes(name: str, shape: str, chip: Chip) -> None:
    axes, sizes = _axes(chip), _sizes(shape)
    if 2 <= len(sizes) <= axes:
        return
    example = example_topology(chip.name, math.prod(sizes) * chip.devices_per_chip) or f"{chip.name}:{_shape(chip)}"
    told = "is one number" if len(sizes) == 1 else f"has {len(sizes)} axes"
    raise InputError(
        f"target {name!r}: the chips of {chip.name} are connected along {axes} axes, and {shape!r} {told}; write a size for "
        f"each, e.g. {example}."
    )


def _cpu(name: str, shape: str, chip: Chip) -> Target:
    """The CPU as one device, or as several virtual ones."""
    if not shape:
        return Target("cpu", Kind.CPU, chip)
    if not shape.isdigit() or not 1 <= int(shape) <= CPU_DEVICES:
        raise InputError(f"target {name!r}: write cpu, or cpu:8 for eight virtual devices (at most {CPU_DEVICES}).")
    return Target(f"cpu:{int(shape)}", Kind.CPU, chip, device_count=int(shape))


def targets() -> list[TargetInfo]:
    """Every chip, then `local`, with whether its compiler is installed."""
    rows = [
        TargetInfo(
            chip.name,
            chip.title,
            chip.memory_bytes or None,
            chip.compiler_memory_bytes or None,
            installed=not _missing(chip.kind),
            install=_missing(chip.kind),
            source=chip.source,
        )
        for chip in chips().values()
    ]
    rows.append(TargetInfo("local", "the device in this machine, measured by running", None, None, True, "", "runs"))
    return rows


def compiler_versions(target: Target) -> dict[str, str]:
    """Versions that a compiled result depends on, without loading anything."""
    packages = ["jax", "jaxlib"]
    packages += {Kind.TPU: ["libtpu"], Kind.GPU: list(_GPU_PACKAGES)}.get(target.kind, [])
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _chip(name: str) -> Chip:
    known = chips()
    by_alias = {alias: chip for chip in known.values() for alias in chip.aliases}
    chip = known.get(name.lower()) or by_alias.get(name.lower())
    if chip is not None:
        return chip
    names = [*known, *by_alias, "local"]
    close = difflib.get_close_matches(name.lower(), names, n=_NEAREST, cutoff=0.4)
    close += [n for n in names if name and name.lower() in n and n not in close]
    nearest = ", ".join(close[:_NEAREST] or names)
    raise InputError(f"unknown target {name!r}; nearest: {nearest}. `rematplan targets` lists all.")


def example_topology(name: str, devices: int) -> str:
    """A target of that chip with so many devices, for messages: "tpu-v5e:4x4", "gpu-h100:8"; empty if there is none."""
    chip = chips().get(name)
    if chip is None or chip.kind != "tpu":
        return f"{name}:{devices}"
    if devices % chip.devices_per_chip:
        return ""
    shapes = [
        s for s in _factorizations(devices // chip.devices_per_chip, _axes(chip)) if all(map(_fills_hosts, s[:2]))
    ]
    # as even as it goes, and rather whole hosts than parts of them
    best = min(shapes, key=lambda s: (max(s), s[:2].count(1), s), default=())
    return f"{name}:{'x'.join(map(str, best))}" if best else ""


def _factorizations(number: int, factors: int) -> list[tuple[int, ...]]:
    """Every way to write a number as a product of so many."""
    if factors == 1:
        return [(number,)]
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return [(n, *rest) for n in divisors for rest in _factorizations(number // n, factors - 1)]


def _fills_hosts(size: int) -> bool:
    """Whether libtpu takes a size along one of the first two axes: a host has 2 x 2 chips, and smaller ones are parts of it."""
    return size == 1 or size % 2 == 0


def _axes(chip: Chip) -> int:
    """Of the torus of a TPU's chips."""
    return len(_sizes(_shape(chip)))


def _shape(chip: Chip) -> str:
    return chip.topology["name"].partition(":")[2]


def _sizes(shape: str) -> list[int]:
    return [int(n) for n in shape.split("x")]


def _missing(kind: str) -> str:
    """The command that installs a missing compiler; empty if it is there."""
    if kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        return "pip install 'rematplan[tpu]'"
    if kind == "gpu" and not any(importlib.util.find_spec(plugin) for plugin in _GPU_PLUGINS):
        return "pip install 'rematplan[cuda]'"
    return ""
