"""Cycles of probed programs, learned from full measurements."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from rematplan.target.cache import Cache
from rematplan.target.cycles import CycleTable, only_probed
from rematplan.target.measurement import InstructionCost
from rematplan.target.target import resolve
from rematplan.target.work import Work

V5E = resolve("tpu-v5e")
CLOCK = V5E.chip.clock_hz


def kind(name, count=1, cycles=None, reduced=1 << 20):
    work = Work(reduced=float(reduced))
    return InstructionCost(name, count, cycles, 1e-6, dataclasses.astuple(work))


def full():
    return (kind("dot", 3, 1000, 1 << 20), kind("sum", 2, 3000, 3 << 20), kind("gather", 1, None, 5 << 20))


def probed(costs):
    return tuple(dataclasses.replace(c, cycles=None) for c in costs)


def test_a_program_that_was_learned_is_predicted_exactly():
    table = CycleTable(CLOCK)
    table.add(full())
    prediction = table.predict(probed(full()))
    assert prediction.cycles == 3 * 1000 + 2 * 3000
    assert prediction.known_fraction == 1.0


def test_counts_of_known_fusions_may_differ():
    table = CycleTable(CLOCK)
    table.add(full())
    assert table.predict([kind("dot", 7), kind("sum", 1)]).cycles == 7 * 1000 + 3000


def test_unknown_fusions_are_priced_by_their_work():
    table = CycleTable(CLOCK)
    table.add(kind(f"sum {n}", 1, 1000 * n, n << 20) for n in range(1, 40))  # 1000 cycles for 2**20 reduced elements
    prediction = table.predict([kind("new", 2, reduced=(30 << 20) + (1 << 19))])
    assert prediction.cycles == pytest.approx(2 * 30_500, rel=0.1)
    assert prediction.known_fraction == 0.0


def test_what_is_unlike_all_that_was_learned_is_priced_as_before():
    table = CycleTable(CLOCK)
    table.add([kind("sum", 1, 10_000, 1 << 20)])
    unlike = dataclasses.replace(
        kind("product"), work=dataclasses.astuple(Work(matrix_seconds=1e-3, product_bytes=8e9))
    )
    assert table.predict([unlike]).cycles == pytest.approx(CycleTable(CLOCK).predict([unlike]).cycles, rel=1e-3)


def test_a_probe_costs_what_its_compile_does():
    """Kinds of instructions that only the probe has share what the compile has beyond those that both have."""
    compiled = (kind("dot", 3, 1000, 1 << 20), kind("joined", 2, 8000, 3 << 20))
    probe = (kind("dot", 3), kind("product", 2, reduced=2 << 20), kind("transfer", 4, reduced=1 << 20))
    shared = only_probed(probe, compiled, CLOCK)
    assert [cost.count for cost in shared] == [0, 0]  # nothing is added to what the compile takes
    assert shared[0].cycles == pytest.approx(2 * shared[1].cycles, rel=0.1)  # twice the work, and as much for each
    table = CycleTable(CLOCK)
    table.add((*compiled, *shared))
    assert table.predict(probe).cycles == pytest.approx(3 * 1000 + 2 * 8000, rel=1e-3)
    assert table.predict(compiled).cycles == 3 * 1000 + 2 * 8000
    # what a compile says of such a kind itself is better
    table.add([kind("product", 1, 500)])
    assert table.predict([kind("product")]).cycles == 500
    assert not only_probed(probed(full()), full(), CLOCK)  # of one device everything comes back


def test_known_and_unknown_add_up():
    table = CycleTable(CLOCK)
    table.add(full())
    alone = table.predict([kind("new")]).cycles
    both = table.predict([kind("new"), kind("dot", 2)])
    assert both.cycles == alone + 2000
    assert both.known_fraction == pytest.approx(2000 / both.cycles)


def test_prices_before_anything_is_learned():
    small, large = (CycleTable(CLOCK).predict([kind("sum", reduced=n << 20)]).cycles for n in (1, 1000))
    assert 0 < small < large


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"])
def test_seconds_are_seconds_of_every_chip(tmp_path, name):
    """A stream from memory that takes 10 ms takes a little more of every chip, whatever its clock is."""
    target = resolve(name)
    work = dataclasses.astuple(Work(hbm_seconds=0.01))
    stream = InstructionCost("stream", 1, None, 0.01, work)
    table = CycleTable.load(Cache(tmp_path), target)
    assert table.predict([stream]).cycles / target.chip.clock_hz == pytest.approx(1.15 * 0.01, rel=1e-3)


def test_a_probe_cannot_be_learned_from():
    with pytest.raises(ValueError, match="full"):
        CycleTable(CLOCK).add(probed(full()))


def test_tables_of_two_processes_are_joined(tmp_path):
    cache = Cache(tmp_path)
    one, other = CycleTable(CLOCK), CycleTable(CLOCK)
    one.add(full())
    other.add([kind("conv", 1, 500)])
    one.save(cache, V5E)
    other.save(cache, V5E)
    loaded = CycleTable.load(cache, V5E)
    assert len(loaded) == 4
    assert loaded.predict([kind("conv", 2), kind("dot", 1)]).cycles == 2000
    assert len(CycleTable.load(cache, resolve("tpu-v6e"))) == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2, "entries": {"a": 3}}', '{"format": 99}'])
def test_damaged_tables_count_as_absent(tmp_path, content):
    cache = Cache(tmp_path)
    table = CycleTable(CLOCK)
    table.add(full())
    table.save(cache, V5E)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content)
    assert len(CycleTable.load(cache, V5E)) == 0


LEARNER = """
import sys
from pathlib import Path
from rematplan.target import cycles
from rematplan.target.cache import Cache
from rematplan.target.measurement import InstructionCost
from rematplan.target.target import resolve
cycles._MOST_FILES = 5  # they are put together again and again
for n in range(40):
    cost = InstructionCost(f"{sys.argv[2]} {n}", 1, 1000 + n, 1e-6, (0.0,))
    cycles.CycleTable.remember([cost], Cache(Path(sys.argv[1])), resolve("tpu-v5e"))
"""


def test_processes_that_learn_at_the_same_time_lose_nothing(tmp_path):
    learners = [subprocess.Popen([sys.executable, "-c", LEARNER, str(tmp_path), who]) for who in "abc"]
    assert [learner.wait(60) for learner in learners] == [0, 0, 0]
    table = CycleTable.load(Cache(tmp_path), V5E)
    assert len(table) == 3 * 40
    assert table.predict([kind("a 0"), kind("b 39"), kind("c 7")]).cycles == 1000 + 1039 + 1007
    assert len([*tmp_path.rglob("*")]) < 40  # not a file for each, and nothing half written


def test_what_is_known_already_is_not_written_again(tmp_path):
    cache = Cache(tmp_path)
    CycleTable.remember(full(), cache, V5E)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    CycleTable.remember(full()[:2], cache, V5E)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
