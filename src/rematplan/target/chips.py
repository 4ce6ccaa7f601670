"""Data-sheet facts of chips, read from `chips.toml`. Plain data; knows neither JAX nor compilers.

chip = chips()["tpu-v5e"]
chip.bandwidth, chip.peak("bf16")
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Chip:
    """One device of a chip, as JAX counts devices.

    Attributes:
      name: as the user writes it, e.g. "tpu-v5e".
      kind: "tpu", "gpu" or "cpu".
      memory_bytes: as sold; compiler_memory_bytes: what the compiler or the driver lets a program have. 0 if unknown.
      bandwidth: bytes per second between memory and chip.
      host_bandwidth: bytes per second in each direction between that memory and the host's; 0 where there is no such link.
      link_bandwidth: bytes per second that a device sends to its neighbours in a ring of devices; 0 where there is no link.
      peak_flops: dense matrix rates, operations per second, by HLO operand type ("bf16", "f32", "f8", ...).
      vector_flops: the same outside matrix units; empty if the vendor gives none.
      clock_hz: of the cycles that the TPU compiler estimates; a GPU's boost clock.
      topology: arguments for the TPU compiler's topology.
      devices_per_chip: that JAX counts; of a topology's sizes, which count chips, there are as many times more devices.
      device_info: what the GPU compiler is told of the card.
      source: the data sheet.
    """

    name: str
    kind: str
    title: str
    memory_bytes: int
    compiler_memory_bytes: int
    bandwidth: float
    clock_hz: float
    source: str
    peak_flops: dict[str, float]
    host_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    vector_flops: dict[str, float] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    topology: dict[str, str] = field(default_factory=dict)
    devices_per_chip: int = 1
    device_info: dict[str, Any] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Matrix operations per second on operands of an HLO type; the float32 rate for types the data sheet omits."""
        if dtype in self.peak_flops:
            return self.peak_flops[dtype]
        if dtype[:2] in ("f8", "f4") and dtype[:2] in self.peak_flops:
            return self.peak_flops[dtype[:2]]
        if dtype[:2] in ("f8", "f4") or dtype in ("bf16", "f16"):  # computed in the next wider type
            return self.peak_flops["bf16"]
        if dtype == "u8":
            return self.peak("s8")
        return self.peak_flops["f32"]


@cache
def chips() -> dict[str, Chip]:
    """All chips by name, in the order of the file. Aliases are not keys."""
    text = resources.files("rematplan.target").joinpath("chips.toml").read_text(encoding="utf-8")
    return {name: _chip(name, entry) for name, entry in tomllib.loads(text).items()}


def _chip(name: str, entry: dict[str, Any]) -> Chip:
    fields: dict[str, Any] = {**entry, "aliases": tuple(entry.get("aliases", ()))}
    return Chip(name=name, **fields)


def gpu_target_config(chip: Chip) -> str:
    """The GpuTargetConfig text that describes a card to XLA's GPU compiler.

    Only what changes between cards stands in `chips.toml`; the rest is the same for every card since Ampere.
    """
    info = chip.device_info
    major, minor = info["compute_capability"]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {info["threads_per_core_limit"]}
  shared_memory_per_block: 49152 shared_memory_per_core: {info["shared_memory_per_core"]}
  shared_memory_per_block_optin: {info["shared_memory_per_block_optin"]}
  core_count: {info["core_count"]} fpus_per_core: {info["fpus_per_core"]}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {info["l2_cache_size"]}
  clock_rate_ghz: {chip.clock_hz / 1e9} device_memory_size: {chip.compiler_memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.title}"
"""
