"""Programs that differ are told apart, and checkpointing is no difference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from rematplan.program.structure import differences

TABLE = jnp.arange(4.0)


def base(x, y):
    return jnp.tanh(x @ y + TABLE) * 2.0, x.sum()


def same_program(x, y):
    @jax.jit
    def inside(a):
        return jnp.tanh(checkpoint_name(a, "a"))

    unused = jnp.exp(x)
    del unused
    return jax.checkpoint(lambda a, b: inside(a @ b + TABLE))(x, y) * 2.0, x.sum()


OTHERS = {
    "became": lambda x, y: (jnp.sin(x @ y + TABLE) * 2.0, x.sum()),
    "reads other values": lambda x, y: (jnp.tanh(y @ x + TABLE) * 2.0, x.sum()),
    "reads other values ": lambda x, y: (jnp.tanh(x @ y + TABLE) * 3.0, x.sum()),
    "reads other values  ": lambda x, y: (jnp.tanh(x @ y + TABLE[::-1].copy()) * 2.0, x.sum()),
    "parameter axes": lambda x, y: (jnp.tanh(x @ y + TABLE) * 2.0, x.sum(0).sum()),
    "operations became": lambda x, y: (jnp.tanh(x @ y + TABLE) * 2.0, -x.sum()),
    "output 1 is another value": lambda x, y: (jnp.tanh(x @ y + TABLE) * 2.0, x.sum() if False else y.sum()),
    "parameter": lambda x, y: (jnp.tanh(jax.lax.dot(x, y, precision="highest") + TABLE) * 2.0, x.sum()),
}


def jaxpr(function):
    return jax.make_jaxpr(function)(jnp.ones((4, 4)), jnp.ones((4, 4)))


def test_regions_names_calls_and_dead_code_are_no_difference():
    assert differences(jaxpr(base), jaxpr(same_program)) == ()
    assert differences(jaxpr(same_program), jaxpr(base)) == ()


@pytest.mark.parametrize("what", sorted(OTHERS))
def test_another_program_is_found(what):
    found = differences(jaxpr(base), jaxpr(OTHERS[what]))
    assert found, what
    assert differences(jaxpr(OTHERS[what]), jaxpr(OTHERS[what])) == ()


def test_the_first_difference_is_placed():
    (found,) = differences(jaxpr(base), jaxpr(OTHERS["became"]))
    assert found.startswith("operation 3, tanh (test_structure.py:")
    assert found.endswith("became sin")


def test_inside_loops():
    def loop(step):
        return jaxpr(lambda x, y: jax.lax.scan(lambda c, _: (step(c, y), None), x, None, length=2)[0])

    one = loop(lambda c, y: jnp.tanh(c @ y))
    assert differences(one, loop(jax.checkpoint(lambda c, y: checkpoint_name(jnp.tanh(c @ y), "t")))) == ()
    (found,) = differences(one, loop(lambda c, y: jnp.tanh(y @ c)))
    assert "scan" in found
    assert "reads other values" in found


def test_conversions_that_jax_folds_are_no_difference():
    def given(x, y):
        return jnp.where(x > 0, x, -1e9)  # the literal is converted inside of a call

    direct = jax.jit(given, inline=True)
    assert differences(jaxpr(given), jaxpr(direct)) == ()
    assert differences(jaxpr(given), jaxpr(lambda x, y: jnp.where(x > 0, x, -1e8))) != ()
