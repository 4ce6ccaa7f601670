"""Errors as other processes read them: of the same kind, with everything that they carry."""

from __future__ import annotations

import json

import pytest

from rematplan import errors, multihost
from rematplan.errors import InfeasibleBudget, RematplanError
from rematplan.records import Finding

KINDS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, RematplanError)]


def read(error: BaseException) -> RematplanError:
    return multihost._read(json.loads(json.dumps(multihost._written(error))), process=0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not InfeasibleBudget])
def test_every_kind(kind):
    there = read(kind("why"))
    assert (type(there), str(there), there.exit_code) == (kind, "process 0: why", kind.exit_code)


def test_a_budget_that_cannot_be_met_keeps_what_it_consists_of_and_why():
    findings = (
        Finding("budget-below-state", "too little", bytes=3),
        Finding("cpu-figures", "rank at best", "a", "b:1"),
    )
    error = InfeasibleBudget("why", minimum_bytes=7, parts={"arguments": 4, "outputs": 3}, findings=findings)
    there = read(error)
    assert vars(there) == vars(error)
    assert str(there) == "process 0: why"


def test_errors_of_others():
    assert str(read(OSError("no space"))) == "process 0: OSError('no space')"
