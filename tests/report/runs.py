"""Runs with real models and made-up figures: every part of a report has something to show, and no compiler is asked."""

from __future__ import annotations

from functools import cache
from typing import Any

from rematplan import workloads
from rematplan._model import describe_model
from rematplan._plan import Plan
from rematplan.naming import describe, module_fingerprints
from rematplan.planner.baselines import baselines
from rematplan.program.loss import traced_loss
from rematplan.records import Comparison, Finding, Frontier, FrontierPoint, PlanRecord, Row
from rematplan.report.code import record_of
from rematplan.report.run import Run
from rematplan.target.measurement import Alive, Buffer, Measurement, ModuleTime, Timeline
from rematplan.workload import Workload
from tests.report.measurements import MIB, measurement

SIZES = {"features": 32, "heads": 2, "length": 16, "batch": 2, "vocabulary": 64}
HOSTILE = "<script>alert(1)</script>"
QUOTED = "\"'><img src=x onerror=alert(1)>"
DEEPEST_GPT = 8
POINTS = 600  # of a timeline, as many as are kept of a large program's


def figures(number: int, *, module: str = "blocks/*/attn", points: int = POINTS, **changes: Any) -> Measurement:
    """Figures of the `number`th configuration: each needs less and takes longer than the one before."""
    peak = 900 - 40 * number
    step = max(points - 1, 1)
    live = tuple(int((100 + (peak - 100) * (1 - abs(2 * at / step - 1))) * MIB) for at in range(points))
    alive = tuple(
        Alive(path, role, 1 + number, int(size * MIB))
        for path, role, size in (
            (module, "saved", peak / 2),
            (module, "gradient", peak / 4),
            ("embed", "parameter", peak / 8),
            ("", "other", peak / 8),
        )
    )
    buffer = Buffer(50 * MIB, "temporary", "bf16[16,512,2048]", module, "dot_general", "gpt.py:44 (f)", "saved")
    timeline = Timeline(tuple(range(0, 7 * points, 7)), live, 7 * points // 2, (buffer,) * 40, alive)
    times = (ModuleTime(module, "recompute", 0.001 * number + 1e-6), ModuleTime(module, "forward", 0.005))
    return measurement(
        peak_mib=peak,
        required_mib=peak + 31,
        seconds=0.0227 + 0.0011 * number,
        timeline=timeline,
        modules=times,
        **changes,
    )


def model_of(blocks: int) -> Workload:
    """A GPT; a deep one is a perceptron, because making a deep GPT's shapes takes Flax most of a minute."""
    if blocks > DEEPEST_GPT:
        return workloads.mlp(blocks=blocks, features=32, batch=8)
    return workloads.gpt(blocks=blocks, **SIZES)


@cache
def comparison(blocks: int = 2, *, budget_mib: int = 700) -> Run:
    """A comparison of every hand-written configuration."""
    traced = traced_loss(model_of(blocks))
    every = baselines(traced.graph)
    rows = tuple(Row(b.name, figures(n)) for n, b in enumerate(every))
    model = describe_model(traced, {b.name: b.configuration for b in every if not b.compiler_rematerializes})
    record = Comparison("tpu-v5e", rows, budget_bytes=budget_mib * MIB, model=model)
    return run("compare", record.to_json())


@cache
def plan(blocks: int = 2) -> Run:
    """A plan, which is per-block under another name, beside two configurations."""
    traced = traced_loss(model_of(blocks))
    every = {b.name: b.configuration for b in baselines(traced.graph)}
    document = _document(traced, every["per-block"])
    rows = [Row(name, figures(n)).to_json() for n, name in enumerate(("plain", "dots"))]
    shown = {name: every[name] for name in ("plain", "dots")}
    record = {
        **record_of(document),
        "measured": figures(6, limit_bytes=700 * MIB, fits_limit=True).to_json(),
        "baselines": rows,
        "model": describe_model(traced, {**shown, "plan": every["per-block"]}).to_json(),
        "findings": [_finding()],
    }
    return run("plan", PlanRecord(**record).to_json())


@cache
def frontier(blocks: int = 2, *, points: int = 4) -> Run:
    """A frontier of so many plans and all hand-written configurations."""
    traced = traced_loss(model_of(blocks))
    every = baselines(traced.graph)
    plans = [every[1 + n % (len(every) - 2)].configuration for n in range(points)]
    made = tuple(
        FrontierPoint((931 - 40 * n) * MIB, figures(n), _document(traced, plans[n])) for n in reversed(range(points))
    )
    rows = tuple(Row(b.name, figures(n)) for n, b in enumerate(every))
    shown = {b.name: b.configuration for b in every if not b.compiler_rematerializes}
    shown |= {f"point {n}": plans[points - 1 - n] for n in range(points)}
    return run("frontier", Frontier("tpu-v5e", made, rows, describe_model(traced, shown)).to_json())


def hostile() -> Run:
    """A plan of a model whose names, lines and messages are written to break a page."""
    made = plan()
    text = str(made.to_json())
    assert "blocks/*" in text
    record = _renamed(dict(made.record))
    rows = [
        {**row, "name": f"{row['name']}{QUOTED}" if row["name"] == "dots" else row["name"]}
        for row in record["baselines"]
    ]
    return run("plan", {**record, "baselines": rows})


def run(verb: str, record: dict[str, Any]) -> Run:
    return Run(verb, (verb, "gpt", "blocks=2"), {"jax": "0.10.2", "rematplan": "0.1.0"}, "tpu-v5e", record)


def _renamed(value: Any) -> Any:
    """Every module, name, line and message with a script in it."""
    if isinstance(value, dict):
        return {key: _renamed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item) for item in value]
    if isinstance(value, str):
        return (
            value.replace("attn", HOSTILE)
            .replace("mlp/up", QUOTED)
            .replace("_gpt.py", f"</script>{HOSTILE}")
            .replace("paragraph", HOSTILE)
        )
    return value


def _finding() -> dict[str, Any]:
    finding = Finding("whole-region", "one paragraph about it", "blocks/0/attn", "_gpt.py:53 (f)", bytes=5 * MIB)
    return {**vars(finding)}


def _document(traced: Any, configuration: Any) -> dict[str, Any]:
    regions, loops = describe(configuration, traced.graph, {i: b.graph for i, b in traced.bodies.items()})
    return Plan(
        regions=regions,
        loops=loops,
        fingerprint=traced.graph.fingerprint,
        modules=module_fingerprints(traced.graph),
        name="gpt",
        target="tpu-v5e",
        budget_bytes=700 * MIB,
        status="fits",
        predicted={"required_bytes": 695 * MIB, "peak_bytes": 655 * MIB, "seconds": 0.0301, "source": "probed"},
        bound={"seconds": 0.029, "gap": 0.011, "basis": "no plan is faster", "not_covered": "other places"},
        notes=("chosen: regions of one block",),
    ).to_json()
