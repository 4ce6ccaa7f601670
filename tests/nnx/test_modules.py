"""Module paths: on every operation, through every transformation, and nothing is left behind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rematplan.lift import lift
from rematplan.program.modules import scoped
from rematplan.scopes import module_path, module_scope, scope_inside

F = 4


def paths(function, *args, **kwargs):
    """Module paths of a call's operations by primitive, nested programs included."""
    opened = lift(function, args, kwargs, scopes=True)
    found: dict[str, list[str]] = {}

    def walk(jaxpr, outer):
        for eqn in jaxpr.eqns:
            stack = f"{outer}/{eqn.source_info.name_stack}"
            found.setdefault(eqn.primitive.name, []).append(module_path(stack))
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "jaxpr"):
                    walk(inner.jaxpr, stack)
                elif hasattr(inner, "eqns"):
                    walk(inner, stack)

    walk(jax.make_jaxpr(opened.pure)(*opened.leaves).jaxpr, "")
    return found


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(F, F, rngs=rngs)
        self.seq = nnx.Sequential(nnx.Linear(F, F, rngs=rngs), jnp.sin)

    def __call__(self, x):
        return self.seq(self.other(x))

    def other(self, x):
        return jnp.tanh(self.up(x))


class Model(nnx.Module):
    def __init__(self, rngs, count=2):
        self.blocks = nnx.List([Block(rngs) for _ in range(count)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jnp.exp(x)


def call(model, x):
    return model(x)


X = jnp.ones((2, F))
DOTS = [f"blocks/{i}/{inner}" for i in range(2) for inner in ("up", "seq/layers/0")]


def test_operations_carry_the_innermost_module():
    found = paths(call, Model(nnx.Rngs(0)), X)
    assert found["dot_general"] == DOTS
    assert found["tanh"] == ["blocks/0", "blocks/1"]  # in a public method that is not __call__
    assert found["sin"] == ["blocks/0/seq", "blocks/1/seq"]
    assert found["exp"] == [""]  # the root's own


def test_a_second_module_argument_starts_with_its_name():
    def two(student, x, teacher):
        return student(x) + teacher(x)

    found = paths(two, Block(nnx.Rngs(0)), X, teacher=Block(nnx.Rngs(1)))
    assert found["dot_general"] == ["up", "seq/layers/0", "teacher/up", "teacher/seq/layers/0"]


def test_modules_in_a_dict():
    found = paths(lambda models, x: models["b"](models["a"](x)), {"a": Block(nnx.Rngs(0)), "b": Block(nnx.Rngs(1))}, X)
    assert found["tanh"] == ["a", "b"]


def test_a_module_used_twice_has_one_path():
    class Shared(nnx.Module):
        def __init__(self, rngs):
            self.one = Block(rngs)
            self.two = self.one

        def __call__(self, x):
            return self.two(self.one(x))

    assert paths(call, Shared(nnx.Rngs(0)), X)["tanh"] == ["one", "one"]


class Jitted(Block):
    @nnx.jit
    def other(self, x):
        return super().other(x)

    @functools.partial(jax.jit, static_argnames="power")
    def powered(self, x, *, power):
        return self.up(x) ** power


class JittedModel(Model):
    def __init__(self, rngs):
        self.blocks = nnx.List([Jitted(rngs) for _ in range(2)])

    def __call__(self, x):
        return super().__call__(x) + self.blocks[1].powered(x, power=2)


def test_inside_jit_also_when_the_jitted_method_was_traced_before():
    model = JittedModel(nnx.Rngs(0))
    model(X)  # fills the caches of both jits, without paths
    for _ in range(2):  # the second time from caches, with paths
        found = paths(call, model, X)
        assert found["dot_general"] == [*DOTS, "blocks/1/up"]
        assert found["tanh"] == ["blocks/0", "blocks/1"]
        assert found["integer_pow"] == ["blocks/1"]


def test_a_function_jitted_over_modules_does_not_keep_the_first_path():
    apply = nnx.jit(call)

    def loss(model, x):
        for block in model.blocks:
            x = apply(block, x)
        return x

    assert paths(loss, Model(nnx.Rngs(0)), X)["dot_general"] == DOTS


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.layers = stacked(rngs)
        self.head = nnx.Linear(F, F, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        return self.head(run(self.layers, x))


def stacked(rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Block(rngs)

    return make(rngs)


def test_inside_scan_where_modules_are_built_again():
    found = paths(call, Scanned(nnx.Rngs(0)), X)
    assert found["dot_general"] == ["layers/up", "layers/seq/layers/0", "head"]


def test_inside_vmap_remat_grad_and_cond():
    def loss(model, x):
        x = nnx.vmap(call, in_axes=(None, 0))(model.blocks[0], x)
        x = nnx.remat(call)(model.blocks[1], x)
        grads = nnx.grad(lambda block, x: block(x).sum())(model.blocks[0], x)
        return nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: x, model.blocks[1], x), grads

    found = paths(loss, Model(nnx.Rngs(0)), X)
    assert set(found["dot_general"]) == set(DOTS)
    assert found["dot_general"][:4] == DOTS


def test_einsum_adds_a_scope_after_the_path():
    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Einsum("ab,bc->ac", (F, F), rngs=rngs)

        def __call__(self, x):
            return self.inner(x)

    assert paths(call, Attention(nnx.Rngs(0)), X)["dot_general"] == ["inner"]


def test_random_streams_belong_to_the_module_that_draws():
    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(x)

    assert set(paths(call, Dropping(nnx.Rngs(0)), X)["random_bits"]) == {"drop"}


class Awkward(Block):
    """Everything that a class may hold beside methods."""

    calls: list[str] = []  # noqa: RUF012 - a class attribute on purpose

    @property
    def width(self):
        return F

    @staticmethod
    def static(x):
        return jnp.cos(x)

    @classmethod
    def made(cls, rngs):
        return cls(rngs)

    def _private(self, x):
        return x

    def __call__(self, x):
        assert self.made(nnx.Rngs(0)).width == F
        return super().__call__(self._private(self.static(x)))


class Raising(nnx.Module):
    def __init__(self, rngs):
        self.inner = Block(rngs)

    def __call__(self, x):
        self.inner(x)
        raise KeyError("the model's own")


def snapshot(*classes):
    return [dict(vars(owner)) for cls in classes for owner in cls.__mro__ if owner is not object]


@pytest.mark.parametrize("cls", [Awkward, Model, JittedModel])
def test_classes_are_as_before(cls):
    classes = (cls, Block, nnx.Linear, nnx.Sequential, nnx.List)
    before = snapshot(*classes)
    model = cls(nnx.Rngs(0))
    attributes = {path: set(vars(m)) for path, m in nnx.iter_modules(model)}
    opened = lift(call, (model, X), {}, scopes=True)
    opened.finish(opened.pure(*opened.leaves))
    assert snapshot(*classes) == before
    assert {path: set(vars(m)) for path, m in nnx.iter_modules(model)} == attributes


def test_classes_are_as_before_when_the_model_raises():
    before = snapshot(Raising, Block, nnx.Linear)
    model = Raising(nnx.Rngs(0))
    opened = lift(call, (model, X), {}, scopes=True)
    with pytest.raises(KeyError, match="the model's own"):
        jax.make_jaxpr(opened.pure)(*opened.leaves)
    assert snapshot(Raising, Block, nnx.Linear) == before


def test_classes_are_as_before_when_the_body_raises():
    before = snapshot(Block)
    with pytest.raises(ValueError, match="inside"):
        _raise_in_scope(Model(nnx.Rngs(0)), before)
    assert snapshot(Block) == before


def _raise_in_scope(model, before):
    with scoped([("", model)]):
        assert snapshot(Block) != before
        raise ValueError("inside")


def test_scopes_nest_and_leave_the_outer_ones():
    model = Model(nnx.Rngs(0))
    before = snapshot(Block)
    with scoped([("outer", model)]):
        with scoped([("", Model(nnx.Rngs(1)))]):
            pass
        names = str(jax.make_jaxpr(model)(X).eqns[0].source_info.name_stack)
    assert module_path(names) == "outer/blocks/0/up"
    assert snapshot(Block) == before


def test_a_model_that_maps_over_two_modules_runs_without_paths():
    def distance(model, x):
        a, b = model.blocks
        gaps = jax.tree.map(lambda p, q: ((p - q) ** 2).sum(), a, b)  # the stamped paths differ
        return sum(jax.tree.leaves(gaps)) + model(x).sum()

    model = Model(nnx.Rngs(0))
    opened = lift(distance, (model, X), {}, scopes=True)
    assert opened.finish(opened.pure(*opened.leaves)) == distance(model, X)
    assert set(paths(distance, model, X)["dot_general"]) == {""}


def test_reading_paths_from_names():
    outer, inner = module_scope("blocks/0"), module_scope("blocks/0/attn")
    assert module_path(f"jit(step)/transpose(jvp({outer}))/{inner}/bqhd,bkhd->bhqk/dot_general") == "blocks/0/attn"
    assert module_path(f"a/{module_scope('b/c')}/while/body/{module_scope('d')}") == "d"
    assert module_path("jit(f)/add") == ""


def test_paths_in_shared_code_continue_the_one_around_it():
    outer, inner = module_scope("blocks/0"), scope_inside("attn/q")
    assert module_path(f"jit(step)/transpose(jvp({outer}))/checkpoint/{inner}/dot_general") == "blocks/0/attn/q"
    assert (
        module_path(f"{outer}/checkpoint/{scope_inside('mlp')}/checkpoint/{scope_inside('up')}/add")
        == "blocks/0/mlp/up"
    )
    assert module_path(f"{outer}/checkpoint/{inner}/while/body/{module_scope('other')}/add") == "other"
