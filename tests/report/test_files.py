"""Files are written whole or not at all, and existing ones survive."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rematplan.errors import InputError, PlanMismatch
from rematplan.report import files
from rematplan.report.files import check_destination, check_folder, write_text
from rematplan.report.run import from_document, read_document


def test_an_existing_file_is_left_as_it_was(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("mine")
    for attempt in (check_destination, lambda p: write_text(p, "new")):
        with pytest.raises(InputError, match="--force"):
            attempt(path)
    assert path.read_text() == "mine"
    write_text(path, "new", force=True)
    assert path.read_text() == "new"


def test_an_interrupted_write_leaves_the_old_file_and_no_part_of_the_new(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("old")

    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_written_files_have_the_permissions_of_other_new_files(tmp_path):
    other = tmp_path / "other"
    other.touch()
    written = write_text(tmp_path / "run.json", "text")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


@pytest.mark.parametrize(("path", "complaint"), [("missing/run.json", "does not exist"), (".", "is a folder")])
def test_places_that_cannot_be_written_are_refused_beforehand(tmp_path, path, complaint):
    with pytest.raises(InputError, match=complaint):
        check_destination(tmp_path / path)


def test_a_read_only_folder_is_refused_beforehand(tmp_path, monkeypatch):
    # the tests may run as root, whom permissions do not stop
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="not writable"):
        check_destination(tmp_path / "run.json")
    with pytest.raises(InputError, match="not writable"):
        check_folder(tmp_path / "results")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    assert check_folder(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="not empty"):
        check_folder(tmp_path)
    assert check_folder(tmp_path, force=True) == tmp_path
    with pytest.raises(InputError, match="not a folder"):
        check_folder(tmp_path / "mine")


def test_broken_run_files_are_refused(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(InputError, match="cannot read"):
        read_document(path)
    path.write_text('{"format": "rematplan-run", "ver')
    with pytest.raises(InputError, match="cut short"):
        read_document(path)
    path.write_text("[1]")
    with pytest.raises(InputError, match="holds list"):
        read_document(path)


def test_run_files_of_another_version_or_kind_are_refused():
    with pytest.raises(InputError, match="not a run record"):
        from_document({"format": "other"}, name="x")
    with pytest.raises(PlanMismatch, match="version 99"):
        from_document({"format": "rematplan-run", "version": 99}, name="x")
    with pytest.raises(InputError, match="verb"):
        from_document({"format": "rematplan-run", "version": 1, "record": {}}, name="x")


def test_paths_may_be_text(tmp_path):
    assert write_text(str(tmp_path / "a.txt"), "x") == Path(tmp_path / "a.txt")
