"""Measuring over executors: threads, processes, workers that die, and several who ask for the same."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import jax
import jax.numpy as jnp
import pytest

from rematplan.errors import CompilerError, InputError
from rematplan.target import compiler, executors
from rematplan.target.cache import Cache
from rematplan.target.compiler import Options, lower, measure, measure_many
from rematplan.target.executors import ATTEMPTS, Dispatcher, in_use, using
from rematplan.target.remote import measured
from rematplan.target.target import Kind, resolve

CPU = resolve("cpu")
NEVER = threading.Event()
ANSWER = {"measurement": "as it was measured"}


def programs(count):
    """As many programs, none like another."""
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return [lower(lambda x, n=n: x @ x + n, [shape], target=CPU) for n in range(count)]


@pytest.fixture
def puts(monkeypatch):
    """How often each key was written to a cache."""
    count = collections.Counter()
    put = Cache.put

    def counted(self, key, found):
        count[key] += 1
        put(self, key, found)

    monkeypatch.setattr(Cache, "put", counted)
    return count


class Scripted(Executor):
    """Answers what the script says, one entry for each submission: an error of a worker, or an answer."""

    def __init__(self, *script, refuses=False):
        self.script = list(script)
        self.refuses = refuses
        self.submitted = 0

    def submit(self, *_call):
        if self.refuses:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.submitted += 1
        future, outcome = Future(), self.script.pop(0)
        future.set_exception(outcome) if isinstance(outcome, BaseException) else future.set_result(outcome)
        return future


@pytest.fixture
def here(monkeypatch):
    """What is asked of this process, in place of a compiler."""
    asked = []
    monkeypatch.setattr(executors, "answered", lambda request, *_where: asked.append(request) or ANSWER)
    return asked


def test_a_request_whose_worker_died_is_sent_again(here):
    executor = Scripted(OSError("connection lost"), OSError("connection lost"), ANSWER)
    assert Dispatcher(executor).answer({}, Kind.CPU, stop=NEVER) == ANSWER
    assert executor.submitted == 3
    assert not here


def test_a_request_that_is_lost_again_and_again_is_answered_here_and_the_next_one_is_sent(here):
    executor = Scripted(*[OSError("connection lost")] * ATTEMPTS, ANSWER)
    dispatcher = Dispatcher(executor, name="mine")
    with pytest.warns(UserWarning, match=r"executor mine does not answer \(OSError: connection lost\)"):
        assert dispatcher.answer({"number": 1}, Kind.CPU, stop=NEVER) == ANSWER
    assert here == [{"number": 1}]
    assert dispatcher.answer({"number": 2}, Kind.CPU, stop=NEVER) == ANSWER
    assert executor.submitted == ATTEMPTS + 1
    assert len(here) == 1


@pytest.mark.parametrize("executor", [Scripted(BrokenProcessPool("a process died")), Scripted(refuses=True)])
def test_a_broken_executor_is_used_no_longer(here, executor):
    dispatcher = Dispatcher(executor)
    with pytest.warns(UserWarning, match="used no longer"):
        dispatcher.answer({}, Kind.CPU, stop=NEVER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        dispatcher.answer({}, Kind.CPU, stop=NEVER)
    assert len(here) == 2
    assert executor.submitted == (0 if executor.refuses else 1)


def test_a_killed_child_is_asked_again_and_one_that_crashed_is_not():
    killed, crashed = {"died": "killed", "killed": True}, {"died": "SIGSEGV", "killed": False}
    executor = Scripted(killed, killed, ANSWER, crashed, *[killed] * ATTEMPTS)
    dispatcher = Dispatcher(executor)
    assert dispatcher.answer({}, Kind.CPU, stop=NEVER) == ANSWER
    with pytest.raises(CompilerError, match="SIGSEGV"):
        dispatcher.answer({}, Kind.CPU, stop=NEVER)
    with pytest.raises(CompilerError, match="killed"):
        dispatcher.answer({}, Kind.CPU, stop=NEVER)
    assert not executor.script


def test_waiting_ends_when_it_is_stopped():
    class Silent(Executor):
        future = Future()

        def submit(self, *_call):
            threading.Timer(0.1, stop.set).start()
            return self.future

    stop = threading.Event()
    with pytest.raises(CompilerError, match="interrupted"):
        Dispatcher(Silent()).answer({}, Kind.CPU, stop=stop)
    assert Silent.future.cancelled()


def test_a_worker_with_other_versions_is_refused():
    (program,) = programs(1)
    request = compiler._request(program, Options(), CPU)
    assert "measurement" in measured(request)
    request["versions"] = {**request["versions"], "jaxlib": "0.0.1"}
    refused = measured(request)
    assert f"jaxlib {jax.lib.__version__} for 0.0.1" in refused["refused"]
    with pytest.raises(InputError, match=r"executor there: .*jaxlib.*Install the same versions"):
        Dispatcher(Scripted(refused), name="there").answer(request, Kind.CPU, stop=NEVER)


def test_the_flags_of_who_asks_reach_the_compiler():
    (program,) = programs(1)
    request = compiler._request(program, Options(), CPU)
    request["flags"] = {"XLA_FLAGS": "--xla_no_such_flag=1"}
    answer = measured(request)
    assert "xla_no_such_flag" in answer["died"]
    assert answer["killed"] is False


def test_threads_that_ask_for_the_same_compile_it_once(tmp_path, puts, monkeypatch):
    (program,) = programs(1)
    everyone_asks = threading.Barrier(4)
    look = Cache.get

    def together(self, key):
        found = look(self, key)
        if not puts and threading.current_thread() not in looked:
            looked.append(threading.current_thread())
            everyone_asks.wait(20)  # nobody found it
        return found

    looked = []
    monkeypatch.setattr(Cache, "get", together)
    found = measure_many([(program, Options())] * 4, CPU, workers=4, cache=Cache(tmp_path))
    assert list(puts.values()) == [1]
    assert sorted(m.cached for m in found) == [False, True, True, True]
    assert len({dataclasses.replace(m, cached=False).to_json()["required_bytes"] for m in found}) == 1
    assert not compiler._RUNNING


def test_who_waits_for_a_program_that_is_refused_is_told_so(tmp_path):
    broken = compiler.Program("module { broken", 1, 1, name="mine")
    with compiler.SideBySide(CPU, workers=3, cache=Cache(tmp_path)) as measuring:
        futures = [measuring.submit(broken, Options()) for _ in range(3)]
    assert all("refused mine" in str(future.exception()) for future in futures)
    assert not compiler._RUNNING


def test_any_executor_measures_what_this_process_measures(tmp_path):
    tasks = [(program, Options()) for program in programs(3)]
    expected = measure_many(tasks, CPU, cache=Cache(None))
    with ThreadPoolExecutor(2) as threads, using(threads):
        assert in_use().in_flight(Kind.CPU) == 4
        found = measure_many(tasks, CPU, cache=Cache(None))
    assert in_use().name == "local"
    assert _figures(found) == _figures(expected)


def _figures(found):
    return [dataclasses.replace(m, compile_seconds=0.0) for m in found]


def test_a_process_of_a_pool_is_killed_in_the_middle(tmp_path, puts):
    """The pool is broken by that; what came back is kept, and the rest is compiled here: each program once."""
    tasks = [(program, Options()) for program in programs(12)]
    expected = measure_many(tasks, CPU, cache=Cache(None))
    puts.clear()

    def kill(*_done):
        for pid in victims[:1]:
            victims.clear()
            os.kill(pid, signal.SIGKILL)

    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool, using(pool):
        victims = [pool.submit(os.getpid).result()]
        with pytest.warns(UserWarning, match="BrokenProcessPool"):
            found = measure_many(tasks, CPU, cache=Cache(tmp_path), on_done=kill)
    assert _figures(found) == _figures(expected)
    assert len(puts) == 12
    assert set(puts.values()) == {1}


@pytest.mark.parametrize("name", ["dusk:1.2.3.4", "local:", "local:0", "local:x", "dask", "dask:", "", 4])
def test_unknown_executors(name):
    with pytest.raises(InputError, match=r"write local, local:N .* dask:ADDRESS"), using(name):
        pass


def test_a_number_of_local_children():
    with using("local:3") as outer:
        assert in_use() is outer
        assert outer.in_flight(Kind.TPU) == 3
        with using(None) as same:
            assert same is outer
        with using("local:1"):
            assert in_use().in_flight(Kind.TPU) == 1
        assert in_use() is outer


FORKED = """
import os, sys
from rematplan.target.target import Kind
from rematplan.target.workers import POOL
with POOL.borrow(Kind.CPU) as child:
    mine = child.pid
if os.fork() == 0:
    with POOL.borrow(Kind.CPU) as child:
        other = child.pid
    POOL.close()
    os._exit(other == mine)
_, status = os.wait()
with POOL.borrow(Kind.CPU) as child:
    sys.exit(status or child.pid != mine)
"""


def test_a_forked_process_has_children_of_its_own():
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60).returncode == 0


def test_a_measurement_is_that_of_the_same_program_under_every_executor(tmp_path):
    (program,) = programs(1)
    with ThreadPoolExecutor(1) as threads, using(threads):
        first = measure(program, target=CPU, cache=Cache(tmp_path))
    assert measure(program, target=CPU, cache=Cache(tmp_path)) == dataclasses.replace(first, cached=True)
