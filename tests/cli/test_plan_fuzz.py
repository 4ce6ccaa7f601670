"""Plan files with anything in them: read, or refused with exit code 2 or 4; never a crash, and nothing is executed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rematplan as rp
from rematplan import workloads
from rematplan.cli import main
from rematplan.errors import InputError, PlanMismatch
from tests.cli.test_plan_files import write_plan

REFUSED = {2, 4}
relaxed = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(path, "per-block", saved="layers/1/dot_general")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def work() -> rp.Workload:
    return workloads.mlp(blocks=3, batch=64, features=32)


def shown(path, capsys) -> int:
    code = main(["show", str(path)])
    assert "Traceback" not in capsys.readouterr().err
    return code


@relaxed
@given(content=st.binary(max_size=200))
def test_bytes(tmp_path, capsys, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert shown(path, capsys) in REFUSED
    with pytest.raises(PlanMismatch):
        rp.remat(abs, plan=path)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "\ud800", "1e999", "NaN", "null", '"rematplan/plan"', "{}"]
)
def test_hostile_texts(tmp_path, capsys, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    assert shown(path, capsys) in REFUSED


def inspected(work: rp.Workload, path: Path) -> int:
    """The exit code of `inspect` with a plan file."""
    try:
        return 0 if rp.inspect(work, plan=path).total_bytes >= 0 else 1
    except (PlanMismatch, InputError) as error:
        return error.exit_code


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(p for key, each in inner for p in paths(each, (*here, key)))]


def changed(document: dict[str, Any], path: tuple[Any, ...], new: Any, *, remove: bool) -> Any:
    found = copy.deepcopy(document)
    if not path:
        return new
    at = found
    for key in path[:-1]:
        at = at[key]
    if remove:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return found


@relaxed
@given(data=st.data(), new=anything, remove=st.booleans())
def test_a_plan_with_something_else_in_one_place(tmp_path, capsys, document, work, data, new, remove):
    place = data.draw(st.sampled_from(paths(document)))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed(document, place, new, remove=remove)))
    assert shown(path, capsys) in {0, *REFUSED}
    assert inspected(work, path) in {0, *REFUSED}


@relaxed
@given(data=st.data())
def test_names_of_a_plan_in_other_places(tmp_path, capsys, document, work, data):
    regions = document["regions"]
    names = sorted({n for r in regions for n in (r["first"], r["last"], *r["saved"])} | {"nothing", ""})
    mixed = copy.deepcopy(document)
    for region in mixed["regions"]:
        region["first"], region["last"] = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
        region["saved"] = data.draw(st.lists(st.sampled_from(names), max_size=2))
        region["offloaded"] = data.draw(st.lists(st.sampled_from(names), max_size=1))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(mixed))
    assert shown(path, capsys) == 0
    assert inspected(work, path) in {0, *REFUSED}
