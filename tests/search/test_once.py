"""Probes under one limit where two have told nothing, and what was compiled before in place of a probe."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rematplan import workloads
from rematplan.search import problem as problems
from rematplan.search.planning import Search
from rematplan.target import compiler
from rematplan.target.compiler import Method, Options
from rematplan.target.measurement import Measurement, Source
from rematplan.target.target import resolve

TARGET = "tpu-v5e"


class Pretending:
    """Stands for `SideBySide`: the limit matters for one in so many programs, which are given figures of their own."""

    every = 1 << 30
    asked: list[Options]
    programs: dict[str, int]

    def __init__(self, *_, **__): ...

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def submit(self, program, options):
        assert options.method is Method.PROBE
        self.asked.append(options)
        number = self.programs.setdefault(program.key(), len(self.programs) + 1)
        done: Future[Measurement] = Future()
        done.set_result(
            Measurement(
                target=TARGET,
                source=Source.PROBED,
                peak_bytes=number << 20,
                required_bytes=number << 20,
                argument_bytes=0,
                output_bytes=0,
                temporary_bytes=number << 20,
                seconds=1.0 / number,
                limit_matters=number % self.every == 0,
            )
        )
        return done


@pytest.fixture
def pretending(monkeypatch, tmp_path):
    monkeypatch.setenv("REMATPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(problems, "SideBySide", Pretending)
    monkeypatch.setattr(Pretending, "asked", [], raising=False)
    monkeypatch.setattr(Pretending, "programs", {}, raising=False)
    return Pretending


def search() -> Search:
    return Search(workloads.mlp(blocks=4, features=16, batch=64), resolve(TARGET), progress=lambda _: None)


@pytest.mark.parametrize(("every", "once"), [(1 << 30, True), (5, False)])
def test_one_limit_is_enough_where_it_mattered_for_no_hand_written_one(pretending, monkeypatch, every, once):
    monkeypatch.setattr(Pretending, "every", every)
    found = search()
    hand_written = sum(p.candidate.hand_written for p in found.probes.measured.values())
    said = [options.once for options in pretending.asked]
    assert len(said) > hand_written >= 5
    assert said == [False] * hand_written + [once] * (len(said) - hand_written)


def test_what_was_compiled_before_is_not_probed(pretending, monkeypatch):
    first = search()
    per_block = next(p for p in first.probes.measured.values() if p.candidate.name == "per-block")
    program = first.problem.whole(per_block.candidate.configuration)
    compiled = Measurement(
        target=TARGET, source=Source.COMPILED, peak_bytes=7 << 20, required_bytes=7 << 20, argument_bytes=0,
        output_bytes=0, temporary_bytes=7 << 20, cycles=1e6, seconds=0.125,
    )  # fmt: skip
    compiler.Cache.default().put(compiler._key(program, Options(), resolve(TARGET)), compiled)
    assert program.key() in pretending.programs
    pretending.programs.clear()
    second = search()
    assert pretending.programs
    assert program.key() not in pretending.programs
    again = second.probes.measured[per_block.candidate.configuration]
    assert (again.figures.required_bytes, again.figures.seconds) == (7 << 20, 0.125)
    row = next(r for r in second._ranked(None, {})[0] if r[0].name == "per-block")
    assert row[2]["source"] == "compiled before, without a limit"
