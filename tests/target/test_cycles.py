"""Cycles of probed programs, learned from full measurements."""

from __future__ import annotations

import pytest

from rematplan.target.cache import Cache
from rematplan.target.cycles import CycleTable
from rematplan.target.measurement import InstructionCost
from rematplan.target.target import resolve

V5E = resolve("tpu-v5e")


def kind(name, count=1, cycles=None, seconds=1e-6, similar=""):
    return InstructionCost(name, similar or name, count, cycles, seconds)


def full():
    return (kind("dot", 3, 1000, 1e-6), kind("sum", 2, 3000, 3e-6, similar="sum*"), kind("gather", 1, None, 5e-6))


def probed(costs):
    return tuple(InstructionCost(c.fingerprint, c.similar, c.count, None, c.roofline_seconds) for c in costs)


def test_a_program_that_was_learned_is_predicted_exactly():
    table = CycleTable()
    table.add(full())
    prediction = table.predict(probed(full()))
    assert prediction.cycles == 3 * 1000 + 2 * 3000
    assert prediction.known_fraction == 1.0


def test_counts_of_known_fusions_may_differ():
    table = CycleTable()
    table.add(full())
    assert table.predict([kind("dot", 7), kind("sum", 1)]).cycles == 7 * 1000 + 3000


def test_similar_fusions_stand_in():
    table = CycleTable()
    table.add(full())
    prediction = table.predict([kind("sum in VMEM", 2, similar="sum*"), kind("dot", 6)])
    assert prediction.cycles == 12_000
    assert (prediction.known_fraction, prediction.similar_fraction) == (0.5, 0.5)


def test_unknown_fusions_follow_the_roofline_of_what_is_known():
    table = CycleTable()
    table.add(full())  # 1000 cycles a microsecond, no overhead
    prediction = table.predict([kind("new", 1, seconds=2e-6)])
    assert prediction.cycles == pytest.approx(2000)
    assert prediction.known_fraction == 0.0


def test_a_probe_cannot_be_learned_from():
    with pytest.raises(ValueError, match="full"):
        CycleTable().add(probed(full()))
    with pytest.raises(ValueError, match="yet"):
        CycleTable().predict(full())


def test_tables_of_two_processes_are_joined(tmp_path):
    cache = Cache(tmp_path)
    one, other = CycleTable(), CycleTable()
    one.add(full())
    other.add([kind("conv", 1, 500)])
    one.save(cache, V5E)
    other.save(cache, V5E)
    loaded = CycleTable.load(cache, V5E)
    assert len(loaded) == 4
    assert loaded.predict([kind("conv", 2), kind("dot", 1)]).cycles == 2000
    assert len(CycleTable.load(cache, resolve("tpu-v6e"))) == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "entries": {"a": 3}}', '{"format": 99}'])
def test_damaged_tables_count_as_absent(tmp_path, content):
    cache = Cache(tmp_path)
    table = CycleTable()
    table.add(full())
    table.save(cache, V5E)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert len(CycleTable.load(cache, V5E)) == 0
