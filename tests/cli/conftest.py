"""The command line in this process, and files with factories as a user would write them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rematplan.cli import main


@dataclass(frozen=True)
class Result:
    """What one command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capfd, monkeypatch) -> Callable[..., Result]:
    """Runs a command line: `cli("measure", "gpt", "--target", "cpu")`."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Result:
        capfd.readouterr()
        code = main(words)
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def imports_undone(monkeypatch) -> Iterator[None]:
    """What a test imports by a name that begins with `users_`, and where it was looked for, is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


@pytest.fixture
def factory_file(tmp_path, imports_undone) -> Callable[[str], Path]:
    """Writes a module with factories and returns its path; what it imports and registers is undone afterwards."""

    def write(source: str, name: str = "users_model.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write
