"""Planning over a Dask cluster: two worker processes, one of which is killed in the middle."""

from __future__ import annotations

import collections
import os
import signal

import pytest

import rematplan as rp
from rematplan import workloads
from rematplan.target.cache import Cache

distributed = pytest.importorskip("distributed")


def work():
    return workloads.mlp(blocks=3, features=64, batch=512)


def figures(plan):
    """The plan without what says how long it took."""
    content = plan.to_json()
    content["notes"] = [note for note in content["notes"] if not note.startswith("searched ")]
    for each in (content["measured"], *content["baselines"]):
        each.pop("compile_seconds")
        each.pop("cached")
    return content


@pytest.fixture
def cluster():
    """A scheduler and two worker processes of one thread each."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as started:
        yield started


@pytest.mark.slow
def test_a_worker_is_killed_in_the_middle_of_planning(cluster, tmp_path, monkeypatch):
    """The plan comes out, as the one that is made without Dask; nothing is lost, nothing measured twice."""
    options = {"budget": "780KiB", "target": "cpu"}
    monkeypatch.setenv("REMATPLAN_CACHE", str(tmp_path / "here"))
    expected = rp.plan(work(), **options)

    puts, put = collections.Counter(), Cache.put
    victim = next(iter(cluster.workers.values())).pid
    killed = []

    def counted(self, key, found):
        puts[key] += 1
        put(self, key, found)
        if len(puts) == 2:
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    monkeypatch.setattr(Cache, "put", counted)
    monkeypatch.setenv("REMATPLAN_CACHE", str(tmp_path / "dask"))
    found = rp.plan(work(), **options, executor=f"dask:{cluster.scheduler_address}")
    assert killed == [victim]
    assert figures(found) == figures(expected)
    assert set(puts.values()) == {1}
    entries = [{path.name for path in (tmp_path / name).glob("*.json")} for name in ("here", "dask")]
    assert entries[0] == entries[1] == {f"{key}.json" for key in puts}


@pytest.mark.slow
def test_a_cluster_that_is_gone_is_replaced_by_this_process(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("REMATPLAN_CACHE", str(tmp_path))
    puts, put = collections.Counter(), Cache.put

    def counted(self, key, found):
        puts[key] += 1
        put(self, key, found)
        if len(puts) == 2:
            cluster.close()

    monkeypatch.setattr(Cache, "put", counted)
    with pytest.warns(UserWarning, match="executor dask:.* does not answer"):
        table = rp.compare(work(), target="cpu", executor=f"dask:{cluster.scheduler_address}")
    assert len(table.rows) >= 7
    assert set(puts.values()) == {1}
