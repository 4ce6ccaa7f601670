"""A residual network of bottlenecks with batch normalization: the model whose state changes in the forward pass.

Shapes in comments: B batch, S image size, F stem features; stage i works on maps of S / (4 * 2^i) with F * 2^i inner
and 4 * F * 2^i outer channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.errors import InputError
from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_sizes, cross_entropy
from rematplan.workloads._layout import mesh_axes

_EXPANSION = 4  # outer channels of a bottleneck by inner channels, as in ResNet-50


class Bottleneck(nnx.Module):
    """1x1 down, 3x3, 1x1 up, each with batch normalization, beside an identity or a projection."""

    def __init__(self, channels: int, inner: int, *, stride: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        outer = _EXPANSION * inner
        self.conv1 = nnx.Conv(channels, inner, (1, 1), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm1 = nnx.BatchNorm(inner, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(inner, inner, (3, 3), strides=stride, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.BatchNorm(inner, dtype=dtype, rngs=rngs)
        self.conv3 = nnx.Conv(inner, outer, (1, 1), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm3 = nnx.BatchNorm(outer, dtype=dtype, rngs=rngs)
        self.projects = stride != 1 or channels != outer
        if self.projects:
            self.project = nnx.Conv(channels, outer, (1, 1), strides=stride, use_bias=False, dtype=dtype, rngs=rngs)
            self.project_norm = nnx.BatchNorm(outer, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = self.project_norm(self.project(x)) if self.projects else x
        x = jax.nn.relu(self.norm1(self.conv1(x)))  # (B, S, S, inner)
        x = jax.nn.relu(self.norm2(self.conv2(x)))  # (B, S / stride, S / stride, inner)
        x = self.norm3(self.conv3(x))  # (B, S / stride, S / stride, outer)
        return jax.nn.relu(x + skip)


class ResNet(nnx.Module):
    def __init__(self, *, stages: tuple[int, ...], features: int, classes: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, features, (7, 7), strides=2, use_bias=False, dtype=dtype, rngs=rngs)
        self.stem_norm = nnx.BatchNorm(features, dtype=dtype, rngs=rngs)
        channels, blocks = features, list[Bottleneck]()
        for stage, count in enumerate(stages):
            inner = features * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1  # each later stage halves the map
                blocks.append(Bottleneck(channels, inner, stride=stride, dtype=dtype, rngs=rngs))
                channels = _EXPANSION * inner
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem_norm(self.stem(images)))  # (B, S, S, 3) -> (B, S/2, S/2, F)
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")  # (B, S/4, S/4, F)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))  # (B, channels) -> (B, classes)


def loss(model: ResNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return cross_entropy(model(images), labels)


def resnet(
    *,
    blocks: int | tuple[int, ...] = (3, 4, 6, 3),
    features: int = 64,
    image: int = 224,
    batch: int = 32,
    classes: int = 1000,
    dtype: str = "bfloat16",
    mesh: str | Mapping[str, int] | None = None,
) -> Workload:
    """ResNet-50 by default; `blocks`: bottlenecks in each stage, or one number for each of four stages."""
    stages = (blocks,) * 4 if isinstance(blocks, int) else tuple(blocks)
    if not stages:
        raise InputError("resnet: blocks=() has no stage; give the number of bottlenecks in each, as in (3, 4, 6, 3).")
    for count in stages:
        check_sizes("resnet", blocks=count)
    check_sizes("resnet", features=features, image=image, batch=batch, classes=classes)
    kind = check_dtype("resnet", dtype)
    axes = mesh_axes("resnet", mesh, tensor_parallel=False)

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        of_images, of_labels = jax.random.split(key)
        images = jax.random.normal(of_images, (batch, image, image, 3), kind)
        return images, jax.random.randint(of_labels, (batch,), 0, classes)

    return build(
        loss,
        name="resnet",
        model=lambda rngs: ResNet(stages=stages, features=features, classes=classes, dtype=kind, rngs=rngs),
        inputs=inputs,
        mesh=axes,
    )
