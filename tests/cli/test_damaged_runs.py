"""Run files that were cut short or edited: every verb that reads them shows them or refuses them, and blames the file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rematplan.report.run import to_text
from tests.report import runs
from tests.report.test_records import RECORDS

MISSING = object()
DAMAGES = (MISSING, None, -1.5, "x", [], {}, ["a"], {"a": 1}, True, float("inf"), "\ud800")
READ = {0, 2, 4}
RUNS = [
    runs.run("measure", runs.figures(3).to_json()),
    runs.comparison(),
    runs.plan(),
    *[runs.run(record.KIND, record.to_json()) for record in RECORDS],
]
EACH = 12  # damages of a run
VERBS = (("show",), ("show", "--json"), ("report",))


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of a document, and the first item of every list."""
    keys = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def damaged(document: dict[str, Any], place: tuple[Any, ...], new: Any) -> dict[str, Any]:
    copied = copy.deepcopy(document)
    at = copied
    for key in place[:-1]:
        at = at[key]
    if new is MISSING:
        del at[place[-1]]
    else:
        at[place[-1]] = new
    return copied


def assert_refused_or_shown(result) -> None:
    assert result.code in READ, result.err
    assert "internal error" not in result.err
    assert bool(result.out) == (result.code == 0)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_anything_else_in_one_place(cli, tmp_path, number):
    document = json.loads(to_text(RUNS[number].to_json()))
    chosen = random.Random(number)
    heads = [(key,) for key in document]
    deep = list(places(document["record"], ("record",)))
    for place in (*heads, *chosen.sample(deep, min(EACH, len(deep)))):
        file = tmp_path / "run.json"
        file.write_text(json.dumps(damaged(document, place, chosen.choice(DAMAGES))))
        assert_refused_or_shown(cli(*chosen.choice(VERBS), str(file)))


@pytest.mark.parametrize(
    ("run", "place", "new", "words"),
    [
        (RUNS[0], ("record", "target"), MISSING, ("show",)),
        (RUNS[0], ("verb",), "no such verb", ("show",)),
        (RUNS[0], ("record", "target"), "\ud800", ("show", "--json")),
        (runs.run("verify", RECORDS[-1].to_json()), ("record", "size"), 3.5, ("report",)),  # rich shows texts only
        (runs.comparison(), ("record", "refused"), "x", ("report", "-o", "page.html")),  # nor does the page's template
    ],
)
def test_renderers_have_errors_of_their_own(cli, tmp_path, monkeypatch, run, place, new, words):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(damaged(json.loads(to_text(run.to_json())), place, new)))
    result = cli(words[0], str(file), *words[1:])
    assert (result.code, result.out) == (2, "")
    assert f"the record in {file} cannot be read" in result.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("verb", ["show", "report"])
@pytest.mark.parametrize(
    "text",
    ['{"format": "rematplan-run"', '{"format": "rematplan-run", "x": ' + "[" * 100_000, '["rematplan-run"]', "\0", ""],
)
def test_what_is_no_json_object(cli, tmp_path, verb, text):
    file = tmp_path / "run.json"
    file.write_text(text)
    result = cli(verb, str(file))
    assert result.code in {2, 4}, result.err
    assert str(file) in result.err
