"""Run by `test_sharded.py` in a process with eight virtual CPU devices: every form of remat on sharded arguments and under
`shard_map` gives what the undecorated function gives, with the same shardings."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rematplan as rp
from rematplan._plan import Plan
from rematplan.naming import describe
from rematplan.program.configuration import Configuration, Region
from rematplan.program.loss import traced_loss

F = 16
REMAT3 = bool(getattr(jax.config, "jax_remat3", False))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(F, 4 * F, rngs=rngs)
        self.down = nnx.Linear(4 * F, F, rngs=rngs)
        self.norm = nnx.BatchNorm(F, momentum=0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.norm(self.down(jnp.sin(self.up(x))))


def loss(model: Model, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def planned() -> Plan:
    """The model in one region that saves its first product."""
    work = rp.Workload(loss, nnx.eval_shape(lambda: Model(nnx.Rngs(0))), jax.ShapeDtypeStruct((32, F), jnp.float32))
    traced = traced_loss(work)
    dots = [op.outputs[0] for op in traced.graph.operations if op.primitive == "dot_general"]
    configuration = Configuration((Region(0, len(traced.equations), frozenset(dots[:1])),))
    regions, loops = describe(configuration, traced.graph, {})
    return Plan(regions, loops, fingerprint=traced.graph.fingerprint)


WAYS = {
    "undecorated": loss,
    "bare": rp.remat(loss),
    "policy": rp.remat(loss, policy=jax.checkpoint_policies.dots_saveable),
    "plan": rp.remat(loss, plan=planned()),
}
# data parallel, tensor parallel, both
SPECS = {
    "data": (P("a"), P(), P()),
    "tensor": (P(), P(None, "b"), P("b")),
    "both": (P("a"), P(None, "b"), P("b")),
}


def sharded(mesh: jax.sharding.Mesh, specs: tuple[P, P, P]) -> tuple[Model, jax.Array]:
    """A model and a batch laid out over the devices."""
    x_spec, up, down = specs
    model = Model(nnx.Rngs(0))
    model.up.kernel[...] = jax.device_put(model.up.kernel[...], NamedSharding(mesh, up))
    model.down.kernel[...] = jax.device_put(model.down.kernel[...], NamedSharding(mesh, down))
    x = jnp.linspace(-1, 1, 32 * F).reshape(32, F)
    return model, jax.device_put(x, NamedSharding(mesh, x_spec))


def observe(f, mesh, specs):
    """Two training steps with donated state: losses, parameters and statistics, and how they are laid out."""
    model, x = sharded(mesh, specs)
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(f)(model, x)
        optimizer.update(model, gradients)
        return value

    losses = [step(model, optimizer, x) for _ in range(2)]
    leaves = jax.tree.leaves(nnx.state(model))
    return [np.asarray(a) for a in (*losses, *leaves)], [a.sharding for a in leaves]


def under_shard_map(remat):
    """A collective inside and outside of the region, and its gradient."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    inside = remat(lambda w, x: jnp.sin(jax.lax.psum(x @ w, "a")).sum())

    def f(w, x):
        mapped = jax.shard_map(
            lambda w, x: jax.lax.pmean(inside(w, x), "a"), mesh=mesh, in_specs=(P(), P("a")), out_specs=P()
        )
        return mapped(w, x)

    w, x = jnp.linspace(-1, 1, F * F).reshape(F, F), jnp.linspace(-1, 1, 32 * F).reshape(32, F)
    return jax.tree.leaves(jax.jit(jax.value_and_grad(f))(w, x))


def main() -> None:
    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    for kind, specs in SPECS.items():
        expected, layout = observe(loss, mesh, specs)
        for way, f in WAYS.items():
            found, placed = observe(f, mesh, specs)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=f"{kind}, {way}")
            assert all(a.is_equivalent_to(b, 2) for a, b in zip(placed, layout, strict=True)), (kind, way)
            sys.stdout.write(f"equal: {kind} {way}\n")
    if REMAT3:
        return  # jax.checkpoint itself fails under shard_map there (0.10.2)
    expected = under_shard_map(lambda f: f)
    for remat in (rp.remat, rp.remat(policy=jax.checkpoint_policies.dots_saveable)):
        for a, b in zip(under_shard_map(remat), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        sys.stdout.write("equal: shard_map\n")


if __name__ == "__main__":
    main()
