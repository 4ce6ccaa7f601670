"""The examples hold what they say: each is a script full of assertions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rematplan.cli import main
from rematplan.cli.workloads import load_workload
from tests.nnx.train_steps import per_block

# the sizes of `train_gpt.py` when it is run without more
TRAINED = ("batch=4", "microbatches=2", "blocks=2", "features=32", "length=32", "dtype=float32")

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *targets: str) -> str:
    """What an example prints. Its assertions make it exit with an error."""
    result = subprocess.run([sys.executable, str(EXAMPLES / name), *targets], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_remat_around_a_model():
    shown = run("nnx_remat.py", "cpu")
    assert "kernels differ, biases are all zero" in shown
    assert "a region per layer 64.0 KiB" in shown  # 8 layers of 32 x 64 in float32
    assert "16 layers of 1024, batch 8192, on cpu" in shown
    assert "less time than a region per layer" in shown


def test_policies():
    shown = run("nnx_remat_policy.py", "cpu")
    assert "5 with the policy, as without remat; 7 with the bare form" in shown
    assert "policy 24.0 KiB, bare 8.00 KiB" in shown


@pytest.mark.slow
def test_remat_on_a_chip():
    shown = run("nnx_remat.py", "tpu-v5e")
    assert "Plan for tpu-v5e" in shown
    assert "less time than a region per layer" in shown


@pytest.mark.slow
def test_policies_on_two_chips():
    lines = run("nnx_remat_policy.py", "tpu-v5e", "gpu-h100").splitlines()
    for target, source in (("tpu-v5e", "cycles"), ("gpu-h100", "roofline")):
        assert len([line for line in lines if target in line and f"({source})" in line]) == 3


def losses(shown: str) -> dict[str, str]:
    """What a training said, by step and kind; text, so that equal means equal."""
    return dict(line.rsplit(" ", 1) for line in shown.splitlines())


def test_training_with_a_plan_interrupted_and_resumed(tmp_path):
    plan, folder = tmp_path / "plan.json", tmp_path / "checkpoints"
    per_block(load_workload(f"{EXAMPLES / 'train_gpt.py'}:workload", TRAINED)).save(plan)
    given = ("--dtype", "float32", "--steps", "20", "--every", "5")
    plain = losses(run("train_gpt.py", *given))
    assert list(plain)[4:6] == ["step 5 loss", "step 5 evaluation"]
    assert len(plain) == 20 + 4
    assert float(plain["step 20 loss"]) < 0.6 * float(plain["step 1 loss"])
    assert float(plain["step 20 evaluation"]) < 0.75 * float(plain["step 5 evaluation"])

    planned = (*given, "--plan", str(plan), "--checkpoints", str(folder))
    first = losses(run("train_gpt.py", *planned, "--until", "13"))
    rest = losses(run("train_gpt.py", *planned))
    assert (len(first), next(iter(rest)), len(rest)) == (13 + 2, "step 11 loss", 10 + 2)
    again = first.keys() & rest.keys()
    assert len(again) == 3  # steps after the last checkpoint run once more
    assert {step: first[step] for step in again} == {step: rest[step] for step in again}
    # measured: no difference at all in float32; another version of XLA may fuse differently
    assert {k: float(v) for k, v in (first | rest).items()} == pytest.approx(
        {k: float(v) for k, v in plain.items()}, rel=1e-5
    )


@pytest.mark.slow
def test_the_plan_for_the_training_is_for_its_whole_step(tmp_path, capfd):
    name, plan = f"{EXAMPLES / 'train_gpt.py'}:workload", tmp_path / "plan.json"
    assert main(["plan", name, *TRAINED, "--target", "cpu", "--budget", "1700KiB", "-o", str(plan)]) == 0
    capfd.readouterr()
    assert main(["measure", name, *TRAINED, "--target", "cpu", "--plan", str(plan), "--json"]) == 0
    needed = json.loads(capfd.readouterr().out)["required_bytes"]
    assert needed == json.loads(plan.read_text())["measured"]["required_bytes"] <= 1700 << 10
    shown = losses(run("train_gpt.py", "--dtype", "float32", "--steps", "3", "--plan", str(plan)))
    assert len(shown) == 3


def test_every_example_is_run():
    text = Path(__file__).read_text()
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 3
    assert all(f'run("{name}"' in text for name in names)
