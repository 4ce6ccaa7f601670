"""The GPT of `_gpt.py` as large NNX code writes it: one stacked block, created by vmap, applied by scan.

Shapes in comments: B batch, T length, D features, V vocabulary, N blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from rematplan.workload import Workload
from rematplan.workloads._build import build, check_dtype, check_multiple, check_sizes
from rematplan.workloads._gpt import Block, next_token_loss
from rematplan.workloads._layout import laid_out, mesh_axes


class ScanGPT(nnx.Module):
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
        @nnx.split_rngs(splits=blocks)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(features, heads, dtype=dtype, rngs=rngs)

        self.embed = nnx.Embed(vocabulary, features, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(length, features, dtype=dtype, rngs=rngs)
        self.blocks = stacked(rngs)  # every parameter has a leading axis of N
        self.norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, block: Block) -> jax.Array:
            return block(x)  # (B, T, D)

        x = laid_out(self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])), "batch")  # (B, T, D)
        x = through(x, self.blocks)
        return laid_out(self.embed.attend(self.norm(x)), "batch", None, "model")  # (B, T, V)


def scan_gpt(
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
    """A GPT whose blocks are one `nnx.scan`."""
    check_sizes(
        "scan_gpt", blocks=blocks, features=features, heads=heads, length=length, batch=batch, vocabulary=vocabulary
    )
    check_multiple("scan_gpt", features=features, heads=heads)
    kind = check_dtype("scan_gpt", dtype)
    axes = mesh_axes("scan_gpt", mesh, tensor_parallel=True)
    return build(
        next_token_loss,
        name="scan_gpt",
        model=lambda rngs: ScanGPT(
            blocks=blocks, features=features, heads=heads, length=length, vocabulary=vocabulary, dtype=kind, rngs=rngs
        ),
        inputs=lambda key: (jax.random.randint(key, (batch, length), 0, vocabulary),),
        mesh=axes,
    )
