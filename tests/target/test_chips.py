"""Data-sheet facts: every chip is there, complete, and plausible next to the others."""

from __future__ import annotations

import pytest

from rematplan.target.chips import chips, gpu_target_config

TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")
GPUS = ("gpu-a100", "gpu-h100", "gpu-h200", "gpu-b200", "gpu-rtx4090", "gpu-l4")
GIB = 1 << 30


def test_all_chips_are_there():
    assert set(chips()) == {*TPUS, *GPUS, "cpu"}


@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_facts_are_complete(name):
    chip = chips()[name]
    assert chip.name == name
    assert chip.source
    assert 0.9 * chip.memory_bytes < chip.compiler_memory_bytes <= chip.memory_bytes
    assert 10 < chip.peak("bf16") / chip.bandwidth < 1000  # operations per byte: matrix units outrun memory everywhere
    assert chip.peak("f32") <= chip.peak("bf16") <= chip.peak("f8e4m3fn")
    assert chip.peak("s8") == chip.peak("u8")
    assert chip.topology if chip.kind == "tpu" else chip.device_info


def test_memory_that_the_tpu_compiler_sees():
    seen = {name: round(chips()[name].compiler_memory_bytes / GIB, 2) for name in TPUS}
    assert seen == {"tpu-v4": 30.75, "tpu-v5e": 15.75, "tpu-v5p": 95.73, "tpu-v6e": 31.24, "tpu-v7x": 94.74}


@pytest.mark.parametrize("name", GPUS)
def test_gpu_description_fits_the_vector_rate(name):
    chip = chips()[name]
    info = chip.device_info
    peak = 2 * info["core_count"] * info["fpus_per_core"] * chip.clock_hz  # a fused multiply-add is two operations
    assert chip.vector_flops["f32"] == pytest.approx(peak, rel=0.03)
    config = gpu_target_config(chip)
    assert f"core_count: {info['core_count']}" in config
    assert f"device_memory_size: {chip.compiler_memory_bytes}" in config
