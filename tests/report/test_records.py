"""Records: totals add up, keys are the contract's, and every document is valid under its schema."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

from rematplan.records import (
    Comparison,
    Finding,
    FitPoint,
    FitRecord,
    FitRow,
    Frontier,
    FrontierPoint,
    Inspection,
    PlanRecord,
    Refused,
    Residual,
    Row,
    SkippedValue,
    Verification,
    plain,
)
from rematplan.report.run import Run, from_document, read_document, to_text
from rematplan.report.schemas import kinds, schema
from rematplan.report.terminal import render_text
from tests.report.measurements import MIB, measurement

SHAPE = (16, 512, 512)
PLAN = {
    "format": "rematplan/plan",
    "version": 1,
    "regions": [{"first": "a", "last": "b", "saved": ["c"], "module": "blocks/0", "prevent_cse": True}],
    "loops": [],
    "fingerprint": "abc",
    "target": "tpu-v5e",
    "budget_bytes": 600 * MIB,
    "predicted": {},
    "measured": {},
}


def residual(module: str, *, mib: int = 8, operation: str = "dot_general") -> Residual:
    return Residual(mib * MIB, SHAPE, "bfloat16", module, operation, "gpt.py:30 (attend)")


INSPECTION = Inspection(
    residuals=(
        residual("blocks/0/attn"),
        residual("blocks/10/attn"),
        residual("norm2"),
        residual("blocks/1/mlp", operation="exp"),
    ),
    arguments=(residual("", mib=1, operation="argument"),),
    findings=(Finding("whole-region", "one region saves nothing"),),
)
FIT = FitRecord(
    workload="gpt",
    keywords={"blocks": 6, "dtype": "bfloat16"},
    vary="batch",
    low=1,
    high=None,
    multiple_of=1,
    slowdown=1.1,
    rows=(
        FitRow(
            target="tpu-v5e:2x2",
            memory_bytes=16000 * MIB,
            device_count=4,
            budget_bytes=2048 * MIB,
            plain=FitPoint(20, True, 2000 * MIB, 0.02, 0.02, "probed", clock="cycles"),
            plain_above=FitPoint(21, False, 2100 * MIB, 0.021, 0.021, "probed", "needs too much", "cycles"),
            best=FitPoint(40, True, 2040 * MIB, 0.05, 0.048, "compiled", clock="cycles"),
            above=FitPoint(41, False, 2080 * MIB, None, None, "probed", "needs too much"),
            plan=PLAN,
            price_per_hour=1.2,
            tried=(FitPoint(40, True, 2040 * MIB, 0.05, 0.048, "compiled", clock="cycles"),),
            probes=50,
            compiles=3,
            search_seconds=200.0,
        ),
        FitRow(
            target="cpu",
            memory_bytes=None,
            device_count=1,
            budget_bytes=100 * MIB,
            plain=None,
            plain_above=FitPoint(1, False, None, None, None, "compiled", "the compiler refused the program"),
            best=None,
            above=FitPoint(1, False, 200 * MIB, None, None, "compiled", "its smallest plan needs 200 MiB of 100 MiB"),
            plan=None,
            price_per_hour=0.1,
            tried=(),
            probes=20,
            compiles=0,
            search_seconds=10.0,
        ),
    ),
    skipped=(SkippedValue(3, "not a multiple"),),
)
RECORDS = [
    FIT,
    INSPECTION,
    measurement(),
    measurement(seconds=None, flops=float("nan")),
    Comparison("tpu-v5e", (Row("plain", measurement()),), budget_bytes=MIB, refused=(Refused("dots", "crashed"),)),
    PlanRecord(
        plan=PLAN,
        predicted={"peak_bytes": 560 * MIB, "seconds": 0.022},
        measured=measurement().to_json(),
        baselines=(Row("plain", measurement()).to_json(),),
        bound={"seconds": 0.02},
        budget_bytes=600 * MIB,
        status="fits",
    ),
    Frontier("tpu-v5e", (FrontierPoint(600 * MIB, measurement(), PLAN),)),
    Verification(True, 1e-7, None, True, True, True, {"float32": 1e-5}, "batch 16 -> 2"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.KIND)
def test_every_record_is_valid_under_its_schema(record):
    document = json.loads(json.dumps(plain(record.to_json()), allow_nan=False))
    errors = jsonschema.Draft202012Validator(schema(record.KIND)).iter_errors(document)
    assert [error.message for error in errors] == []


@pytest.mark.parametrize("kind", kinds())
def test_schemas_are_schemas_and_refuse_an_empty_document(kind):
    jsonschema.Draft202012Validator.check_schema(schema(kind))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, schema(kind))


def test_inspection_totals_add_up():
    document = INSPECTION.to_json()
    assert document["total_bytes"] == sum(r["bytes"] for r in document["residuals"]) == 32 * MIB
    assert document["total_bytes"] == sum(g["bytes"] for g in document["groups"])
    assert document["argument_bytes"] == MIB


def test_groups_fold_list_positions_only():
    groups = {(group.module, group.operation): group for group in INSPECTION.groups()}
    assert set(groups) == {("blocks/*/attn", "dot_general"), ("norm2", "dot_general"), ("blocks/*/mlp", "exp")}
    assert groups["blocks/*/attn", "dot_general"].count == 2
    assert INSPECTION.groups()[0].bytes == 16 * MIB


def test_numbers_that_json_cannot_hold_become_null():
    assert plain({"a": float("inf"), "b": (1.5, float("nan"))}) == {"a": None, "b": [1.5, None]}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (jnp.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("float32"), "float32"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float32("inf"), None),
        (jnp.float32(0.5), 0.5),
        (jnp.tanh, "tanh"),
        (Path("a/b"), "a/b"),
        ((1, [None, {"k": np.int32(2)}]), [1, [None, {"k": 2}]]),
        (frozenset({1}), "frozenset({1})"),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_whatever_a_factory_takes_can_be_written(given, written):
    record = replace(FIT, keywords={"given": given})
    document = json.loads(to_text(record.to_json()))
    assert document["keywords"] == {"given": written}
    jsonschema.validate(document, schema("fit"))
    assert "40" in render_text("fit", document)
    assert "40" in str(record)


def test_run_record_is_read_back_as_it_was(tmp_path):
    run = Run("measure", ("measure", "gpt"), {"jax": "0.10.2"}, "tpu-v5e", plain(measurement().to_json()))
    jsonschema.validate(run.to_json(), schema("run"))
    path = tmp_path / "run.json"
    path.write_text(to_text(run.to_json()))
    assert from_document(read_document(path), name="run.json") == run


def test_what_fits_is_priced_with_all_devices():
    row = FIT.rows[0]
    assert row.throughput == pytest.approx(800)
    assert row.cost_per_million == pytest.approx(4 * 1.2 / 3600 / 800 * 1e6)
    assert row.best is not None and row.best.slowdown == pytest.approx(0.05 / 0.048)
    assert FIT.smallest == FIT.cheapest == "tpu-v5e:2x2"
    shown = render_text("fit", FIT.to_json(), columns=120)
    assert re.search(r"tpu-v5e:2x2 .* 20 +40 .*\+4\.2% +800 +1\.67$", shown, re.MULTILINE)
    assert "cpu: batch=1 does not fit: its smallest plan needs 200 MiB of 100 MiB (compiled)." in shown
    assert "refused by the model: 1 of the values, first 3: not a multiple" in shown
    assert "<pre" in FIT._repr_html_()
