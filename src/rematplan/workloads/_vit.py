"""A vision transformer with dropout: the model on which recomputed random bits have to be the same bits.

Shapes in comments: B batch, S image size, P patch size, T = (S / P)^2 patches, D features, H heads, K = D / H.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.errors import InputError
from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_multiple, check_sizes, cross_entropy
from rematplan.workloads._layout import laid_out, mesh_axes, splits_features


class Attention(nnx.Module):
    def __init__(self, features: int, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(features, 3 * features, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(features, features, dtype=dtype, rngs=rngs)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, D = x.shape
        H, K = self.heads, D // self.heads
        if splits_features():  # a head's three parts side by side, so that heads go to devices whole
            q, k, v = jnp.split(self.qkv(x).reshape(B, T, H, 3 * K), 3, axis=3)  # (B, T, H, K) each
        else:
            q, k, v = jnp.split(self.qkv(x).reshape(B, T, 3 * H, K), 3, axis=2)
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / jnp.sqrt(K).astype(x.dtype)  # (B, H, T, T)
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        context = jnp.einsum("bhqs,bshk->bqhk", weights, v)  # (B, T, H, K)
        return self.out(context.reshape(B, T, D))


class FeedForward(nnx.Module):
    def __init__(self, features: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))  # (B, T, D) -> (B, T, 4D) -> (B, T, D)


class Block(nnx.Module):
    def __init__(self, features: int, heads: int, *, dropout: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.attn = Attention(features, heads, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(features, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attn(self.norm1(x)))  # (B, T, D)
        return laid_out(x + self.dropout(self.mlp(self.norm2(x))), "batch")


class ViT(nnx.Module):
    def __init__(
        self,
        *,
        blocks: int,
        features: int,
        heads: int,
        image: int,
        patch: int,
        classes: int,
        dropout: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        window = (patch, patch)
        self.embed = nnx.Conv(3, features, window, strides=window, padding="VALID", dtype=dtype, rngs=rngs)
        self.position = nnx.Embed((image // patch) ** 2, features, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, dropout=dropout, dtype=dtype, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed(images)  # (B, S, S, 3) -> (B, S/P, S/P, D)
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # (B, T, D)
        x = laid_out(x + self.position.embedding[...].astype(x.dtype), "batch")
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))  # (B, D) -> (B, classes)


def loss(model: ViT, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return cross_entropy(model(images), labels)


def vit(
    *,
    blocks: int = 6,
    features: int = 384,
    heads: int = 6,
    image: int = 224,
    patch: int = 16,
    batch: int = 64,
    classes: int = 1000,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
    mesh: str | Mapping[str, int] | None = None,
) -> Workload:
    """A ViT of the small width with dropout on every branch."""
    check_sizes(
        "vit",
        blocks=blocks,
        features=features,
        heads=heads,
        image=image,
        patch=patch,
        batch=batch,
        classes=classes,
    )
    check_multiple("vit", features=features, heads=heads)
    check_multiple("vit", image=image, patch=patch)
    if not 0 <= dropout < 1:
        raise InputError(f"vit: dropout={dropout!r} is not a rate from 0 up to, but not including, 1.")
    kind = check_dtype("vit", dtype)
    axes = mesh_axes("vit", mesh, tensor_parallel=True)

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        of_images, of_labels = jax.random.split(key)
        images = jax.random.normal(of_images, (batch, image, image, 3), kind)
        return images, jax.random.randint(of_labels, (batch,), 0, classes)

    return build(
        loss,
        name="vit",
        model=lambda rngs: ViT(
            blocks=blocks,
            features=features,
            heads=heads,
            image=image,
            patch=patch,
            classes=classes,
            dropout=dropout,
            dtype=kind,
            rngs=rngs,
        ),
        inputs=inputs,
        mesh=axes,
    )
