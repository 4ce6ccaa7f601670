"""The book is built with warnings as errors, and every executed cell has run.

Needs the `docs` extra. `make docs` builds the book once and has this file look at it (`REMATPLAN_SITE`); the tests alone build
it into a folder of their own.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import BOOK, ROOT

pytestmark = pytest.mark.slow
CELL = '<div class="cell docutils container'
TAG = re.compile(r"<[^>]+>")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    built = os.environ.get("REMATPLAN_SITE")
    if built:
        return ROOT / built
    pytest.importorskip("myst_nb", reason="the book needs the docs extra: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-E", "-a", "-b", "html", str(ROOT / "docs")]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def text_of(site: Path, name: str) -> str:
    """What a reader sees, tags left out."""
    return html.unescape(TAG.sub("", (site / f"{name}.html").read_text()))


@pytest.mark.parametrize("page", BOOK, ids=lambda page: page.name)
def test_a_page_is_there_with_all_of_its_cells(page, site):
    written = (site / f"{page.name}.html").read_text()
    shown = [block for block in page.blocks("{code-cell} ipython3") if "remove-cell" not in block]
    assert written.count(CELL) == len(shown)
    assert page.executed == bool(shown)
    assert "Traceback (most recent call last)" not in written


def test_cells_printed_what_the_pages_speak_of(site):
    start = text_of(site, "start")
    assert re.search(r"^plain +needs [\d.]+ [GM]iB$", start, re.MULTILINE)
    assert re.search(r"^plan .* yes .*compiled", start, re.MULTILINE)
    losses = re.findall(r"step \d: loss ([\d.]+) without the plan, ([\d.]+) with it", start)
    assert len(losses) == 3
    assert all(a == b for a, b in losses)
    assert start.count("passed") == 2
    assert re.search(r"every 2 layers +[\d.]+ [GM]iB +\d+ G +[\d.]+ ms \(cycles\)", text_of(site, "tutorial-remat"))
    assert re.search(r"products +[\d.]+ [GM]iB +[\d.]+ T +[\d.]+ ms \(roofline\)", text_of(site, "tutorial-policies"))
    assert re.search(r"plain +[\d.]+ MiB, [\d.]+ [mu]s \(run\)", text_of(site, "recipes"))


def test_the_api_page_shows_signatures_and_docstrings(site):
    api = text_of(site, "api")
    assert "The cheapest checkpointing found that fits the budget" in api
    assert "minimum_bytes" in api
    assert "lower_bound" in api


def test_programs_of_the_findings_say_what_they_show(site):
    findings = text_of(site, "findings")
    assert findings.count("It does not appear in") >= 20
    assert "fires" not in findings
