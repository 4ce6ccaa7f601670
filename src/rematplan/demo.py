"""The main job on built-in models: plans for three budgets beside what people write by hand, verified.

Comes in: a folder. Goes out: a record, and in the folder every plan, one run record and one HTML report a model, and a text
report. On a TPU compiler the hand-written configurations are probed (memory exact to a few percent, no cycles) and only those
that the sentences speak of are compiled, because a full compile takes the better part of a minute; rows say which they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rematplan import _compare, _measure, _verify, search, workloads
from rematplan._plan import Plan
from rematplan.errors import InfeasibleBudget, VerificationFailed
from rematplan.records import Comparison, Demo, DemoRun, Verification, plain
from rematplan.report.document import html_document
from rematplan.report.figures import fits
from rematplan.report.files import write_text
from rematplan.report.run import Run, to_text, versions
from rematplan.report.summary import what_was_won
from rematplan.report.terminal import render_text
from rematplan.target.compiler import Method
from rematplan.target.measurement import Source
from rematplan.target.target import Kind, Target, resolve, targets
from rematplan.units import format_bytes
from rematplan.workload import Workload

Progress = Callable[[str], None]

PREFERRED_TARGET = "tpu-v5e"
_MIB = 1 << 20
_REPORT_COLUMNS = 120
_ATTEMPTS = 4
_GROWTH = 1.01  # of a budget that was just missed


@dataclass(frozen=True)
class Scene:
    """One model and the budgets it is planned for, as shares of what it needs without checkpointing.

    Attributes:
      words: the model on the command line.
    """

    name: str
    description: str
    make: Callable[[], Workload]
    shares: tuple[float, ...]
    words: tuple[str, ...]


SCENES = (
    Scene(
        "mlp", "a deep multilayer perceptron", lambda: workloads.mlp(blocks=4), (0.6, 0.75, 0.9), ("mlp", "blocks=4")
    ),
    Scene(
        "policy_mlp",
        "two layers, where a policy decides",
        lambda: workloads.policy_mlp(features=512, batch=4096),
        (1.2, 1.6, 2.2),  # two layers need what they need: with more than that, what to save is the question
        ("policy_mlp", "features=512", "batch=4096"),
    ),
    Scene("gpt", "a small language model", lambda: workloads.gpt(blocks=4), (0.4, 0.6, 0.85), ("gpt", "blocks=4")),
)


def demo_target() -> Target:
    """The TPU if its compiler is installed, else the CPU."""
    installed = {info.name for info in targets() if info.installed}
    return resolve(PREFERRED_TARGET if PREFERRED_TARGET in installed else "cpu")


def run_demo(out: Path, *, progress: Progress, scenes: Sequence[Scene] = SCENES, target: Target | None = None) -> Demo:
    """Plans the scenes and writes the results to the folder `out` as they come, over those of an earlier demo.

    Raises:
      VerificationFailed: a plan does not compute the same as its model.
    """
    chosen = target or demo_target()
    out.mkdir(parents=True, exist_ok=True)
    runs: list[DemoRun] = []
    for scene in scenes:

        def say(message: str, scene: Scene = scene) -> None:
            progress(f"{scene.name}: {message}")

        runs.append(_run_scene(scene, chosen, out, say))
        _write(out / f"{scene.name}.run.json", "demo", chosen, Demo((runs[-1],)))
    record = Demo(tuple(runs))
    text = render_text("demo", record.to_json(), columns=_REPORT_COLUMNS)
    write_text(out / "report.txt", text + "\n", force=True)
    return record


def _run_scene(scene: Scene, target: Target, out: Path, say: Progress) -> DemoRun:
    work = scene.make()
    quick = Method.PROBE if target.kind is Kind.TPU else Method.COMPILE
    compared = _compare.compare(work, target=target, method=quick, progress=say)
    unchecked = next(row for row in compared.rows if row.name == "plain").measurement.required_bytes
    plans = _plans(work, target, [max(int(share * unchecked) // _MIB, 1) * _MIB for share in scene.shares], say)
    baselines = _with_compiled(work, compared, target, plans, say)
    checks = [_verified(work, plan, say) for plan in plans]
    rows: list[dict[str, Any]] = []
    for plan in plans:
        assert plan.budget_bytes is not None
        assert plan.measurement is not None  # a plan that was just made has one
        figures = plain(plan.measurement.to_json())
        name = f"plan in {format_bytes(plan.budget_bytes)}"
        rows.append({**figures, "name": name, "budget": plan.budget_bytes})
        file = f"{scene.name}-{plan.budget_bytes // _MIB}MiB.plan.json"
        write_text(out / file, json.dumps(plan.to_json(), indent=1) + "\n", force=True)
    _write_page(out / f"{scene.name}.report.html", scene, plans[0])
    smallest = rows[0]
    return DemoRun(
        workload=work.name,
        target=target.name,
        description=scene.description,
        baselines=tuple(baselines),
        plans=tuple(rows),
        verified=_proved(checks),
        sentence=what_was_won(
            smallest, baselines, budget_bytes=smallest["budget"], name=f"For {scene.name}, the {smallest['name']}"
        ),
    )


def _plans(work: Workload, target: Target, budgets: Sequence[int], say: Progress) -> list[Plan]:
    """A plan for each budget, smallest first; a budget that cannot be met is replaced by the smallest that can."""
    found: dict[int, Plan] = {}
    for budget in budgets:
        plan = _plan_at_least(work, target, budget, say)
        found.setdefault(plan.budget_bytes or budget, plan)
    return [found[budget] for budget in sorted(found)]


def _plan_at_least(work: Workload, target: Target, budget: int, say: Progress) -> Plan:
    """The plan for a budget, or for the smallest that can be met; what is said to be the smallest may be a little less.

    Raises:
      InfeasibleBudget: the figure was wrong by more than a little.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return search.plan(work, budget=budget, target=target, finalists=1, progress=say)
        except InfeasibleBudget as error:
            least = max(error.minimum_bytes, int(budget * _GROWTH))
            budget = -(-least // _MIB) * _MIB
    return search.plan(work, budget=budget, target=target, finalists=1, progress=say)


def _with_compiled(
    work: Workload, compared: Comparison, target: Target, plans: Sequence[Plan], say: Progress
) -> list[dict[str, Any]]:
    """The rows of a comparison, those that the plans are held against compiled in full.

    These are `plain` and, for the smallest budget, the fastest probed configuration that fits.
    """
    rows = {row.name: row.to_json() for row in compared.rows}
    budget = plans[0].budget_bytes or 0
    fitting = [name for name, row in rows.items() if name != "plain" and fits(row, budget) and row.get("seconds")]
    wanted = ["plain", *sorted(fitting, key=lambda name: rows[name]["seconds"])[:1]]
    for name in wanted:
        if rows[name]["source"] != Source.COMPILED.value:
            full = _measure.measure(work, target=target, policy=name, progress=say)
            rows[name] = {"name": name, "note": rows[name]["note"], **plain(full.to_json())}
    return list(rows.values())


def _verified(work: Workload, plan: Plan, say: Progress) -> Verification:
    say(f"verifying the plan for {format_bytes(plan.budget_bytes or 0)}")
    verification = _verify.verify(work, plan=plan, progress=say)
    if not verification.passed:
        raise VerificationFailed(f"the plan for {work.name} is wrong: {' '.join(verification.differences)}")
    return verification


def _proved(checks: Sequence[Verification]) -> str:
    """One sentence about the verifications, all of which passed."""
    errors = [e for check in checks for e in (check.outputs_max_error, check.gradients_max_error) if e is not None]
    agree = f"agree within {max(errors):.1g}" if any(errors) else "are equal"
    numbers = f"; outputs and gradients {agree} (size: {checks[0].size})" if errors else ""
    count = f"{len(checks)} plans" if len(checks) > 1 else "1 plan"
    return f"Verified: {count}, the same program without remat and names{numbers}."


def _write_page(path: Path, scene: Scene, plan: Plan) -> None:
    """The HTML report of a plan, as the command that it shows would make it."""
    words = (*scene.words, "--budget", str(plan.budget_bytes), "--target", plan.target)
    run = Run("plan", ("plan", *words), versions(), plan.target, plan.record().to_json())
    write_text(path, html_document(run), force=True)


def _write(path: Path, verb: str, target: Target, record: Demo) -> None:
    run = Run(verb=verb, command=("demo",), versions=versions(), target=target.name, record=record.to_json())
    write_text(path, to_text(run.to_json()), force=True)
