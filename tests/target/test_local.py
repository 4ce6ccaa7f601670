"""Programs run on the device in this machine: what lies on it meanwhile, and arrays made for shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan.materialize import KEY_IMPLEMENTATIONS
from rematplan.target.local import measure_here
from rematplan.target.target import resolve

LOCAL = resolve("local")
ROOT = Path(__file__).parents[2]
STATE, BATCH = (123, 45), (45, 67)


def update(w, m, x):
    """Takes and gives back a donated state of two arrays."""
    return w - 0.1 * m + x.sum(), 0.9 * m + w


def alive(shape):
    return sum(array.shape == shape for array in jax.live_arrays())


@pytest.mark.parametrize("made", [True, False], ids=["made for shapes", "the caller's"])
def test_donated_arguments_are_on_the_device_once(monkeypatch, made):
    """Their originals wait elsewhere: with two of each the allocator's peak was too high by all that is donated."""
    before, seen = alive(STATE), []
    ready = jax.block_until_ready

    def counting(arrays):
        if isinstance(arrays, list):  # what a run is given
            seen.append((alive(STATE) - before, alive(BATCH)))
        return ready(arrays)

    monkeypatch.setattr(jax, "block_until_ready", counting)
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (STATE, STATE, BATCH)]
    if not made:
        leaves = [jnp.ones(leaf.shape, leaf.dtype) for leaf in leaves]
    measured = measure_here(update, leaves, target=LOCAL, donated=(0, 1))
    assert measured.alias_bytes == 2 * 4 * 123 * 45
    # those that the caller holds stay where they are
    assert set(seen) == ({(2, 1)} if made else {(2 + 2, 1 + 1)})


def test_every_run_is_given_the_same():
    seen = []

    def step(w, x):
        jax.debug.callback(lambda *sums: seen.append(tuple(map(float, sums))), w.sum(), x.sum())
        return w + x.sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4), (3,))]
    measure_here(step, shapes, target=LOCAL, donated=(0,))
    jax.effects_barrier()
    assert len(seen) > 1
    ((w, x),) = set(seen)
    assert w and x


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("implementation", KEY_IMPLEMENTATIONS)
@pytest.mark.parametrize("donated", [(), (1,)])
def test_keys_of_every_implementation(implementation, shape, donated):
    dtype = jax.random.key(0, impl=implementation).dtype

    def step(x, key):
        first = key if key.shape == () else key[0]
        return x + jax.random.normal(first, x.shape), key

    leaves = [jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct(shape, dtype)]
    assert measure_here(step, leaves, target=LOCAL, donated=donated).seconds > 0


def test_a_loss_with_a_key_that_is_not_the_default():
    def loss(w, key):
        return (w * jax.random.normal(key, w.shape)).sum()

    w, key = jax.eval_shape(lambda: (jnp.ones((4, 4)), jax.random.key(0, impl="rbg")))
    assert rp.measure(rp.Workload(loss, w, key), target="local").seconds > 0


ON_A_MESH = """
import jax, jax.numpy as jnp, optax
from flax import nnx
from jax.sharding import PartitionSpec as P
import rematplan as rp

model = nnx.eval_shape(lambda: nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)))
x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
work = rp.Workload(
    lambda m, x: (m(x) ** 2).mean(), model, x, mesh={"a": 4}, specs=[P("a"), P("a")], optimizer=optax.adam(1e-3)
)
measured = rp.measure(work, target="local")
assert measured.devices == 4, measured.devices
assert measured.alias_bytes >= 3 * 16 * 8 * 4 // 4, measured.alias_bytes
"""


@pytest.mark.slow
def test_donated_arguments_of_several_devices():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ON_A_MESH], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
