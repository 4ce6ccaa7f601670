"""A U-Net that predicts noise: long skips keep early activations alive until late, so no single value cuts the program.

Shapes in comments: B batch, S image size, F features; level i works on maps of S / 2^i with F * 2^i channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_multiple, check_sizes
from rematplan.workloads._layout import mesh_axes

_GROUPS = 8  # of group normalization


class ResidualBlock(nnx.Module):
    """Two normalized 3x3 convolutions beside a 1x1 convolution."""

    def __init__(self, channels: int, features: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = nnx.GroupNorm(channels, _GROUPS, dtype=dtype, rngs=rngs)
        self.conv1 = nnx.Conv(channels, features, (3, 3), dtype=dtype, rngs=rngs)
        self.norm2 = nnx.GroupNorm(features, _GROUPS, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(features, features, (3, 3), dtype=dtype, rngs=rngs)
        self.skip = nnx.Conv(channels, features, (1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv1(jax.nn.silu(self.norm1(x)))  # (B, S, S, features)
        y = self.conv2(jax.nn.silu(self.norm2(y)))
        return y + self.skip(x)


class UNet(nnx.Module):
    def __init__(self, *, levels: int, blocks: int, features: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        def block(channels: int, level: int) -> ResidualBlock:
            return ResidualBlock(channels, features * 2**level, dtype=dtype, rngs=rngs)

        self.stem = nnx.Conv(3, features, (3, 3), dtype=dtype, rngs=rngs)
        channels, kept = features, list[int]()  # kept: channels of the skips, in the order in which they arise
        down, up = list[ResidualBlock](), list[ResidualBlock]()
        for level in range(levels):
            for _ in range(blocks):
                down.append(block(channels, level))
                channels = features * 2**level
                kept.append(channels)
        self.middle = block(channels, levels - 1)
        for level in reversed(range(levels)):
            for _ in range(blocks):
                up.append(block(channels + kept.pop(), level))
                channels = features * 2**level
        self.down, self.up = nnx.List(down), nnx.List(up)
        self.norm = nnx.GroupNorm(features, _GROUPS, dtype=dtype, rngs=rngs)
        self.head = nnx.Conv(features, 3, (3, 3), dtype=dtype, rngs=rngs)
        self.blocks = blocks

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)  # (B, S, S, 3) -> (B, S, S, F)
        skips: list[jax.Array] = []
        for index, block in enumerate(self.down):
            if index and index % self.blocks == 0:  # a new level: half the size
                x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for index, block in enumerate(self.up):
            if index and index % self.blocks == 0:  # a level up: twice the size
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = block(jnp.concatenate([x, skips.pop()], axis=-1))
        return self.head(jax.nn.silu(self.norm(x)))  # (B, S, S, 3)


def loss(model: UNet, images: jax.Array, noise: jax.Array) -> jax.Array:
    """Mean square error of the predicted noise."""
    return jnp.mean((model(images + noise) - noise).astype(jnp.float32) ** 2)


def unet(
    *,
    levels: int = 3,
    blocks: int = 2,
    features: int = 64,
    image: int = 64,
    batch: int = 32,
    dtype: str = "bfloat16",
    mesh: str | Mapping[str, int] | None = None,
) -> Workload:
    """A U-Net of `levels` resolutions with `blocks` residual blocks on each way through a level."""
    check_sizes("unet", levels=levels, blocks=blocks, features=features, image=image, batch=batch)
    check_multiple("unet", image=image, halvings=2 ** (levels - 1))
    check_multiple("unet", features=features, groups=_GROUPS)
    kind = check_dtype("unet", dtype)
    axes = mesh_axes("unet", mesh, tensor_parallel=False)

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        of_images, of_noise = jax.random.split(key)
        shape = (batch, image, image, 3)
        return jax.random.normal(of_images, shape, kind), jax.random.normal(of_noise, shape, kind)

    return build(
        loss,
        name="unet",
        model=lambda rngs: UNet(levels=levels, blocks=blocks, features=features, dtype=kind, rngs=rngs),
        inputs=inputs,
        mesh=axes,
    )
