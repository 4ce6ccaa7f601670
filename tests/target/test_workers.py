"""Compile children: reused, isolated, ended with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rematplan.errors import CompilerError
from rematplan.target.target import Kind
from rematplan.target.workers import Child, Pool, child_environment

BROKEN = {
    "target": "cpu",
    "stablehlo": "this is no program",
    "mesh_shape": [],
    "compiler_options": {},
    "limit_bytes": None,
}


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_child_answers_what_went_wrong_and_lives_on(pool):
    with pool.borrow(Kind.CPU) as child:
        first = child.request(BROKEN)
        pid = child.pid
    with pool.borrow(Kind.CPU) as child:
        assert child.pid == pid
        second = child.request(BROKEN)
    assert first["error"] == second["error"]
    assert "this is no program" in first["error"] or "parse" in first["error"].lower()


def _ask_and_crash(pool, crashed):
    with pool.borrow(Kind.CPU) as child:
        assert child.pid == crashed
        os.kill(crashed, signal.SIGSEGV)
        os.kill(crashed, signal.SIGCONT)
        child.request(BROKEN)


def test_a_crash_names_the_signal_and_the_next_request_gets_a_new_child(pool):
    with pool.borrow(Kind.CPU) as child:
        crashed = child.pid
    os.kill(crashed, signal.SIGSTOP)  # still alive when it is borrowed, so that it ends in the middle of a request
    with pytest.raises(CompilerError, match="SIGSEGV"):
        _ask_and_crash(pool, crashed)
    with pool.borrow(Kind.CPU) as child:
        assert child.pid != crashed
        assert "error" in child.request(BROKEN)


def test_a_crash_quotes_the_last_words():
    child = Child(Kind.CPU)
    try:
        with pytest.raises(CompilerError, match="JSONDecodeError"):
            child.request_text(b"not JSON\n")
    finally:
        child.close()


def test_an_idle_child_that_ended_is_replaced(pool):
    with pool.borrow(Kind.CPU) as child:
        os.kill(child.pid, signal.SIGKILL)
    assert wait_until(lambda: not child.alive)
    with pool.borrow(Kind.CPU) as child:
        assert "error" in child.request(BROKEN)


def test_closing_the_pool_unblocks_who_waits(pool):
    failed = []

    def ask():
        try:
            with pool.borrow(Kind.CPU) as child:
                started.set()
                child.request_text(b"")  # no request: waits for ever
        except CompilerError as error:
            failed.append(error)

    started = threading.Event()
    thread = threading.Thread(target=ask)
    thread.start()
    assert started.wait(20)
    time.sleep(0.2)
    pool.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(failed) == 1


PARENT = """
import sys, time
from rematplan.target.target import Kind
from rematplan.target.workers import POOL
with POOL.borrow(Kind.CPU) as child:
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_end_with_their_parent(how):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(how)
        parent.wait(20)
        assert wait_until(lambda: not alive(child))


def test_children_stay_off_real_devices_and_get_the_users_flags(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=1")
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", "1,2,4")
    environment = child_environment(Kind.TPU)
    assert "TPU_PROCESS_BOUNDS" not in environment
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert environment["LIBTPU_INIT_ARGS"] == "--xla_tpu_something=1"
    assert "TPU_SKIP_MDS_QUERY" not in child_environment(Kind.GPU)


def test_other_flags_mean_another_child(pool, monkeypatch):
    with pool.borrow(Kind.CPU) as child:
        first = child.pid
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with pool.borrow(Kind.CPU) as child:
        assert child.pid != first
