"""The key of a program: the same from wherever it was lowered, another one for another program or another line of a model."""

from __future__ import annotations

import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rematplan as rp
from rematplan import _measure, policies
from rematplan.program.loss import traced_loss
from rematplan.search.problem import Problem
from rematplan.target import compiler, locations
from rematplan.target.locations import is_library, without_callers
from rematplan.target.target import resolve
from rematplan.workloads import gpt, mlp

SIZES = {"blocks": 2, "features": 16, "batch": 8}


def lowered(work):
    step = work.step()
    return compiler.lower(step.function, step.leaves, target=resolve("cpu"))


def test_a_program_that_is_lowered_on_another_line_is_the_same():
    work = mlp(**SIZES)
    one = lowered(work)
    other = lowered(mlp(**SIZES))
    assert one.stablehlo != other.stablehlo  # JAX writes down who called
    assert one.key() == other.key()


def test_where_results_lie_brings_no_caller_in():
    one = compiler.lower(*_split(), target=resolve("cpu:4"))
    other = compiler.lower(*_split(), target=resolve("cpu:4"))
    assert one.stablehlo != other.stablehlo
    assert one.key() == other.key()


def _split():
    step = mlp(**SIZES, mesh="fsdp:4").step()
    return step.function, step.leaves


def test_what_calls_it_does_not_matter():
    work = mlp(**SIZES)
    target = resolve("cpu")
    options = _measure.compiler_options(None, target, method=_measure.Method.COMPILE, limit_bytes=None)
    measured = _measure.lowered(work, None, target, options=options).program
    searched = Problem(mlp(**SIZES), target, progress=lambda _: None).whole(_measure.PLAIN)
    assert measured.key() == searched.key() == lowered(work).key()


def test_measuring_twice_compiles_once():
    work = mlp(blocks=2, features=16, batch=24)
    first = rp.measure(work, target="cpu")
    second = rp.measure(work, target="cpu")
    assert (first.cached, second.cached) == (False, True)


@pytest.mark.parametrize("name", ["plain", "per-block", "dots"])
def test_a_transformer_is_the_same_from_every_call(name):
    """With lookups and masks, which library functions make that know no line of the model."""

    def asked():
        work = gpt(blocks=2, features=16, heads=2, length=8, batch=2, vocabulary=32)
        traced = traced_loss(work)
        planned = _measure.checkpointed(traced, policies.by_name(traced.graph, name))
        step = work.step(planned)
        return compiler.lower(step.function, step.leaves, target=resolve("cpu"))

    def from_further_away():
        return asked()

    one, other = asked(), from_further_away()
    assert one.stablehlo != other.stablehlo
    assert one.key() == other.key()


@pytest.mark.parametrize("name", ["per-block", "dots"])
def test_regions_that_are_put_there_from_another_line_are_the_same(name):
    """The operations that hold a region together, and its saved values apart, stand on no line of the model."""

    def planned(work):
        traced = traced_loss(work)
        baseline = policies.by_name(traced.graph, name)
        target = resolve("cpu")
        options = _measure.compiler_options(baseline, target, method=_measure.Method.COMPILE, limit_bytes=None)
        return _measure.lowered(work, _measure.checkpointed(traced, baseline), target, options=options).program

    one = planned(mlp(**SIZES))
    other = planned(mlp(**SIZES))
    assert "optimization_barrier" in one.stablehlo
    assert one.stablehlo != other.stablehlo
    assert one.key() == other.key()


@pytest.mark.parametrize("change", [{"blocks": 3}, {"features": 32}, {"batch": 16}, {"activation": "gelu"}])
def test_another_program_has_another_key(change):
    assert lowered(mlp(**SIZES)).key() != lowered(mlp(**SIZES | change)).key()


def model_file(tmp_path, name: str, *, above: str = "", call: str = "loss(model, x)"):
    """A workload from a file of its own, with something above the model and something that calls it."""
    source = f"""
    {above}
    import jax.numpy as jnp

    def loss(model, x):
        return jnp.sum(jnp.tanh(model(x)))

    def step(model, x):
        return {call}
    """
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    names: dict = {}
    exec(compile(path.read_text(), str(tmp_path / "model.py"), "exec"), names)
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return rp.Workload(names["step"], model, jax.ShapeDtypeStruct((4, 8), "float32"), name="same")


def test_the_models_own_lines_are_part_of_the_key(tmp_path):
    one = lowered(model_file(tmp_path, "one"))
    assert lowered(model_file(tmp_path, "same")).key() == one.key()
    # reports show these lines: those of another file must not be shown for this one
    assert (
        lowered(model_file(tmp_path, "moved", above="# moved")).key()
        == lowered(model_file(tmp_path, "b", above="#")).key()
    )
    assert lowered(model_file(tmp_path, "down", above="\n\n")).key() != one.key()


def test_names_of_modules_and_passes_stay_in_the_key():
    text = lowered(mlp(**SIZES)).stablehlo
    named = text.replace("~layers/1~", "~other/1~")
    assert named != text
    assert without_callers(named) != without_callers(text)


def test_the_innermost_line_of_the_user_is_kept():
    locations = """#loc1 = loc("/usr/lib/python3/site-packages/flax/nnx/linear.py":5:1 to :2)
#loc2 = loc("/models/rematplan/train.py":7:1 to :2)
#loc3 = loc("/models/main.py":{line}:1 to :2)
#loc4 = loc("Linear.__call__"(#loc1))
#loc5 = loc("loss"(#loc2))
#loc6 = loc("<module>"(#loc3))
#loc7 = loc(callsite(#loc5 at #loc6))
#loc8 = loc(callsite(#loc4 at #loc7))
#loc9 = loc("jit(f)/dot_general"(#loc8))
%0 = stablehlo.dot_general %a, %b loc(#loc9)
"""
    one, other = (without_callers(locations.replace("{line}", n)) for n in ("9", "10"))
    assert one == other
    assert one.startswith("%0 = stablehlo.dot_general %a, %b loc(")
    assert without_callers(locations.replace('train.py":7', 'train.py":8')) != one


def test_a_users_folder_may_be_called_rematplan():
    assert not is_library("/models/rematplan/train.py")
    assert is_library("/usr/lib/python3/site-packages/flax/nnx/nn/linear.py")
    assert is_library(compiler.__file__)
    assert not is_library(traced_loss.__code__.co_filename.replace("program/loss.py", "workloads/_gpt.py"))


@pytest.mark.parametrize("where", ["helper", "body"])
def test_lines_of_jitted_helpers_and_of_loop_bodies_are_part_of_the_key(tmp_path, where):
    """JAX gives them names without a path."""

    def workload(*, down: str):
        source = f"""
        import jax
        import jax.numpy as jnp
        {"#" + down if where == "helper" else "#"}

        @jax.jit
        def helper(x):
            return jnp.tanh(x) * 2

        def loss(w, x):
            {"#" + down if where == "body" else "#"}
            def body(h, row):
                return jnp.sin(h * row), None

            return jnp.sum(jax.lax.scan(body, helper(x), w)[0])
        """
        names: dict = {}
        exec(compile(textwrap.dedent(source), str(tmp_path / "model.py"), "exec"), names)
        return rp.Workload(
            names["loss"], jax.ShapeDtypeStruct((5, 4), "float32"), jax.ShapeDtypeStruct((4,), "float32")
        )

    here = "\n" + " " * (8 if where == "helper" else 12) + "#"
    assert lowered(workload(down="")).key() == lowered(workload(down="")).key()
    assert lowered(workload(down="")).key() != lowered(workload(down=here)).key()


def test_jitted_functions_of_a_library_do_not_bring_the_caller_in():
    def loss(w, x):
        return jnp.sum(jnp.where(x > 0, jax.nn.relu(w * x), jnp.clip(x, 0, 1)))

    def workload():
        return rp.Workload(loss, jax.ShapeDtypeStruct((4,), "float32"), jax.ShapeDtypeStruct((4,), "float32"))

    one = lowered(workload())
    assert lowered(workload()).key() == one.key()


def test_a_package_behind_a_link_is_still_ours(tmp_path, monkeypatch):
    link = tmp_path / "elsewhere"
    link.symlink_to(Path(locations.__file__).parent.parent)
    monkeypatch.setattr(locations, "_PACKAGES", (f"{link}/", *locations._PACKAGES))
    assert locations.is_ours(f"{link}/step.py")
    assert locations.is_ours(locations.__file__)
