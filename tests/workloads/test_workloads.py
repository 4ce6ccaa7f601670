"""The built-in workloads: what they are made of, that they train, and that wrong sizes are refused."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rematplan import workloads
from rematplan.cli.workloads import BUILT_IN
from rematplan.errors import InputError

SMALL = {
    "decoder": {
        "blocks": 2,
        "features": 64,
        "hidden": 96,
        "heads": 4,
        "kv_heads": 2,
        "length": 16,
        "batch": 2,
        "vocabulary": 64,
    },
    "mlp": {"blocks": 3, "features": 8, "batch": 4},
    "policy_mlp": {"features": 8, "batch": 4},
    "gpt": {"blocks": 2, "features": 16, "heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "scan_gpt": {"blocks": 2, "features": 16, "heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "vit": {"blocks": 2, "features": 16, "heads": 2, "image": 16, "patch": 8, "batch": 2, "classes": 5},
    "resnet": {"blocks": (1, 1), "features": 8, "image": 32, "batch": 2, "classes": 5},
    "unet": {"levels": 2, "blocks": 1, "features": 8, "image": 8, "batch": 2},
}


def run(function, model, *inputs):
    """`function(model, *inputs)` and the model's state after it; optimizing the program would take longest."""
    structure, state = nnx.split(model)

    def pure(state, *inputs):
        copy = nnx.merge(structure, state, copy=True)
        return function(copy, *inputs), nnx.state(copy)

    return jax.jit(pure, compiler_options={"xla_backend_optimization_level": 0})(state, *inputs)


def parameters(work) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(work.args[0], nnx.Param)))


def test_the_command_line_knows_every_workload():
    assert sorted(workloads.__all__) == sorted(BUILT_IN) == sorted(SMALL)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_only_shapes_until_real_arrays_are_asked_for(name):
    work = getattr(workloads, name)()
    leaves = [leaf for argument in work.args for leaf in jax.tree.leaves(argument)]
    assert leaves
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert work.name == name


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("mlp", 16 * (1024 * 1024 + 1024) / 1e6),
        ("policy_mlp", 2 * (1024 * 1024 + 1024) / 1e6),
        ("resnet", 25.557),  # ResNet-50 as published
        ("gpt", (8192 * 512 + 512 * 512 + 6 * (12 * 512 * 512 + 13 * 512) + 2 * 512) / 1e6),
        ("scan_gpt", (8192 * 512 + 512 * 512 + 6 * (12 * 512 * 512 + 13 * 512) + 2 * 512) / 1e6),
    ],
)
def test_number_of_parameters(name, millions):
    assert parameters(getattr(workloads, name)()) / 1e6 == pytest.approx(millions, abs=5e-4)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_real_arguments_have_the_workloads_shapes_and_a_gradient_everywhere(name):
    work = getattr(workloads, name)(**SMALL[name])
    args, kwargs = work.materialize(seed=3)
    assert not kwargs
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(a)] for a in (args, work.args)]
    assert shapes[0] == shapes[1]
    (value, gradients), _ = run(nnx.value_and_grad(work.loss_fn), *args)
    assert jnp.isfinite(value)
    # The key bias of attention shifts all scores of a row alike: a gradient may vanish in part of an array, not in all.
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


def test_other_seed_other_arguments():
    work = workloads.mlp(**SMALL["mlp"])
    (first, x), _ = work.materialize(seed=0)
    (second, y), _ = work.materialize(seed=1)
    assert not jnp.allclose(x, y)
    assert not jnp.allclose(first.layers[0].kernel[...], second.layers[0].kernel[...])
    assert not jnp.allclose(first.layers[0].kernel[...], first.layers[1].kernel[...])


def test_the_scanned_gpt_computes_the_unrolled_one():
    unrolled, tokens = workloads.gpt(**SMALL["gpt"], dtype="float32").materialize()[0]
    scanned, _ = workloads.scan_gpt(**SMALL["scan_gpt"], dtype="float32").materialize()[0]
    blocks = [nnx.state(block) for block in unrolled.blocks]
    nnx.update(scanned.blocks, jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks))
    for part in ("embed", "position", "norm"):
        nnx.update(getattr(scanned, part), nnx.state(getattr(unrolled, part)))
    logits = [run(lambda model, x: model(x), model, tokens)[0] for model in (unrolled, scanned)]
    assert jnp.allclose(*logits, rtol=1e-5, atol=1e-5)


def test_a_gpt_does_not_see_the_future():
    model, tokens = workloads.gpt(**SMALL["gpt"], dtype="float32").materialize()[0]
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 32)
    before, after = (run(lambda model, x: model(x), model, x)[0] for x in (tokens, changed))
    assert jnp.array_equal(before[:, :5], after[:, :5])
    assert not jnp.allclose(before[:, 5:], after[:, 5:])


def test_dropout_and_batch_statistics_change_state():
    for name, kind in (("vit", nnx.RngCount), ("resnet", nnx.BatchStat)):
        work = getattr(workloads, name)(**SMALL[name])
        args, _ = work.materialize()
        _, after = run(work.loss_fn, *args)
        before, after = (nnx.filter_state(state, kind) for state in (nnx.state(args[0]), after))
        changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, after)
        assert jax.tree.leaves(changed)
        assert all(jax.tree.leaves(changed)), name


def test_dropout_of_vit_is_the_only_chance_in_it():
    for rate, equal in ((0.0, True), (0.5, False)):
        work = workloads.vit(**SMALL["vit"], dropout=rate)
        (model, *inputs), _ = work.materialize()
        first, state = run(work.loss_fn, model, *inputs)
        second, _ = run(work.loss_fn, nnx.merge(nnx.graphdef(model), state), *inputs)
        assert bool(first == second) is equal


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("mlp", {"blocks": 0}, "blocks=0 is not a positive"),
        ("mlp", {"features": 2.5}, r"features=2\.5"),
        ("mlp", {"activation": "tanh"}, "relu or gelu"),
        ("mlp", {"dtype": "int32"}, "floating-point"),
        ("mlp", {"dtype": "half of it"}, "floating-point"),
        ("policy_mlp", {"batch": True}, "batch=True"),
        ("gpt", {"features": 510}, "features=510 is not a multiple of heads=8"),
        ("scan_gpt", {"heads": 7}, "multiple of heads=7"),
        ("vit", {"image": 225}, "image=225 is not a multiple of patch=16"),
        ("vit", {"dropout": 1.0}, r"dropout=1\.0"),
        ("resnet", {"blocks": ()}, "no stage"),
        ("resnet", {"blocks": (3, -1)}, "-1"),
        ("unet", {"image": 30}, "multiple of halvings=4"),
    ],
)
def test_wrong_sizes_are_refused(name, sizes, message):
    with pytest.raises(InputError, match=message):
        getattr(workloads, name)(**sizes)
