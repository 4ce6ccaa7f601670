"""A decoder-only transformer with tied embeddings: float32 parameters, bfloat16 compute.

Shapes in comments: B batch, T length, D features, H heads, K = D / H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_multiple, check_sizes, cross_entropy
from rematplan.workloads._layout import laid_out, mesh_axes, splits_features

_MASKED = -1e9  # score of a position in the future: exp of it is 0 in float32


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
        past = jnp.tril(jnp.ones((T, T), bool))
        scores = jnp.where(past, scores.astype(jnp.float32), _MASKED)  # softmax in float32
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        context = jnp.einsum("bhqs,bshk->bqhk", weights, v)  # (B, T, H, K)
        return self.out(context.reshape(B, T, D))


class FeedForward(nnx.Module):
    def __init__(self, features: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))  # (B, T, D) -> (B, T, 4D) -> (B, T, D)


class Block(nnx.Module):
    def __init__(self, features: int, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.attn = Attention(features, heads, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(features, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))  # (B, T, D)
        return laid_out(x + self.mlp(self.norm2(x)), "batch")


class GPT(nnx.Module):
    def __init__(
        self,
        *,
        blocks: int,
        features: int,
        heads: int,
        length: int,
        vocabulary: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(vocabulary, features, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(length, features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, dtype=dtype, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = laid_out(self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])), "batch")  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return laid_out(self.embed.attend(self.norm(x)), "batch", None, "model")  # (B, T, V)


def next_token_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next token; the last position predicts the first token, so that lengths stay equal."""
    logits = model(tokens)  # (B, T, V)
    targets = jnp.roll(tokens, -1, axis=1)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def gpt(
    *,
    blocks: int = 6,
    features: int = 512,
    heads: int = 8,
    length: int = 512,
    batch: int = 16,
    vocabulary: int = 8192,
    dtype: str = "bfloat16",
    mesh: str | Mapping[str, int] | None = None,
) -> Workload:
    """A GPT with `blocks` unrolled blocks."""
    check_sizes("gpt", blocks=blocks, features=features, heads=heads, length=length, batch=batch, vocabulary=vocabulary)
    check_multiple("gpt", features=features, heads=heads)
    kind = check_dtype("gpt", dtype)
    axes = mesh_axes("gpt", mesh, tensor_parallel=True)
    return build(
        next_token_loss,
        name="gpt",
        model=lambda rngs: GPT(
            blocks=blocks, features=features, heads=heads, length=length, vocabulary=vocabulary, dtype=kind, rngs=rngs
        ),
        inputs=lambda key: (jax.random.randint(key, (batch, length), 0, vocabulary),),
        mesh=axes,
    )
