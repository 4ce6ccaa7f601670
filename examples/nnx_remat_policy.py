"""`nnx.remat(policy=...)` on two layers: what a policy permits, and how to see what it did.

    python examples/nnx_remat_policy.py [TARGET ...]

Every statement below is asserted as well as printed. Runs on any machine with JAX. The last part asks compilers: those
of a TPU v5e and an H100 where they are installed (`pip install 'rematplan[tpu,cuda]'`; no chip needed), else that of
the CPU.
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
from rematplan.units import format_bytes, format_seconds

FEATURES, BATCH, SEED = 64, 32, 0
TOLERANCE = 1e-6  # relative and absolute, float32: recomputing may reassociate sums
COMPILERS = {"tpu-v5e": "libtpu", "gpu-h100": "jax_cuda13_plugin"}
DEFAULT_TARGETS = [target for target, package in COMPILERS.items() if importlib.util.find_spec(package)] or ["cpu"]
POLICY = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class MLP(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.l1 = nnx.Linear(features, features, rngs=rngs)
        self.l2 = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.l1(x))
        return jax.nn.relu(self.l2(x))


def plain(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.remat(policy=POLICY)
def with_policy(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.remat
def bare(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@rp.remat(policy=POLICY)
def rp_with_policy(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


@rp.remat
def rp_bare(model: MLP, x: jax.Array) -> jax.Array:
    return model(x)


Forward = Callable[[MLP, jax.Array], jax.Array]


def loss_of(forward: Forward) -> Callable[[MLP, jax.Array], jax.Array]:
    """A scalar, so that it can be differentiated."""

    def loss(model: MLP, x: jax.Array) -> jax.Array:
        return jnp.mean(forward(model, x) ** 2)

    return loss


def permitted(product: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> bool:
    """Whether the policy permits saving the result of a product."""
    (equation,) = jax.make_jaxpr(product)(*(jnp.zeros(shape) for shape in shapes)).eqns
    assert equation.primitive.name == "dot_general"
    return bool(POLICY(equation.primitive, *(v.aval for v in equation.invars), **equation.params))


def what_the_policy_permits() -> None:
    """A rule about the structure of the product, not about sizes."""
    B, N, D, F = 4, 3, 8, 16
    assert permitted(jnp.matmul, (D,), (D, F))
    assert permitted(jnp.matmul, (B, D), (D, F))
    assert permitted(jnp.matmul, (64 * B, D), (D, 64 * F))  # however large
    assert permitted(jnp.matmul, (B, N, D), (D, F))  # leading axes that only the left side has
    assert not permitted(jnp.matmul, (B, N, D), (B, D, F))  # B is paired
    assert not permitted(jnp.matmul, (2, 1, 1), (2, 1, 1))  # however small
    print("may be saved: (D)@(D,F), (B,D)@(D,F), (B,N,D)@(D,F); not: (B,N,D)@(B,D,F), which pairs B")


def dots(forward: Forward) -> int:
    """Matrix products in the differentiated program."""
    graph, state = nnx.split(MLP(FEATURES, rngs=nnx.Rngs(SEED)))

    def loss(state: nnx.State, x: jax.Array) -> jax.Array:
        return loss_of(forward)(nnx.merge(graph, state, copy=True), x)

    return str(jax.make_jaxpr(jax.value_and_grad(loss))(state, jnp.zeros((BATCH, FEATURES)))).count("dot_general")


def permitting_is_not_forcing() -> None:
    """A permitted product is saved only if the backward pass has a use for it."""

    @nnx.remat(policy=POLICY)
    def linear(model: MLP, x: jax.Array) -> jax.Array:
        return model.l2(model.l1(x))  # no activation: the derivative needs no product of its own

    model, x = MLP(FEATURES, rngs=nnx.Rngs(SEED)), jnp.zeros((BATCH, FEATURES))

    def total(model: MLP, x: jax.Array) -> jax.Array:
        return jnp.sum(linear(model, x))

    def saved(loss: Callable[[MLP, jax.Array], jax.Array]) -> int:
        found = rp.inspect(rp.Workload(loss, model, x))
        return sum(residual.operation == "dot_general" for residual in found.residuals)

    assert saved(loss_of(with_policy)) == 2  # both, for what relu masks
    assert saved(total) == 1  # l1's, from which l2's input is rebuilt; l2's is permitted too, and of no use
    print("permitted are two products each time; relu's mask makes both worth saving, without relu one is")


def the_bare_form_recomputes() -> None:
    # forward 2; backward 3: both kernels and the input of l2 (nothing differentiates x)
    assert dots(plain) == 5
    assert dots(with_policy) == dots(rp_with_policy) == 5
    assert dots(bare) == dots(rp_bare) == 7
    print("matrix products in a step: 5 with the policy, as without remat; 7 with the bare form")


def equal_outputs_prove_nothing() -> None:
    model = MLP(FEATURES, rngs=nnx.Rngs(SEED))
    x = jax.random.normal(jax.random.key(1), (BATCH, FEATURES))
    expected = nnx.value_and_grad(loss_of(plain))(model, x)
    kept = {}
    for forward in (with_policy, bare, rp_with_policy, rp_bare):
        np.testing.assert_allclose(forward(model, x), plain(model, x), rtol=TOLERANCE, atol=TOLERANCE)
        found = nnx.value_and_grad(loss_of(forward))(model, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), found, expected)
        kept[forward] = rp.inspect(rp.Workload(loss_of(forward), model, x)).total_bytes
    assert kept[with_policy] == kept[rp_with_policy] == 3 * x.nbytes  # two products, and the output for the square
    assert kept[bare] == kept[rp_bare] == x.nbytes
    print(f"outputs and gradients are equal within {TOLERANCE:g} for all of them, so they tell nothing; residuals do:")
    print(f"  policy {format_bytes(kept[with_policy])}, bare {format_bytes(kept[bare])}")


def on_chips(targets: list[str]) -> None:
    """Neither form is always better: the compiled programs say what each costs."""
    features, batch = 2048, 32768
    model = nnx.eval_shape(lambda: MLP(features, rngs=nnx.Rngs(SEED)))  # shapes only
    x = jax.ShapeDtypeStruct((batch, features), jnp.float32)
    print(f"\ntwo layers of {features}, batch {batch}")
    for target in targets:
        found = {
            forward: rp.measure(rp.Workload(loss_of(forward), model, x), target=target)
            for forward in (plain, with_policy, bare, rp_with_policy, rp_bare)
        }
        for forward in (plain, with_policy, bare):
            cost = found[forward]
            assert cost.seconds is not None
            print(
                f"  {target:8} {forward.__name__:11} needs {format_bytes(cost.required_bytes):>8}, "
                f"{format_seconds(cost.seconds):>8} ({cost.sources['seconds']})"
            )
        policy, recomputing = found[with_policy], found[bare]
        assert policy.seconds is not None and recomputing.seconds is not None
        assert policy.seconds < recomputing.seconds
        assert policy.required_bytes > recomputing.required_bytes
        for ours, theirs in ((found[rp_with_policy], policy), (found[rp_bare], recomputing)):
            assert ours.flops == theirs.flops
            assert ours.required_bytes <= theirs.required_bytes  # nnx.remat hands the parameters out again
    print("the policy buys time with memory; whether that is a bargain depends on the budget")


def main(*targets: str) -> None:
    what_the_policy_permits()
    the_bare_form_recomputes()
    permitting_is_not_forcing()
    equal_outputs_prove_nothing()
    on_chips(list(targets) or DEFAULT_TARGETS)


if __name__ == "__main__":
    main(*sys.argv[1:])
