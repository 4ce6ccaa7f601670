"""A decoder as large language models have it: RMS norms, rotary positions, grouped queries, gated feed-forward, untied head.

The default sizes are those of a 70-billion-parameter model, for meshes of hundreds of devices. Its blocks are one scan over
stacked parameters or, with `scan=False`, written out.

Shapes in comments: B batch, T length, D features, F hidden, H heads, G key and value heads, K = D / H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.errors import InputError
from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_multiple, check_sizes
from rematplan.workloads._gpt import next_token_loss
from rematplan.workloads._layout import laid_out, mesh_axes

_ROTARY_BASE = 500_000.0
_MASKED = -1e9  # score of a position in the future: exp of it is 0 in float32


class Attention(nnx.Module):
    def __init__(self, features: int, heads: int, kv_heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        def linear(outputs: int) -> nnx.Linear:
            return nnx.Linear(features, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        head = features // heads
        self.q, self.k, self.v = linear(features), linear(kv_heads * head), linear(kv_heads * head)
        self.out = linear(features)
        self.heads, self.kv_heads = heads, kv_heads

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, D = x.shape
        H, G, K = self.heads, self.kv_heads, D // self.heads
        q = rotated(self.q(x).reshape(B, T, G, H // G, K))  # (B, T, G, H/G, K)
        k = rotated(self.k(x).reshape(B, T, G, K))  # (B, T, G, K)
        v = self.v(x).reshape(B, T, G, K)
        scores = jnp.einsum("bqghk,bsgk->bghqs", q, k) / jnp.sqrt(K).astype(x.dtype)  # (B, G, H/G, T, T)
        past = jnp.tril(jnp.ones((T, T), bool))
        scores = jnp.where(past, scores.astype(jnp.float32), _MASKED)  # softmax in float32
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        context = jnp.einsum("bghqs,bsgk->bqghk", weights, v)  # (B, T, G, H/G, K)
        return self.out(context.reshape(B, T, D))


class FeedForward(nnx.Module):
    def __init__(self, features: int, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = nnx.Linear(features, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(features, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, features, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))  # (B, T, D) -> (B, T, F) -> (B, T, D)


class Block(nnx.Module):
    def __init__(self, features: int, hidden: int, heads: int, kv_heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.attn = Attention(features, heads, kv_heads, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(features, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = laid_out(x + self.attn(self.norm1(x)), "batch")  # (B, T, D)
        return laid_out(x + self.mlp(self.norm2(x)), "batch")


class Decoder(nnx.Module):
    def __init__(
        self,
        *,
        blocks: int,
        features: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        vocabulary: int,
        scan: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        def block(rngs: nnx.Rngs) -> Block:
            return Block(features, hidden, heads, kv_heads, dtype=dtype, rngs=rngs)

        self.embed = nnx.Embed(vocabulary, features, dtype=dtype, rngs=rngs)
        self.blocks: Any  # one block whose parameters have a leading axis, or a list of blocks
        if scan:
            self.blocks = nnx.split_rngs(splits=blocks)(nnx.vmap(block, in_axes=(0,), out_axes=0))(rngs)
        else:
            self.blocks = nnx.List([block(rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)
        self.scan = scan

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, block: Block) -> jax.Array:
            return block(x)  # (B, T, D)

        x = laid_out(self.embed(tokens), "batch")  # (B, T, D)
        if self.scan:
            x = through(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return laid_out(self.head(self.norm(x)), "batch", None, "model")  # (B, T, V)


def rotated(x: jax.Array) -> jax.Array:
    """Queries or keys (B, T, ..., K), turned by their position, computed in float32."""
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)  # (K/2)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies  # (T, K/2)
    angles = angles.reshape(1, x.shape[1], *(1,) * (x.ndim - 3), half)
    one, two = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1).astype(x.dtype)


def decoder(
    *,
    blocks: int = 80,
    features: int = 8192,
    hidden: int = 28672,
    heads: int = 64,
    kv_heads: int = 8,
    length: int = 4096,
    batch: int = 256,
    vocabulary: int = 128256,
    scan: bool = True,
    dtype: str = "bfloat16",
    mesh: str | Mapping[str, int] | None = None,
) -> Workload:
    """A decoder of 70-billion-parameter shape."""
    sizes = {"features": features, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    check_sizes("decoder", blocks=blocks, length=length, batch=batch, vocabulary=vocabulary, **sizes)
    check_multiple("decoder", features=features, heads=2 * heads)  # rotary positions turn pairs
    check_multiple("decoder", heads=heads, kv_heads=kv_heads)
    if not isinstance(scan, bool):
        raise InputError(f"decoder: scan={scan!r} is neither true nor false.")
    kind = check_dtype("decoder", dtype)
    axes = mesh_axes("decoder", mesh, tensor_parallel=True)
    return build(
        next_token_loss,
        name="decoder",
        model=lambda rngs: Decoder(
            blocks=blocks,
            features=features,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            vocabulary=vocabulary,
            scan=scan,
            dtype=kind,
            rngs=rngs,
        ),
        inputs=lambda key: (jax.random.randint(key, (batch, length), 0, vocabulary),),
        mesh=axes,
    )
