"""The largest value that fits, by real compilers: against planning for every single value."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import rematplan as rp
from rematplan import workloads
from rematplan.errors import CompilerError, InfeasibleBudget, InputError
from rematplan.search import capacity

KIB, MIB = 1 << 10, 1 << 20


def fits_with_plan(work: rp.Workload, target: str, budget: int, slowdown: float | None) -> bool:
    """By the plan that is found for this very value, and the same compiler's time without one."""
    try:
        plan = rp.plan(work, budget=budget, target=target, finalists=1)
    except InfeasibleBudget:
        return False
    if slowdown is None:
        return True
    return plan.measured["seconds"] <= slowdown * rp.measure(work, target=target).seconds


@pytest.mark.parametrize(
    ("target", "vary", "values", "keywords", "budget", "slowdown"),
    [
        pytest.param(
            "cpu",
            "batch",
            range(512, 1281, 256),
            {"blocks": 3, "features": 32},
            800 * KIB,
            1.1,
            marks=pytest.mark.slow,
        ),
        ("cpu", "blocks", range(1, 7), {"features": 32, "batch": 1024}, 550 * KIB, None),
        pytest.param(
            "gpu-h100",
            "features",
            range(32, 129, 16),
            {"blocks": 3, "batch": 1024},
            1200 * KIB,
            None,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["batch-slowdown", "blocks", "features"],
)
def test_as_planning_for_every_value(target, vary, values, keywords, budget, slowdown):
    found = rp.fit(
        workloads.mlp,
        vary=vary,
        low=values.start,
        high=values.stop - 1,
        multiple_of=values.step,
        targets=target,
        budget=budget,
        slowdown=slowdown,
        keywords=keywords,
    )
    (row,) = found.rows
    works = {value: workloads.mlp(**keywords, **{vary: value}) for value in values}
    without = {v for v, work in works.items() if rp.measure(work, target=target).required_bytes <= budget}
    planned = {v for v, work in works.items() if fits_with_plan(work, target, budget, slowdown)}
    assert 0 < len(without) < len(planned) < len(values)  # else nothing is asked
    assert row.plain.value == max(without)
    assert row.plain_above.value == max(without) + values.step
    assert row.best.value == max(planned)
    assert row.above.value == max(planned) + values.step
    assert row.best.source == "compiled" and row.best.clock.startswith("roofline")
    assert row.best.required_bytes <= budget < row.plain_above.required_bytes
    again = rp.measure(works[row.best.value], target=target, plan=rp.Plan.load(row.plan))
    assert again.required_bytes == row.best.required_bytes
    assert row.best.seconds == pytest.approx(again.seconds)
    plain = rp.measure(works[row.best.value], target=target)
    assert row.best.slowdown == pytest.approx(again.seconds / plain.seconds)
    assert row.throughput == pytest.approx(row.best.value / again.seconds)
    assert (row.best.slowdown <= slowdown) if slowdown else row.above.reason.startswith("its smallest plan needs")


def test_an_open_range_takes_few_measurements():
    """Two searches and a few probes, where planning for each value would take thousands."""
    found = rp.fit(workloads.mlp, targets="cpu", budget=2 * MIB, keywords={"blocks": 3, "features": 32})
    (row,) = found.rows
    assert row.above.value == row.best.value + 1
    assert row.best.value > 1.5 * row.plain.value > 2000
    assert 2 * MIB - 8 * KIB < row.best.required_bytes <= 2 * MIB < row.above.required_bytes
    assert len(row.tried) <= 6
    assert row.probes <= 80 and row.compiles <= 4
    assert found.high is None and found.skipped == ()


def test_several_targets_beside_each_other_with_prices():
    found = rp.fit(
        workloads.mlp,
        low=512,
        high=1024,
        multiple_of=512,
        targets=["gpu-h100", "gpu-l4"],
        keywords={"blocks": 2, "features": 64},
        prices={"gpu-h100": 3.0, "gpu-l4": 0.75},
    )
    assert [row.best.value for row in found.rows] == [1024, 1024]
    assert [row.above for row in found.rows] == [None, None]
    assert all(row.budget_bytes == row.memory_bytes for row in found.rows)
    assert found.smallest == "gpu-l4"
    h100, l4 = found.rows
    assert h100.best.seconds < l4.best.seconds
    assert h100.cost_per_million == pytest.approx(3.0 / 3600 * h100.best.seconds / 1024 * 1e6)
    assert found.cheapest == min((h100.cost_per_million, "gpu-h100"), (l4.cost_per_million, "gpu-l4"))[1]
    assert found.row("gpu-l4") is l4
    with pytest.raises(InputError, match="not in this record"):
        found.row("cpu")


@pytest.mark.slow
def test_a_tpu_is_asked_for_the_last_word():
    """Probes of a TPU only say where to look: both ends are decided by full compiles with the budget as the limit."""
    budget, keywords = 40 * MIB, {"blocks": 3, "features": 256}
    arguments = {"targets": "tpu-v5e", "budget": budget, "multiple_of": 512, "keywords": keywords}
    (row,) = rp.fit(workloads.mlp, **arguments).rows
    assert row.plain.value < row.best.value == row.above.value - 512
    assert row.plain.required_bytes <= budget < row.plain_above.required_bytes
    assert row.best.source == "compiled" and row.best.clock == "cycles" and row.best.plain_source == "compiled"
    work = workloads.mlp(batch=row.best.value, **keywords)
    # the plan as it was compiled under the budget, which is not the schedule that it has without a limit
    seconds = row.plan["measured"]["seconds"]
    assert row.best.slowdown == pytest.approx(seconds / rp.measure(work, target="tpu-v5e").seconds, rel=0.02)
    assert not fits_with_plan(workloads.mlp(batch=row.above.value, **keywords), "tpu-v5e", budget, None)


def test_a_program_that_a_compiler_refuses_for_its_size_only_bounds(monkeypatch):
    honest = capacity.measure_lowered

    def refusing(ready, target):
        if ready.program.argument_bytes > 300 * KIB:
            raise CompilerError("the program is beyond all bounds")
        return honest(ready, target)

    monkeypatch.setattr(capacity, "measure_lowered", refusing)
    arguments = {"targets": "cpu", "budget": 10 * MIB, "keywords": {"blocks": 2, "features": 32}}
    (row,) = rp.fit(workloads.mlp, low=64, high=4096, multiple_of=64, **arguments).rows
    held = 2 * (32 * 32 + 32) * 4
    assert held + row.plain.value * 32 * 4 <= 300 * KIB < held + row.plain_above.value * 32 * 4
    assert row.plain_above.value == row.plain.value + 64
    assert row.plain_above.required_bytes is None and "beyond all bounds" in row.plain_above.reason
    assert row.best.value == 4096 and row.above is None and row.best.plain_source == "predicted"
    with pytest.raises(CompilerError):
        rp.fit(workloads.mlp, low=4096, **arguments)


def small(*, width: int, batch: int = 64) -> rp.Workload:
    """A chain whose width has to be a multiple of 8, as that of attention heads."""
    if width % 8:
        raise InputError(f"width={width} is not a multiple of heads=8")

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    return rp.Workload(
        loss, jax.ShapeDtypeStruct((width, width), "float32"), jax.ShapeDtypeStruct((batch, width), "float32")
    )


def test_values_that_the_factory_refuses_are_left_out_and_said():
    found = rp.fit(small, vary="width", low=1, high=100, targets="cpu", budget=100 * KIB)
    (row,) = found.rows
    assert row.above.value == row.best.value + 8 and row.best.value % 8 == 0
    assert row.plain_above.value == row.plain.value + 8
    refused = {s.value for s in found.skipped}
    assert refused and not any(v % 8 == 0 for v in refused)
    assert set(range(row.best.value + 1, row.above.value)) <= refused
    assert "not a multiple of heads=8" in found.skipped[0].reason


def test_what_a_loss_refuses_counts_once_another_value_was_accepted():
    def in_four_parts(batch: int) -> rp.Workload:
        def loss(w, x):
            return sum((jnp.tanh(part @ w) ** 2).sum() for part in x.reshape(4, -1, 8))

        return rp.Workload(loss, jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((batch, 8), "float32"))

    found = rp.fit(in_four_parts, low=4, high=300, targets="cpu", budget=12 * KIB)
    (row,) = found.rows
    assert row.best.value % 4 == 0 and row.above.value == row.best.value + 4
    assert found.skipped
    with pytest.raises(TypeError):  # nothing says that it is the value's fault
        rp.fit(in_four_parts, low=5, high=300, targets="cpu", budget=12 * KIB)


def test_nothing_valid_near_the_least_value():
    with pytest.raises(InputError, match=r"takes no value of width at or right above 1.*not a multiple of heads=8"):
        rp.fit(small, vary="width", low=1, high=7, targets="cpu", budget=MIB)


def test_a_least_value_that_does_not_fit_is_refused_with_what_it_needs():
    with pytest.raises(InfeasibleBudget, match=r"batch=4096 does not fit: .*arguments") as caught:
        rp.fit(workloads.mlp, low=4096, targets=["cpu"], budget=100 * KIB, keywords={"blocks": 2, "features": 32})
    work = workloads.mlp(batch=4096, blocks=2, features=32)
    assert rp.plan(work, budget=caught.value.minimum_bytes, target="cpu").regions
    assert sum(caught.value.parts.values()) == pytest.approx(caught.value.minimum_bytes, rel=0.01)


def test_a_slowdown_that_the_least_value_cannot_keep():
    keywords = {"blocks": 3, "features": 32}
    plain = rp.measure(workloads.mlp(batch=1024, **keywords), target="cpu")
    arguments = {"low": 1024, "targets": "cpu", "budget": plain.required_bytes - 1, "keywords": keywords}
    assert rp.fit(workloads.mlp, high=1024, **arguments).rows[0].best.value == 1024
    with pytest.raises(
        InfeasibleBudget, match=r"times as long as no checkpointing, and 0\.5 times are allowed"
    ) as caught:
        rp.fit(workloads.mlp, slowdown=0.5, **arguments)
    assert caught.value.minimum_bytes == plain.required_bytes


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"vary": "depth"}, r"unexpected keyword argument 'depth'; it takes .*batch: "),
        ({"vary": "dtype"}, r"dtype of mlp is not a whole number \(its default is 'float32'\)"),
        ({"keywords": {"batch": 4}}, "batch is both varied and given"),
        ({"low": 0}, "the least value of batch, 0, is not a positive whole number"),
        ({"low": 9, "high": 15, "multiple_of": 8}, "no multiple of 8 from 9 to 15"),
        ({"low": 9, "high": 8}, "no value from 9 to 8"),
        ({"slowdown": 0.0}, "a slowdown of 0 is not possible"),
        ({"slowdown": float("nan")}, "a slowdown of nan"),
        ({"budget": None}, "cpu has no memory figure"),
        ({"budget": "80%"}, "no such figure"),
        ({"targets": []}, "no target"),
        ({"targets": ["cpu", "cpu"]}, "given twice"),
        ({"targets": "local"}, "runs what it measures"),
        ({"prices": {"gpu-l4": 1.0}}, "none of the targets"),
        ({"prices": {"cpu": -1.0}}, "not positive"),
        ({"own_regions": "both"}, "own_regions is 'keep' or 'replace', not 'both'"),
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing(arguments, complaint):
    with pytest.raises(InputError, match=complaint):
        rp.fit(workloads.mlp, **{"targets": "cpu", "budget": MIB, **arguments})


def test_what_memory_does_not_limit_needs_an_end():
    heads = functools.partial(_with_heads)
    with pytest.raises(InputError, match=r"memory does not limit heads"):
        rp.fit(heads, vary="heads", targets="cpu", budget=MIB)


def _with_heads(heads: int) -> rp.Workload:
    shape = jax.ShapeDtypeStruct((16, 16), "float32")
    return rp.Workload(lambda w, x: (jnp.tanh(x @ w) ** 2).sum() * heads, shape, shape)


def test_a_factory_that_makes_something_else():
    with pytest.raises(InputError, match=r"returned a value of type int, not a rematplan\.Workload"):
        rp.fit(lambda batch: batch, targets="cpu", budget=MIB)
