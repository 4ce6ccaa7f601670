"""The verb fit: a valid document, the plan of the largest, several targets, and words that mean nothing."""

from __future__ import annotations

import json
from functools import partial

import jsonschema
import pytest

import rematplan as rp
from rematplan.cli.fit import parse_prices, parse_range
from rematplan.errors import InputError
from rematplan.report.schemas import schema

MODEL = ("mlp", "blocks=2", "features=32")
CPU = ("--target", "cpu", "--budget", "300KiB")
RANGE = ("--vary", "batch=64..4096", "--multiple-of", "64")


def test_the_largest_batch_and_its_plan(cli, tmp_path):
    plan, run = tmp_path / "plan.json", tmp_path / "run.json"
    result = cli("fit", *MODEL, *CPU, *RANGE, "--json", "-o", str(plan), "--run", str(run))
    assert result.code == 0, result.err
    record = json.loads(result.out)
    jsonschema.validate(record, schema("fit"))
    (row,) = record["rows"]
    assert row["plain"]["value"] < row["best"]["value"] == row["above"]["value"] - 64
    assert row["best"]["required_bytes"] <= 300 << 10 < row["above"]["required_bytes"]
    assert record["smallest"] == "cpu" and record["cheapest"] is None
    assert json.loads(plan.read_text()) == row["plan"]
    measured = cli("measure", *MODEL, f"batch={row['best']['value']}", "--target", "cpu", "--plan", str(plan), "--json")
    assert json.loads(measured.out)["required_bytes"] == row["best"]["required_bytes"]
    shown = cli("show", str(run))
    assert f"cpu: batch={row['best']['value']} needs" in shown.out
    assert f"batch={row['above']['value']} does not fit: its smallest plan needs" in shown.out
    page = tmp_path / "page.html"
    assert cli("report", str(run), "-o", str(page)).code == 0
    assert "does not fit" in page.read_text()


def test_a_target_on_which_nothing_fits_is_a_row_beside_one_on_which_it_does(cli):
    """A share of the memory is another budget on each chip."""
    words = ("fit", *MODEL, "--vary", "batch=4194304..4194304", "--budget", "5%")
    targets = ("--target", "gpu-l4", "--target", "gpu-b200", "--price", "gpu-b200=6", "--price", "gpu-l4=0.8")
    result = cli(*words, *targets, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    jsonschema.validate(record, schema("fit"))
    l4, b200 = record["rows"]
    assert l4["best"] is None and l4["plan"] is None and l4["above"]["value"] == 4194304
    assert b200["best"]["value"] == 4194304 and b200["above"] is None
    assert record["smallest"] == record["cheapest"] == "gpu-b200"
    assert l4["cost_per_million"] is None and b200["cost_per_million"] > 0
    shown = cli(*words, *targets).out
    assert "gpu-l4: batch=4194304 does not fit" in shown
    assert "The smallest target that trains batch=4194304: gpu-b200." in shown


def test_a_least_value_that_does_not_fit_ends_with_three(cli):
    result = cli("fit", *MODEL, "--target", "cpu", "--budget", "20KiB", "--vary", "batch=64..")
    assert result.code == 3
    assert result.out == ""
    assert result.err.startswith("error: batch=64 does not fit: ")
    assert "arguments" in result.err and "\n\n" not in result.err.strip()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((*MODEL, *CPU, "--vary", "batch"), "is not a range of a keyword"),
        ((*MODEL, *CPU, "--vary", "batch=1"), "batch=8..512"),
        ((*MODEL, *CPU, "--vary", "batch=..8"), "is not a range"),
        ((*MODEL, *CPU, "--vary", "batch=8..4"), "no value from 8 to 4"),
        ((*MODEL, *CPU, "--vary", "batch=0..4"), "not a positive whole number"),
        ((*MODEL, *CPU, "--vary", "batch=1..", "--multiple-of", "0"), "multiple_of of batch, 0, is not"),
        ((*MODEL, *CPU, "--vary", "depth=1.."), "unexpected keyword argument 'depth'; it takes (*, blocks"),
        ((*MODEL, *CPU, "--vary", "dtype=1.."), "dtype of mlp is not a whole number"),
        ((*MODEL, *CPU, "--vary", "blocks=1.."), "blocks is both varied and given"),
        ((*MODEL, "depth=3", *CPU, "--vary", "batch=1.."), "unexpected keyword argument 'depth'"),
        ((*MODEL, *CPU, "--vary", "batch=1..", "--slowdown", "-1"), "a slowdown of -1 is not possible"),
        ((*MODEL, "--target", "cpu", "--vary", "batch=1.."), "cpu has no memory figure"),
        ((*MODEL, "--target", "local", "--budget", "1GiB", "--vary", "batch=1.."), "runs what it measures"),
        ((*MODEL, *CPU, "--target", "cpu", "--vary", "batch=1.."), "given twice"),
        ((*MODEL, *CPU, "--vary", "batch=1..", "--price", "cpu"), "'cpu' is not a price"),
        ((*MODEL, *CPU, "--vary", "batch=1..", "--price", "cpu=free"), "is not a price"),
        ((*MODEL, *CPU, "--vary", "batch=1..", "--price", "cpu=1", "--price", "cpu=2"), "two prices"),
        ((*MODEL, *CPU, "--vary", "batch=1..", "--price", "gpu-l4=1"), "none of the targets"),
        ((*MODEL, *CPU, "--target", "gpu-l4", "--vary", "batch=1..", "-o", "plan.json"), "the plan of one target"),
        (("absent:make", "--target", "tpu-v5q", "--vary", "batch=1.."), "nearest: tpu-v5"),
        (("absent:make", "--target", "tpu-v5e", "--budget", "1TiB", "--vary", "batch=1.."), "more than tpu-v5e has"),
    ],
)
def test_words_that_mean_nothing(cli, words, complaint):
    result = cli("fit", *words)
    assert result.code == 2, result.err
    assert result.out == ""
    assert complaint in result.err
    assert result.err.startswith("error: ") and "Traceback" not in result.err


@pytest.mark.parametrize("words", [("--target", "cpu"), ("--vary", "batch=1..")])
def test_both_target_and_range_are_asked_for(cli, words):
    result = cli("fit", *MODEL, *words)
    assert result.code == 2
    assert "--help" in result.err


def test_an_error_inside_the_factory_shows_the_users_own_line(cli, factory_file):
    path = factory_file("""
        def make(batch):
            return undefined_name
    """)
    result = cli("fit", f"{path}:make", *CPU, "--vary", "batch=1..2")
    assert result.code == 2
    assert f"{path}:3 in make: return undefined_name" in result.err


ERRORS = {
    "raise MemoryError('no room')": "MemoryError: no room",
    "undefined_name": "NameError: name 'undefined_name' is not defined",
    "{}['key']": "KeyError: 'key'",
    "import users_missing": "ModuleNotFoundError: No module named 'users_missing'",
    "raise RuntimeError": "RuntimeError: no message",
    "import sys; sys.exit(3)": "called sys.exit(3)",
}


@pytest.mark.parametrize("first", [1, 64])
@pytest.mark.parametrize("raised", [*ERRORS, "raise ValueError('odd')", "raise TypeError('odd')"])
def test_only_what_is_about_a_value_leaves_it_out_and_anything_else_ends_it(cli, factory_file, tmp_path, first, raised):
    """At the first value and at a later one, through the command line and the interface alike."""
    marks = tmp_path / "called"
    path = factory_file(f"""
        import rematplan.workloads
        def make(batch):
            with open({str(marks)!r}, "a") as file:
                file.write("x")
            if {first} <= batch != 256:
                {raised}
            return rematplan.workloads.mlp(blocks=2, features=32, batch=batch)
    """)
    words = ("--target", "cpu", "--budget", "1GiB", "--vary", "batch=32..256", "--multiple-of", "32", "--json")
    result = cli("fit", f"{path}:make", *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        make = __import__("users_model").make
    directly = partial(rp.fit, make, vary="batch", low=32, high=256, multiple_of=32, targets="cpu", budget="1GiB")
    if raised not in ERRORS and first == 64:
        skipped = [s["value"] for s in json.loads(result.out)["skipped"]]
        assert result.code == 0 and skipped
        assert skipped == [s.value for s in directly().skipped]
        return
    assert (result.code, result.out) == (2, "")
    assert ERRORS.get(raised, "Error: odd") in result.err
    assert f"{path}:7 in make" in result.err or "sys.exit" in raised
    assert "Begin the range" not in result.err
    # one failing call, after those of smaller values
    assert len(marks.read_text()) == (1 if first == 1 else 2)
    with pytest.raises((Exception, SystemExit)):
        directly()


def test_ranges():
    assert parse_range("batch=1..") == ("batch", 1, None)
    assert parse_range("length=1_024..4_096") == ("length", 1024, 4096)
    for text in ("batch=1...", "batch=1..x", "2x=1..", "batch=1_..2", "=1..2", "batch = 1..2"):
        with pytest.raises(InputError):
            parse_range(text)


def test_prices():
    assert parse_prices(["tpu-v5e=1.20", "gpu-h100:8=3"]) == {"tpu-v5e": 1.2, "gpu-h100:8": 3.0}
