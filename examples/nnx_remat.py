"""`nnx.remat` around a whole model: what it changes, what it does not, and what a planner does instead.

    python examples/nnx_remat.py [TARGET]

Every statement below is asserted as well as printed. Runs on any machine with JAX. The last part asks a compiler: that
of a TPU v5e if it is installed (`pip install 'rematplan[tpu]'`; no TPU needed), else the one of the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what runs here is small; compilers for chips need no chip

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rematplan as rp
from rematplan.units import format_bytes

LAYERS, FEATURES, BATCH, SEED = 8, 64, 32, 0
TOLERANCE = 1e-6  # relative and absolute, float32: recomputing may reassociate sums
DEFAULT_TARGET = "tpu-v5e" if importlib.util.find_spec("libtpu") else "cpu"


class MLP(nnx.Module):
    def __init__(self, num_layers: int, features: int, *, rngs: nnx.Rngs):
        # One stream of keys for all layers, in order. nnx.List tells NNX that the list holds submodules.
        self.layers = nnx.List([nnx.Linear(features, features, rngs=rngs) for _ in range(num_layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


class MarkedMLP(MLP):
    """The same with a list that is marked by `nnx.data`."""

    def __init__(self, num_layers: int, features: int, *, rngs: nnx.Rngs):
        self.layers = nnx.data([nnx.Linear(features, features, rngs=rngs) for _ in range(num_layers)])


def plain(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.remat
def fwd(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@rp.remat
def rp_fwd(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.remat
def layer_fwd(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    return jax.nn.relu(layer(x))


def by_layer(model: MLP, x: jax.Array) -> jax.Array:
    for layer in model.layers:
        x = layer_fwd(layer, x)
    return x


Forward = Callable[[MLP, jax.Array], jax.Array]


def loss_of(forward: Forward) -> Callable[[MLP, jax.Array], jax.Array]:
    """A scalar, so that it can be differentiated."""

    def loss(model: MLP, x: jax.Array) -> jax.Array:
        return jnp.mean(forward(model, x) ** 2)

    return loss


def initialization() -> None:
    model = MLP(LAYERS, FEATURES, rngs=nnx.Rngs(SEED))
    first, second = model.layers[0], model.layers[1]
    assert not np.allclose(first.kernel[...], second.kernel[...])
    assert first.bias is not None and second.bias is not None
    assert not np.any(first.bias[...]) and not np.any(second.bias[...])
    print("one Rngs for all layers: kernels differ, biases are all zero")

    again = [nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(SEED)) for _ in range(2)]
    assert np.array_equal(again[0].kernel[...], again[1].kernel[...])
    print("a fresh Rngs of the same seed per layer: every layer is the same layer")

    x = jax.random.normal(jax.random.key(1), (BATCH, FEATURES))
    marked = MarkedMLP(LAYERS, FEATURES, rngs=nnx.Rngs(SEED))
    assert np.array_equal(marked(x), model(x))
    assert np.array_equal(fwd(marked, x), fwd(model, x))
    print("a list marked with nnx.data holds the same submodules, under remat too")


def same_results() -> None:
    model = MLP(LAYERS, FEATURES, rngs=nnx.Rngs(SEED))
    x = jax.random.normal(jax.random.key(1), (BATCH, FEATURES))
    expected = nnx.value_and_grad(loss_of(plain))(model, x)
    for name, forward in (("nnx.remat", fwd), ("rematplan.remat", rp_fwd), ("per layer", by_layer)):
        np.testing.assert_allclose(forward(model, x), plain(model, x), rtol=TOLERANCE, atol=TOLERANCE)
        found = nnx.value_and_grad(loss_of(forward))(model, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), found, expected)
        print(f"{name}: output, loss and gradients equal the undecorated model's within {TOLERANCE:g}")


def forward_only() -> None:
    """Nothing is saved where nothing is differentiated, with remat or without."""
    model = MLP(LAYERS, FEATURES, rngs=nnx.Rngs(SEED))
    graph, state = nnx.split(model)
    x = jnp.zeros((BATCH, FEATURES))
    temporary = []
    for forward in (plain, fwd):
        compiled = jax.jit(lambda state, x, forward=forward: forward(nnx.merge(graph, state, copy=True), x)).lower(
            state, x
        )
        memory = compiled.compile().memory_analysis()
        assert memory is not None
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]
    print(f"forward only: {format_bytes(temporary[0])} of temporaries either way, which says nothing about backward")


def residuals() -> None:
    """What the backward pass of a differentiated scalar loss keeps."""
    model, x = MLP(LAYERS, FEATURES, rngs=nnx.Rngs(SEED)), jnp.zeros((BATCH, FEATURES))
    without, region, rp_region, layers = (
        rp.inspect(rp.Workload(loss_of(forward), model, x)) for forward in (plain, fwd, rp_fwd, by_layer)
    )
    print("\n", without, sep="")
    one_bytes = x.nbytes  # of the activation between two layers
    assert region.total_bytes == one_bytes  # the output alone, which the loss squares outside the region
    assert rp_region.total_bytes == region.total_bytes
    assert layers.total_bytes == LAYERS * one_bytes  # the input of each layer but the first, and the output
    assert without.total_bytes > layers.total_bytes
    print(
        f"residuals: without {format_bytes(without.total_bytes)}, one region {format_bytes(region.total_bytes)},",
        end=" ",
    )
    print(f"a region per layer {format_bytes(layers.total_bytes)}")


def on_a_chip(target: str) -> None:
    """Residuals are not memory: the chip's compiler says what each boundary does to the peak."""
    layers, features, batch = 16, 1024, 8192
    model = nnx.eval_shape(lambda: MLP(layers, features, rngs=nnx.Rngs(SEED)))  # shapes only
    x = jax.ShapeDtypeStruct((batch, features), jnp.float32)
    print(f"\n{layers} layers of {features}, batch {batch}, on {target}")
    measured = {
        forward: rp.measure(rp.Workload(loss_of(forward), model, x), target=target, method=method)
        for forward, method in ((plain, "probe"), (fwd, "probe"), (by_layer, "compile"))
    }
    for forward, name in ((plain, "without"), (fwd, "one region"), (by_layer, "a region per layer")):
        found = measured[forward]
        assert found.flops is not None
        print(f"  {name:18}: peak {format_bytes(found.peak_bytes):>8}, {found.flops / 1e9:.0f} GFLOP")
    without, region, by_hand = measured[plain], measured[fwd], measured[by_layer]
    # The backward pass begins with recomputing the whole region; then everything is alive at once, as without it.
    assert region.peak_bytes >= 0.95 * without.peak_bytes
    assert region.flops is not None and without.flops is not None
    assert region.flops > 1.2 * without.flops
    assert by_hand.peak_bytes < 0.8 * without.peak_bytes

    print(f"\nwhat the planner finds in the {format_bytes(by_hand.required_bytes)} that a region per layer needs:")
    plan = rp.plan(rp.Workload(loss_of(plain), model, x), budget=by_hand.required_bytes, target=target)
    print(plan)
    found = plan.measurement
    assert found is not None and found.seconds is not None and by_hand.seconds is not None
    assert found.required_bytes <= by_hand.required_bytes
    assert found.sources["seconds"] == by_hand.sources["seconds"]
    assert found.seconds < by_hand.seconds
    print(f"{1 - found.seconds / by_hand.seconds:.0%} less time than a region per layer, in no more memory")


def main(target: str = DEFAULT_TARGET) -> None:
    initialization()
    same_results()
    forward_only()
    residuals()
    on_a_chip(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
