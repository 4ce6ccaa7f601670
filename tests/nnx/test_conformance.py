"""One suite for every way to checkpoint a function: outputs, gradients and the module's state afterwards agree.

Each case is run undecorated and in every other way, twice in a row, since state that went wrong the first time shows in
the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rematplan as rp
from rematplan._plan import Plan
from rematplan.lift import lift
from rematplan.naming import describe
from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import trace
from tests.nnx.cases import CASES, Case

Way = Callable[..., Callable[..., Any]]


def _planned(f: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`rp.remat` with a plan that puts the whole function in one region and saves its first matrix product."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        opened = lift(f, args, kwargs, scopes=True, **static).abstract()
        traced = trace(opened.pure, opened.leaves, differentiated=())
        dots = [op.outputs[0] for op in traced.graph.operations if op.primitive == "dot_general"]
        whole = Configuration((Region(0, len(traced.equations), frozenset(dots[:1])),))
        regions, loops = describe(whole, traced.graph, {})
        return rp.remat(f, plan=Plan(regions, loops, fingerprint=traced.graph.fingerprint), **static)(*args, **kwargs)

    return call


def _undecorated(f: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    return f


WAYS: dict[str, Way] = {
    "undecorated": _undecorated,
    "nnx.remat": nnx.remat,
    "rp.remat": rp.remat,
    "rp.remat policy": functools.partial(rp.remat, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "rp.remat plan": _planned,
}


def _leaves(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """Structure and numbers of modules and arrays alike."""
    graphdef, state = nnx.split(tree)
    arrays = jax.tree.leaves(state)
    return graphdef, [np.asarray(jax.random.key_data(a)) if _is_key(a) else np.asarray(a) for a in arrays]


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(a)) if _is_key(a) else np.asarray(a) for a in jax.tree.leaves(tree)]


def _observe(subject: Case, way: Way, transform: Callable[..., Any]) -> tuple[Any, list[np.ndarray]]:
    """Structure and numbers of two rounds: results, gradients, and every argument afterwards."""
    model, args = subject.model(nnx.Rngs(0)), subject.args()
    loss = way(subject.loss, **subject.static)
    if subject.static or subject.kwargs:  # nnx.grad itself takes no static and no keyword-only arguments
        inner, fixed = loss, args[1:] if subject.static else ()
        args = args[:1] if subject.static else args
        loss = lambda model, *args: inner(model, *args, *fixed, **subject.kwargs)
    differentiate = nnx.value_and_grad(loss, has_aux=subject.has_aux)
    graphdefs, numbers = [], []
    for _ in range(2):
        result = transform(differentiate)(model, *args)
        graphdef, leaves = _leaves((model, args))
        graphdefs.append(graphdef)
        numbers += [*_arrays(result), *leaves]
    return graphdefs, numbers


# Where the slower forms, which share all but the last step with the bare one, are run too.
STATEFUL = ("batch_statistics", "new_variables_and_static_attributes", "dropout_from_own_stream", "tied_weights")


def _runs(name: str, way: str) -> bool:
    return way != "rp.remat policy" or name in STATEFUL


@functools.cache
def _reference(name: str) -> tuple[Any, list[np.ndarray]]:
    return _observe(CASES[name], _undecorated, lambda f: f)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize(("name", "way"), [(n, w) for n in CASES for w in WAYS if w != "undecorated" and _runs(n, w)])
def test_agrees_with_the_undecorated_function(name, way):
    subject = CASES[name]
    graphdefs, numbers = _reference(name)
    if way == "nnx.remat" and name == "keyword_arguments" and getattr(jax.config, "jax_remat3", False):
        pytest.skip("nnx.remat loses keyword arguments with JAX_REMAT3=1 (flax 0.12.8)")
    if way == "nnx.remat" and subject.nnx_remat:
        with pytest.raises(subject.nnx_remat):
            _observe(subject, WAYS[way], lambda f: f)
        return
    found_graphdefs, found = _observe(subject, WAYS[way], lambda f: f)
    assert len(found) == len(numbers)
    for a, b in zip(found, numbers, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=2e-5, atol=1e-6)
    assert found_graphdefs == graphdefs


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("name", [*STATEFUL, "sown_values", "lists_dicts_and_static_data", "structured_outputs"])
def test_a_plan_agrees_under_nnx_jit(name):
    graphdefs, numbers = _reference(name)
    found_graphdefs, found = _observe(CASES[name], WAYS["rp.remat plan"], nnx.jit)
    assert len(found) == len(numbers)
    for a, b in zip(found, numbers, strict=True):
        tolerance = 2e-2 if b.dtype == jnp.bfloat16 else 2e-5  # the compiler keeps more bits than single operations do
        np.testing.assert_allclose(
            np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=tolerance, atol=1e-5
        )
    assert found_graphdefs == graphdefs
