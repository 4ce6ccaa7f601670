"""Private pieces of JAX that rematplan uses: each is where it was, and does what it did."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest

from rematplan import _jax_private, policies, workloads
from rematplan.program.loss import traced_loss
from rematplan.search.problem import Problem
from rematplan.target.target import resolve


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("jax._src.config", ["trace_context"]),
        ("jax._src.source_info_util", ["user_frames", "register_exclusion", "register_inclusion"]),
        ("jax._src.sharding_impls", ["UnspecifiedValue"]),
        ("jax._src.compiler", ["get_compile_options"]),
        ("jax._src.dispatch", ["should_tuple_args"]),
        ("jax._src.interpreters.mlir", ["make_ir_context"]),
        ("jax._src.interpreters.pxla._dce_jaxpr", ["evict_weakref"]),
        ("jax._src.lib.xla_client", ["DeviceList"]),
        ("jax._src.lib.mlir.ir", ["Module"]),
        ("jax._src.distributed.global_state", ["client", "num_processes", "process_id"]),
    ],
)
def test_names_are_where_they_were(module, names):
    parent, _, name = module.rpartition(".")
    # some are re-exported objects and not modules
    found = getattr(importlib.import_module(parent), name, None) or importlib.import_module(module)
    missing = [name for name in names if not hasattr(found, name)]
    assert not missing, f"JAX {jax.__version__} moved {missing} out of {module}: mend rematplan/_jax_private.py"


def test_stablehlo_text_compiles_to_what_was_lowered():
    lowered = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    devices = jax.devices("cpu")[:1]
    executable = _jax_private.compile_stablehlo(lowered.as_text(debug_info=True), devices, options={}, load=True)
    stats, usual = executable.get_compiled_memory_stats(), lowered.compile().memory_analysis()
    assert usual is not None
    assert stats.argument_size_in_bytes == usual.argument_size_in_bytes == 64 * 64 * 4
    assert stats.temp_size_in_bytes == usual.temp_size_in_bytes
    assert "~" not in executable.hlo_modules()[0].to_string()


def test_an_open_sharding_is_recognised():
    (equation,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns
    assert all(_jax_private.is_unspecified(s) for s in equation.params["in_shardings"])


def test_the_users_line_is_found():
    (equation, *_) = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).eqns
    assert _jax_private.user_location(equation.source_info).startswith("test_jax_private.py:")


def test_the_text_of_programs_does_not_depend_on_where_rematplan_makes_them():
    work = workloads.mlp(blocks=2, features=8, batch=4)
    configuration = policies.by_name(traced_loss(work).graph, "per-block").configuration
    problem = Problem(work, resolve("cpu"), progress=lambda _: None)
    text = problem.whole(configuration).stablehlo
    named = {line.split('"')[1] for line in text.splitlines() if '.py"' in line}
    assert any("workloads" in path for path in named)  # the model's own lines are there
    assert not [path for path in named if {"rematplan", "src"} <= {*path.split("/")} and "workloads" not in path]
