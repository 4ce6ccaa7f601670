"""`--executor`: where a verb's compiles run."""

from __future__ import annotations

import json
import socket
import time

import pytest

SMALL = ("mlp", "blocks=2", "batch=16", "features=16", "--target", "cpu")


def is_one_paragraph(text: str) -> bool:
    """Whether an error is a single paragraph without a traceback."""
    return text.startswith("error: ") and "Traceback" not in text and "\n\n" not in text.strip()


@pytest.mark.parametrize("verb", ["measure", "compare", "plan", "frontier"])
def test_local_by_number(cli, verb):
    budget = ("--budget", "1MiB") if verb == "plan" else ()
    assert cli(verb, *SMALL, *budget, "--executor", "local:1", "--json").code == 0


def test_unknown_executors_are_refused_before_the_workload_is_made(cli):
    result = cli("measure", "absent:make", "--target", "cpu", "--executor", "local:many")
    assert result.code == 2
    assert "local:N for N compiles at a time" in result.err
    assert is_one_paragraph(result.err)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
def test_where_no_scheduler_is(cli, answers):
    """At an address where nobody listens, or somebody who never says a word."""
    pytest.importorskip("distributed")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        begun = time.monotonic()
        result = cli("plan", *SMALL, "--budget", "1MiB", "--executor", f"dask:{address}", "--json")
        assert time.monotonic() - begun < 30
    assert result.code == 2
    assert result.out == ""
    assert f"executor dask:{address}: no Dask scheduler answers there within 5 s" in result.err
    assert is_one_paragraph(result.err)


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:1", "tcp://127.0.0.1:x"])
def test_addresses_that_are_none(cli, address):
    pytest.importorskip("distributed")
    result = cli("measure", *SMALL, "--executor", f"dask:{address}")
    assert result.code == 2
    assert f"executor dask:{address}" in result.err
    assert is_one_paragraph(result.err)


def test_the_same_figures(cli):
    figures = [json.loads(cli("measure", *SMALL, *words, "--json").out) for words in ((), ("--executor", "local:2"))]
    assert figures[0]["required_bytes"] == figures[1]["required_bytes"]
