"""Hand-written configurations beside each other: what a row is of, and what becomes of those that a compiler refuses."""

from __future__ import annotations

import collections
from concurrent.futures import Executor, Future

import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import workloads
from rematplan.errors import CompilerError
from rematplan.target.measurement import Measurement, Source, encode

MIB = 1 << 20
MEASURED = encode(Measurement("cpu", Source.COMPILED, 3 * MIB, 3 * MIB, MIB, MIB, MIB, flops=1.0, seconds=1.0))


def small():
    return workloads.mlp(blocks=3, batch=64, features=32)


class Refusing(Executor):
    """Answers without a compiler; refuses every program whose text has this in it."""

    def __init__(self, sign):
        self.sign = sign
        self.asked = collections.Counter()

    def submit(self, _function, request):
        self.asked[request["stablehlo"]] += 1
        future = Future()
        answer = {"error": "it crashed"} if self.sign in request["stablehlo"] else {"measurement": MEASURED}
        future.set_result(answer)
        return future


@pytest.mark.parametrize("cache", ["", "off"])
def test_what_a_compiler_refuses_is_compiled_once_and_so_is_the_rest(monkeypatch, tmp_path, cache):
    monkeypatch.setenv("REMATPLAN_CACHE", cache or str(tmp_path))
    executor = Refusing("checkpoint")
    compared = rp.compare(small(), target="cpu", executor=executor)
    assert "plain" in [row.name for row in compared.rows]
    crashed = [item.name for item in compared.refused if "it crashed" in item.reason]
    assert {"whole", "per-block"} <= set(crashed)
    assert not {row.name for row in compared.rows} & set(crashed)
    assert sum(executor.asked.values()) <= len(compared.rows) + len(crashed)  # some are the same program


def test_where_all_are_refused_the_error_names_the_first(monkeypatch):
    monkeypatch.setenv("REMATPLAN_CACHE", "off")  # another test may have measured the same program
    with pytest.raises(CompilerError, match=r"plain: .*it crashed"):
        rp.compare(small(), target="cpu", executor=Refusing("func"))


@pytest.mark.parametrize(
    ("target", "method", "why"),
    [
        ("cpu", "compile", "CPUs does not rematerialize"),
        ("cpu", "probe", "CPUs does not rematerialize"),
        ("tpu-v5e", "probe", "probe ends before"),
        ("local", "compile", "given no limit"),
    ],
)
def test_the_compilers_own_rematerialization_has_no_row_where_it_does_nothing(target, method, why):
    work = rp.Workload(lambda w, x: jnp.tanh(x @ w).sum(), jnp.ones((16, 16)), jnp.ones((8, 16)))
    compared = rp.compare(work, target=target, method=method)
    assert "compiler" not in [row.name for row in compared.rows]
    (left_out,) = compared.refused
    assert left_out.name == "compiler"
    assert why in left_out.reason
    measured = rp.measure(work, target=target, method=method, policy="compiler")
    assert why in measured.warnings[-1]


@pytest.mark.slow
def test_a_gpus_compiler_rematerializes_down_to_the_budget():
    work = workloads.mlp(blocks=4, batch=8192, features=512)
    plain = rp.measure(work, target="gpu-h100")
    budget = int(0.9 * plain.required_bytes)
    own = rp.measure(work, target="gpu-h100", policy="compiler", budget=budget)
    assert own.required_bytes <= budget == own.limit_bytes
    assert own.flops is not None and plain.flops is not None and own.flops > plain.flops
    assert not own.warnings
    roomy = rp.measure(work, target="gpu-h100", policy="compiler")  # the card's memory is far above what it needs
    assert (roomy.required_bytes, roomy.flops) == (plain.required_bytes, plain.flops)


@pytest.mark.slow
def test_a_limit_that_the_compiler_does_not_reach_is_said():
    work = workloads.mlp(blocks=3, batch=2048, features=256)
    compared = rp.compare(work, target="gpu-h100", budget="2MiB")
    (row,) = [row for row in compared.rows if row.name == "compiler"]
    assert row.measurement.fits_limit is False
    assert "did not reach" in row.note
