"""Every finding in docs/findings.md: its programs make it appear, and not appear, as they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest

import rematplan as rp
from rematplan import _jax_private, findings
from rematplan.records import Row
from tests.report.measurements import measurement

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "findings.md").read_text()
BLOCK = re.compile(r"```python (\w+)(?: (\w+))?\n(.*?)```", re.DOTALL)
SECTIONS = {s.split("`")[1]: s for s in TEXT.split("\n## ")[1:]}
SETUP = next(code for kind, _, code in BLOCK.findall(TEXT) if kind == "setup")
# Only a compiler near its limit can say this one: see the test below.
BY_FIGURES = {"compiler-rematerializes"}

PROGRAMS = [
    pytest.param(code, kind == "fires", remat, source, id=f"{code} {kind} {number}")
    for code, section in SECTIONS.items()
    for number, (kind, remat, source) in enumerate(BLOCK.findall(section))
]


def reported(source: str) -> list[str]:
    """Codes of what a documented program is told."""
    names: dict[str, Any] = {}
    exec(SETUP + source, names)
    found = names.get("findings")
    if found is None and "work" in names:
        found = rp.inspect(names["work"], policy=names.get("policy")).findings
    return [f.code for f in found or ()]


@pytest.mark.parametrize(("code", "fires", "remat", "source"), PROGRAMS)
def test_a_documented_program(code, fires, remat, source):
    """`remat` is "remat3" or "classic" for what can only be said under one of JAX's two implementations."""
    here = "remat3" if getattr(jax.config, "jax_remat3", False) else "classic"
    if remat and remat != here:
        pytest.skip(f"of {remat} rematerialization only")
    if fires and code == "callable-policy" and _jax_private.kept_by_new_remat(lambda *_, **__: True):
        pytest.skip("this JAX's new rematerialization follows every policy (0.12)")
    assert (code in reported(source)) == fires


def test_every_section_has_both_programs_and_every_code_a_section():
    for code, section in SECTIONS.items():
        kinds = {kind for kind, _, _ in BLOCK.findall(section)}
        assert kinds == ({"fires", "silent"} if code not in BY_FIGURES else set()), code
    package = Path(findings.__file__).parent
    sources = "".join(file.read_text() for file in package.glob("*.py"))
    codes = set(re.findall(r"^ +\"([a-z]+(?:-[a-z]+)+)\",$", sources, re.MULTILINE))
    assert codes == set(SECTIONS)


def test_a_compiler_that_recomputes_by_itself():
    rows = [Row("plain", measurement(flops=1e12)), Row("compiler", measurement(flops=1.1e12, limit_bytes=1 << 30))]
    (finding,) = findings.of_rows(rows, residual_bytes=0)
    assert finding.code == "compiler-rematerializes"
    assert finding.flops == pytest.approx(0.1e12)
    assert "1.00 GiB" in finding.message
    assert findings.of_rows([rows[0], Row("compiler", measurement(flops=1e12))], residual_bytes=0) == ()
