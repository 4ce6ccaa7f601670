"""Opening and checkpointing models that nobody here wrote."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan.program.trace import trace
from rematplan.workload import Workload

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def mamba():
    package = pytest.importorskip("mamba2_jax")
    config = package.Mamba2Config(
        vocab_size=64, hidden_size=16, state_size=8, head_dim=8, chunk_size=8, num_hidden_layers=2
    )

    def loss(model, tokens):
        return model(tokens, labels=tokens)["loss"]

    return loss, lambda: package.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), (jnp.arange(32).reshape(2, 16) % 64,)


def gcn():
    models = pytest.importorskip("jraphx.nn.models")
    edges = jnp.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])

    def loss(model, x, edges):
        return (model(x, edges) ** 2).mean()

    def make():
        return models.GCN(8, 16, 3, out_features=4, dropout_rate=0.5, norm="batch_norm", rngs=nnx.Rngs(0))

    return loss, make, (jnp.linspace(-1, 1, 48).reshape(6, 8), edges)


@pytest.mark.parametrize("make", [mamba, gcn])
def test_same_numbers_and_state_and_every_product_has_a_module(make):
    loss, build, args = make()

    def run(f):
        model = build()
        value = nnx.jit(nnx.value_and_grad(f))(model, *args)
        return jax.tree.leaves((value, nnx.state(model, nnx.Not(nnx.RngKey))))

    for found, expected in zip(run(rp.remat(loss)), run(loss), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    work = Workload(loss, nnx.eval_shape(build), *args)
    lifted = work.lift(scopes=True)
    graph = trace(lifted.pure, lifted.leaves, differentiated=work.differentiated).graph
    products = [op for op in graph.operations if op.primitive == "dot_general"]
    assert len(products) > 2
    # the root's own path is empty: Mamba2ForCausalLM multiplies by the tied embedding itself
    assert [op.module for op in products].count("") == (make is mamba)
    assert any(o.kind == "state" for o in lifted.outputs) == (make is gcn)
