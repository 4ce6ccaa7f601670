"""Workloads of published models that nobody here wrote, made as a user would make them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jraphx.nn.models import GCN
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

import rematplan as rp


def mamba(*, layers: int = 4, hidden: int = 128, length: int = 128, batch: int = 4) -> rp.Workload:
    """Mamba2: a state-space language model; each layer scans over chunks of the sequence."""
    config = Mamba2Config(
        vocab_size=512, hidden_size=hidden, state_size=16, head_dim=32, chunk_size=32, num_hidden_layers=layers
    )

    def loss(model: Mamba2ForCausalLM, tokens: jax.Array) -> jax.Array:
        return model(input_ids=tokens, labels=tokens)["loss"]

    def init(seed: int) -> tuple[Mamba2ForCausalLM, jax.Array]:
        tokens = jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab_size)
        return Mamba2ForCausalLM(config, rngs=nnx.Rngs(seed)), tokens

    return rp.Workload(loss, *nnx.eval_shape(lambda: init(0)), init=init, name="mamba")


def gcn(*, layers: int = 4, features: int = 64, nodes: int = 512, edges: int = 4096) -> rp.Workload:
    """A graph convolutional network with dropout: gathers and scatters over edges."""

    def loss(model: GCN, x: jax.Array, edge_index: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x, edge_index), labels).mean()

    def init(seed: int) -> tuple[GCN, jax.Array, jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 3)
        model = GCN(
            features, features, layers, out_features=7, dropout_rate=0.5, norm="layer_norm", rngs=nnx.Rngs(seed)
        )
        x = jax.random.normal(keys[0], (nodes, features), jnp.float32)
        edge_index = jax.random.randint(keys[1], (2, edges), 0, nodes)
        return model, x, edge_index, jax.random.randint(keys[2], (nodes,), 0, 7)

    return rp.Workload(loss, *nnx.eval_shape(lambda: init(0)), init=init, name="gcn")
