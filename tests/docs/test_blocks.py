"""What pages show and Sphinx does not run: every Python block runs, every `rematplan` command line exits with 0, and what
make and pip are told to do exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from rematplan.cli import main
from tests.docs.pages import FENCE, PAGES, ROOT

# Built-in models as small as they get: what is tested is that the words are right.
SMALL = {
    "gpt": "blocks=1 features=32 heads=2 length=16 batch=2 vocabulary=64",
    "mlp": "blocks=2 features=32 batch=8",
    "policy_mlp": "features=32 batch=8",
}
# The user's own file, as pages name it.
TRAIN = """
import rematplan as rp
from rematplan import workloads


def make_workload(batch: int = 8) -> rp.Workload:
    return workloads.mlp(blocks=2, features=32, batch=batch)
"""
FENCES = {"python", "bash", "{code-cell} ipython3", "{eval-rst}", "{toctree}"}


def _linear_loss(model, x):
    return (model(x) ** 2).mean()


def given() -> dict[str, Any]:
    """Names that a page may use without defining them: the reader's own loss, model and batch."""
    return {"loss_fn": _linear_loss, "model": nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "batch": jnp.ones((4, 8))}


def command_lines() -> list[tuple[str, list[str]]]:
    """Every line of every shell block with the page it stands on, comments left out."""
    found = []
    for page in PAGES:
        for block in page.blocks("bash"):
            lines = [shlex.split(line, comments=True) for line in block.splitlines()]
            found += [(page.name, words) for words in lines if words]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p.blocks("python")], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = given()
    known = {*names, "__builtins__"}
    for block in page.blocks("python"):
        exec(block, names)
    assert names.keys() - known  # what a page shows is not empty, nor a comment


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({name for name, words in command_lines() if words[0] == "rematplan"}))
def test_rematplan_command_lines_run(page, tmp_path, monkeypatch, capfd):
    """In order, in one folder: what one line writes the next may read."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    for words in [words for name, words in command_lines() if name == page and words[0] == "rematplan"]:
        # a frontier compiles many plans in full
        named = ["mlp" if words[1] == "frontier" and word == "gpt" else word for word in words[1:]]
        small = [each for word in named for each in (word, *SMALL.get(word, "").split())]
        code = main(small)
        assert code == 0, f"{shlex.join(small)}: {capfd.readouterr().err}"


def test_other_command_lines_name_what_there_is():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page, words in command_lines():
        line = f"{page}: {shlex.join(words)}"
        if words[0] == "make":
            assert [w for w in words[1:] if "=" not in w], line
            assert {w for w in words[1:] if "=" not in w} <= targets, line
        elif words[:2] == ["pip", "install"]:
            (package,) = words[2:]
            name, _, asked = package.rstrip("]").partition("[")
            assert name == "rematplan", line
            assert set(asked.split(",")) <= extras.keys(), line
        elif words[0] == "python" and words[1] == "-m":
            assert importlib.util.find_spec(words[2]), line
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), line
        else:
            assert words[0] == "rematplan", line


def test_cells_are_formatted(tmp_path):
    """`ruff format` looks at Python fences in Markdown, but not at cells."""
    for page in PAGES:
        for number, cell in enumerate(page.blocks("{code-cell} ipython3")):
            code = re.sub(r"\A(:.*\n)+\n?|\A%%writefile .*\n", "", cell)
            if not code.startswith("%%"):
                (tmp_path / f"{page.name}_{number}.py").write_text(code)
    settings = ["--config", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "ruff", "format", "--check", *settings, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_block_escapes():
    """A fence of another kind would be shown and never run."""
    for page in PAGES:
        for info, _ in FENCE.findall(page.text):
            documented_elsewhere = page.name == "findings" and info.split()[0] == "python"
            assert info in FENCES or documented_elsewhere, f"{page.name}: {info}"
            assert page.executed or "code-cell" not in info, f"{page.name} is not executed"
