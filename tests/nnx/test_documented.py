"""docs/nnx.md says what the conformance suite checks, and its program runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.nnx.cases import CASES

TEXT = (Path(__file__).parents[2] / "docs" / "nnx.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| works \|$", re.MULTILINE)


def test_every_case_is_in_the_table_with_what_nnx_remat_does():
    rows = dict(ROW.findall(TEXT))
    assert set(rows) == set(CASES)
    for name, result in rows.items():
        failure = CASES[name].nnx_remat
        assert result.startswith("works" if failure is None else f"`{failure.__name__}`"), name


def test_its_program_takes_the_state_out():
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)
    written = np.asarray(names["model"].norm.mean[...])
    assert np.isfinite(written).all()
    assert np.abs(written).max() > 0
