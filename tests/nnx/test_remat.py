"""`rp.remat` as a decorator: forms, what it keeps, what it refuses."""

from __future__ import annotations

import functools
import gc
import re
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import rematplan as rp
from rematplan import _jax_private, apply
from rematplan._plan import Plan
from rematplan._remat import KEPT_TRACES, CapturedModuleWarning, PlanMismatchWarning
from rematplan.captured import captured
from rematplan.errors import InputError, PlanMismatch
from rematplan.naming import describe
from rematplan.program.configuration import Configuration, Region
from rematplan.program.trace import trace
from rematplan.workload import Workload

F = 4
X = jnp.ones((2, F))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(F, F, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    @rp.remat
    def __call__(self, x):
        """Adds one."""
        self.count[...] += 1
        return jnp.sin(jnp.sin(self.linear(x)))

    @rp.remat(policy=jax.checkpoint_policies.dots_saveable, static_argnums=(2,))
    def repeated(self, x, times):
        for _ in range(times):
            x = self(x)
        return x


def count_of(function, *args, primitive):
    """How often a primitive stands in the program, nested programs included."""

    def walk(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            total += eqn.primitive.name == primitive
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    total += walk(getattr(inner, "jaxpr", inner))
        return total

    return walk(jax.make_jaxpr(function)(*args).jaxpr)


def test_methods_in_a_class():
    model = Layer(nnx.Rngs(0))
    expected = jnp.sin(jnp.sin(model.linear(X)))
    np.testing.assert_allclose(model(X), expected, rtol=1e-6)
    model.repeated(X, 3)
    assert model.count[...] == 4
    grads = nnx.grad(lambda model, x: model(x).sum())(model, X)
    assert grads.linear.kernel[...].shape == (F, F)
    assert model.count[...] == 5
    assert Layer.__call__.__name__ == "__call__"
    assert Layer.__call__.__doc__ == "Adds one."


def test_other_callables():
    def f(model, x, scale=1.0):
        return model.linear(x).sum() * scale

    model = Layer(nnx.Rngs(0))
    expected = f(model, X, 2.0)
    assert rp.remat(functools.partial(f, scale=2.0))(model, X) == expected
    assert rp.remat(functools.partial(f, model))(X, scale=2.0) == expected
    np.testing.assert_allclose(rp.remat(model)(X), model(X))
    np.testing.assert_allclose(rp.remat(model.repeated)(X, 2), model(model(X)), rtol=1e-6)
    assert model.count[...] == 1 + 1 + 2 + 2
    assert rp.remat(jnp.sin)(0.0) == 0.0


def test_the_derivative_recomputes():
    def f(x):
        return jnp.sin(jnp.sin(x @ jnp.eye(F)) @ jnp.eye(F)).sum()

    def products(wrapped):
        return count_of(jax.grad(wrapped), X, primitive="dot_general")

    assert products(f) == 4  # two forward, two backward
    assert products(rp.remat(f)) == 6
    assert products(rp.remat(f, policy=jax.checkpoint_policies.dots_saveable)) == 4
    assert products(rp.remat(f, prevent_cse=False)) == 6


@pytest.mark.skipif(getattr(jax.config, "jax_remat3", False), reason="JAX_REMAT3=1 ignores prevent_cse (jax 0.10.2)")
def test_prevent_cse_reaches_jax():
    def given(**options):
        jaxpr = jax.make_jaxpr(rp.remat(jnp.sin, **options))(X)
        return np.all(next(e.params["prevent_cse"] for e in jaxpr.eqns if "prevent_cse" in e.params))

    assert given()
    assert not given(prevent_cse=False)


def test_equal_calls_trace_once():
    traces = []

    @rp.remat
    def f(model, x, n=1):
        traces.append(n)
        return model(x).sum() * n

    model, other = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(1))
    for m in (model, model, other):
        f(m, X)
    assert len(traces) == 1
    assert (model.count[...], other.count[...]) == (2, 1)
    f(model, X[:1])
    f(model, X, 2)
    f(model, X, 2)
    assert traces == [1, 1, 2]
    for n in range(KEPT_TRACES + 5):
        f(model, X, n + 10)
    f(model, X, 10)  # pushed out long ago
    assert len(traces) == 3 + KEPT_TRACES + 5 + 1


def test_no_array_is_kept_alive():
    @rp.remat
    def f(model, x):
        return model(x).sum()

    model = Layer(nnx.Rngs(0))
    nnx.grad(f)(model, X)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_captured_model_is_explained_and_never_stale():
    model = Layer(nnx.Rngs(0))

    @rp.remat
    def f(x):
        return model.linear(x).sum()

    with pytest.warns(
        CapturedModuleWarning, match=r"uses 'model' from outside.*Pass it as an argument: f\(model, \.\.\.\)"
    ):
        before = f(X)
    model.linear.kernel[...] += 1
    with pytest.warns(CapturedModuleWarning):
        assert f(X) == model.linear(X).sum() != before
    with pytest.raises(InputError, match="from outside"):
        rp.remat(lambda x: model.linear(x).sum(), plan=Plan())(X)


GLOBAL_MODEL = Layer(nnx.Rngs(0))


def test_every_way_to_capture_is_seen():
    model = Layer(nnx.Rngs(0))
    models = [model]

    def closure(x):
        return models[0](x)

    def default(x, inner=model, *, other=GLOBAL_MODEL):
        return x

    def uses_global(x):
        return [GLOBAL_MODEL(y) for y in x]

    def attribute_of_that_name(x):
        return x.GLOBAL_MODEL

    def inside(x):
        return (lambda y: GLOBAL_MODEL(y))(x)

    assert captured(closure) == ("models",)
    assert captured(default) == ("inner", "other")
    assert captured(uses_global) == captured(inside) == ("GLOBAL_MODEL",)
    assert captured(functools.partial(jax.jit(uses_global), 1)) == ("GLOBAL_MODEL",)
    assert captured(attribute_of_that_name) == captured(model.repeated) == captured(model) == captured(jnp.sin) == ()


class Trainer:
    def __init__(self):
        self.model = Layer(nnx.Rngs(0))
        self.scale = 2.0

    def loss(self, x):
        return self.model(x).sum()


def test_modules_inside_other_objects_are_found():
    trainer = Trainer()
    assert captured(trainer.loss) == ("self.model",)
    with pytest.raises(InputError, match=r"uses 'self\.model' from outside"):
        Workload(trainer.loss, X)
    with pytest.raises(InputError, match=r"argument trainer is a Trainer.*attribute 'model' holds an NNX module"):
        rp.remat(lambda trainer, x: trainer.loss(x))(trainer, X)
    assert rp.remat(lambda x, config: x.sum() * config.scale)(X, type("Config", (), {"scale": 2.0})()) == 16.0


def test_mutable_arrays_are_explained():
    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()), ref=True)

    with pytest.raises(InputError, match=r"count is a mutable array \(jax\.Ref\)"):
        rp.remat(lambda model, x: x.sum())(Counting(), X)


def test_arguments_that_do_not_go_together():
    with pytest.raises(InputError, match="either plan= or policy="):
        rp.remat(jnp.sin, plan=Plan(), policy=jax.checkpoint_policies.dots_saveable)
    with pytest.raises(InputError, match="on_mismatch"):
        rp.remat(jnp.sin, on_mismatch="ignore")
    with pytest.raises(InputError, match="got a int"):
        rp.remat(3)


def test_a_plan_replaces_the_pure_function(monkeypatch):
    seen = []

    def fake(lifted, plan):
        seen.append((plan, [i.path for i in lifted.info]))
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in lifted.leaves)
        return lambda *leaves: [-out if n == 0 else out for n, out in enumerate(lifted.pure(*leaves))]

    monkeypatch.setattr(apply, "planned", fake)

    def f(model, x):
        return model(x).sum()

    plan = Plan(name="fake")
    planned = rp.remat(f, plan=plan)
    model, expected = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(0))
    assert planned(model, X) == -f(expected, X)
    assert nnx.jit(planned)(model, X) == -f(expected, X)
    assert model.count[...] == 2
    assert seen[0] == (plan, ["count", "linear/bias", "linear/kernel", "x"])
    assert all(entry == seen[0] for entry in seen)


def test_plans_from_files_and_dicts(tmp_path):
    def f(model, x):
        return model(x).sum()

    path = tmp_path / "plan.json"
    Plan().save(path)
    model = Layer(nnx.Rngs(0))
    expected = f(Layer(nnx.Rngs(0)), X)
    for plan in (path, str(path), Plan().to_json(), Plan()):
        np.testing.assert_allclose(rp.remat(f, plan=plan)(model, X), expected, rtol=1e-6)
    with pytest.raises(InputError, match="cannot be read"):
        rp.remat(f, plan=tmp_path / "missing.json")
    path.write_text("{")
    with pytest.raises(PlanMismatch, match="not valid JSON"):
        rp.remat(f, plan=path)


def test_a_plan_made_from_shapes_applies_wherever_the_function_is_called():
    def f(model, x):
        return model(x).sum()

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    work = Workload(f, nnx.eval_shape(lambda: Layer(nnx.Rngs(0))), shape)
    lifted = work.lift(scopes=True)
    graph = trace(lifted.pure, lifted.leaves, differentiated=work.differentiated).graph
    regions, loops = describe(Configuration((Region(0, len(graph.operations)),)), graph, {})
    planned = rp.remat(f, plan=Plan(regions, loops, fingerprint=graph.fingerprint))
    expected = nnx.value_and_grad(f)(Layer(nnx.Rngs(0)), X)
    model = Layer(nnx.Rngs(0))
    graphdef, *state = nnx.split(model, nnx.Param, ...)
    functional = jax.value_and_grad(lambda p, r: planned(nnx.merge(graphdef, p, r, copy=True), x=X))
    for found in (
        nnx.value_and_grad(planned)(model, X),
        nnx.jit(nnx.value_and_grad(planned))(model, X),
        jax.jit(functional)(*state),
    ):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert model.count[...] == 2
    np.testing.assert_allclose(planned(model, X[:1]), f(model, X[:1]), rtol=1e-5)  # same structure, other figures
    batches = nnx.vmap(planned, in_axes=(None, 0))(Layer(nnx.Rngs(0)), jnp.stack([X, X]))
    np.testing.assert_allclose(batches, [expected[0]] * 2, rtol=1e-5)


def test_a_plan_for_another_function():
    def f(model, x):
        return model(x).sum()

    plan = Plan(fingerprint="of something else")
    model = Layer(nnx.Rngs(0))
    with pytest.raises(PlanMismatch, match="another function"):
        rp.remat(f, plan=plan)(model, X)
    assert model.count[...] == 0
    with pytest.warns(PlanMismatchWarning, match="runs without the plan"):
        value = rp.remat(f, plan=plan, on_mismatch="plain")(model, X)
    assert value == f(Layer(nnx.Rngs(0)), X)
    assert model.count[...] == 1


@pytest.mark.parametrize("keywords", [{"plan": Plan(fingerprint="")}, {"policy": None}], ids=["plan", "policy"])
def test_what_is_set_around_a_call_is_part_of_its_trace(keywords):
    def f(w, x):
        return (x @ w).sum()

    w, x = jnp.ones((F, F)), jnp.ones((2, F))
    if "plan" in keywords:
        traced = trace(lambda w, x: [f(w, x)], (w, x), differentiated=[0])
        keywords = {"plan": Plan(fingerprint=traced.graph.fingerprint)}
    g = rp.remat(f, **keywords)
    for precision in ("highest", "default", "high", "highest"):
        with jax.default_matmul_precision(precision):
            said, wanted = (str(jax.make_jaxpr(each)(w, x)) for each in (g, f))
        shown = re.findall(r"precision=\S+", wanted)
        assert shown
        assert re.findall(r"precision=\S+", said) == shown


@pytest.mark.parametrize(("one", "other"), [((2,), (2.0,)), ((1, (True,)), (1, (1,))), (1, True)])
def test_static_values_that_python_calls_equal_are_traced_apart(one, other):
    def f(x, sizes):
        return x * jax.tree.leaves(sizes)[-1]

    g = rp.remat(f, static_argnums=(1,))
    x = jnp.arange(3)
    for sizes in (one, other, one):
        assert g(x, sizes).dtype == f(x, sizes).dtype


def test_a_plan_with_prevent_cse_is_refused():
    with pytest.raises(InputError, match="leave out prevent_cse"):
        rp.remat(lambda x: x, plan=Plan(fingerprint=""), prevent_cse=False)


def test_a_loss_that_does_not_run_by_itself_is_explained():
    def over_axis(model, x):
        return jax.lax.pmean((model(x) ** 2).mean(), "b")

    def make_step(loss):
        return lambda m, x: nnx.grad(lambda m: nnx.vmap(loss, in_axes=(None, 0), axis_name="b")(m, x).mean())(m)

    model = nnx.Linear(F, F, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"axis that a vmap .* \(Found an unbound axis name: b\)"):
        rp.plan(Workload(over_axis, model, jnp.ones((2, 2, F)), step=make_step), budget="1GiB", target="cpu")

    def checked(model, x):
        y = model(x)
        checkify.check(jnp.all(y < 1e9), "large")
        return (y**2).mean()

    with pytest.raises(InputError, match=r"checkify.check.*step="):
        rp.plan(Workload(checked, model, X), budget="1GiB", target="cpu")


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nnx.jit(nnx.grad(rp.remat(lambda model, x: model(x).sum())))(Layer(nnx.Rngs(0)), X)
    assert [str(w.message) for w in caught] == []


@pytest.mark.skipif(
    _jax_private.kept_by_new_remat(lambda *_, **__: True), reason="this JAX's new remat follows every policy (0.12)"
)
def test_a_policy_that_jaxs_new_remat_would_drop_is_refused(monkeypatch):
    policies = jax.checkpoint_policies
    monkeypatch.setattr("rematplan._jax_private.new_remat", lambda: True)
    for dropped in (
        policies.everything_saveable,
        policies.save_anything_except_these_names("a"),
        lambda *_, **__: True,
    ):
        with pytest.raises(InputError, match="jax_remat3"):
            rp.remat(jnp.sin, policy=dropped)
    for kept in (None, policies.nothing_saveable, policies.dots_saveable, policies.save_only_these_names("a")):
        assert callable(rp.remat(jnp.sin, policy=kept))
