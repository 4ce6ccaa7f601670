"""Names of targets, and what is said of wrong ones."""

from __future__ import annotations

import importlib.util

import pytest

from rematplan.errors import InputError
from rematplan.target.target import Kind, compiler_versions, example_topology, resolve, targets


def test_a_chip():
    target = resolve("tpu-v5e")
    assert (target.kind, target.topology, target.device_count, target.platform) == (Kind.TPU, "v5e:2x2", 1, "tpu")
    assert target.memory_bytes == int(15.75 * 2**30)


@pytest.mark.parametrize(
    ("name", "topology", "count"),
    [
        ("tpu-v5e:4x4", "v5e:4x4", 16),
        ("tpu-v4:2x2x1", "v4:2x2x1", 4),
        ("tpu-v5p:4x4", "v5p:4x4", 16),
        ("tpu-v7x:2x2x1", "tpu7x:2x2x1", 8),  # two cores in each chip
        ("gpu-h100:8", "1x1x8", 8),
        ("gpu-l4", "1x1x1", 1),
    ],
)
def test_topologies(name, topology, count):
    target = resolve(name)
    assert (target.name, target.topology, target.device_count) == (name, topology, count)


def test_aliases_and_case():
    assert resolve("tpu7x").name == "tpu-v7x"
    assert resolve("TPU-v5e").name == "tpu-v5e"


def test_cpu_has_no_memory_figure():
    assert resolve("cpu").memory_bytes is None
    assert resolve("cpu").platform == "cpu"
    assert resolve("local").kind is Kind.LOCAL


@pytest.mark.parametrize(
    ("name", "nearest"), [("tpu-v5", "tpu-v5e"), ("h100", "gpu-h100"), ("gpu-h10", "gpu-h100"), ("4090", "gpu-rtx4090")]
)
def test_unknown_chips_get_the_nearest_names(name, nearest):
    with pytest.raises(InputError, match=f"unknown target '{name}'.*{nearest}"):
        resolve(name)


@pytest.mark.parametrize("name", ["tpu-v5e:", "tpu-v5e:4by4", "gpu-h100:0", "local:1"])
def test_topologies_that_are_none(name):
    if name.endswith(":"):
        assert resolve(name).name == "tpu-v5e"
        return
    with pytest.raises(InputError, match="topology"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("tpu-v5e:2", "tpu-v5e:1x2"),
        ("tpu-v5e:16", "tpu-v5e:4x4"),
        ("tpu-v5e:3", "tpu-v5e:2x2"),  # no topology has as many
        ("tpu-v5e:4x4x4", "tpu-v5e:8x8"),
        ("tpu-v6e:2x2x1", "tpu-v6e:2x2"),
        ("tpu-v5p:2x2x2x2", "tpu-v5p:2x2x4"),
        ("tpu7x:4", "tpu-v7x:2x2x1"),
    ],
)
def test_topologies_of_other_axes_than_the_chips_are_refused(name, example):
    with pytest.raises(InputError, match=f"e.g. {example}\\.$"):
        resolve(name)
    resolve(example)


@pytest.mark.parametrize("chip", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"])
def test_examples_have_as_many_devices_as_they_are_said_to(chip):
    per_chip = resolve(chip).chip.devices_per_chip
    for devices in range(1, 65):
        example = example_topology(chip, devices)
        if example:
            assert resolve(example).device_count == devices
        else:
            assert devices % 2  # no host holds a part of a chip, or an odd number of them side by side
    assert example_topology(chip, 8 * per_chip).partition(":")[2] in ("2x4", "2x2x2")


@pytest.mark.parametrize(
    ("name", "extra", "package"), [("tpu-v5e", "tpu", "libtpu"), ("gpu-a100", "cuda", "jax_cuda13_plugin")]
)
def test_a_missing_compiler_is_a_one_line_instruction(monkeypatch, name, extra, package):
    find = importlib.util.find_spec
    gone = ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module in gone else find(module))
    with pytest.raises(InputError) as raised:
        resolve(name)
    assert f"pip install 'rematplan[{extra}]'" in str(raised.value)
    assert "\n" not in str(raised.value)
    rows = {row.name: row for row in targets()}
    assert not rows[name].installed
    assert rows["cpu"].installed
    assert rows["local"].installed


def test_versions_name_the_compiler():
    assert set(compiler_versions(resolve("tpu-v5e"))) == {"jax", "jaxlib", "libtpu"}
    assert set(compiler_versions(resolve("gpu-h100"))) >= {"jax", "jaxlib", "jax-cuda13-pjrt"}
    assert set(compiler_versions(resolve("cpu"))) == {"jax", "jaxlib"}
