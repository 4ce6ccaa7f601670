"""The key of a program: the same from wherever it was lowered, another one for another program or another line of a model."""

from __future__ import annotations

import textwrap

import jax
import pytest
from flax import nnx

import rematplan as rp
from rematplan import _measure
from rematplan.program.loss import traced_loss
from rematplan.search.problem import Problem
from rematplan.target import compiler
from rematplan.target.locations import is_library, without_callers
from rematplan.target.target import resolve
from rematplan.workloads import mlp

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
#loc2 = loc("/home/me/rematplan/train.py":7:1 to :2)
#loc3 = loc("/home/me/main.py":{line}:1 to :2)
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
    assert not is_library("/home/me/rematplan/train.py")
    assert is_library("/usr/lib/python3/site-packages/flax/nnx/nn/linear.py")
    assert is_library(compiler.__file__)
    assert not is_library(traced_loss.__code__.co_filename.replace("program/loss.py", "workloads/_gpt.py"))
