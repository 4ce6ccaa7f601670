"""Files are written whole or not at all, and existing ones survive."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    path = tmp_path / "run.json"
    for mode in (0o600, 0o666, 0o444):
        path.touch()
        path.chmod(mode)
        write_text(path, "new", force=True)
        assert path.read_text() == "new"
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_umask_of_the_process_stays_while_files_are_written(tmp_path, monkeypatch):
    """Another thread may make files of its own at any time."""
    monkeypatch.setattr(files.os, "umask", lambda _mask: pytest.fail("the umask is the whole process's"))
    assert write_text(tmp_path / "run.json", "text").read_text() == "text"


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("missing/run.json", "does not exist"),
        (".", "is a folder"),
        ("file/run.json", "does not exist"),
        ("n" * 300, "name too long"),
        ("n" * 300 + "/run.json", "name too long"),
        ("loop", "symbolic link"),
        ("loop/run.json", "symbolic link"),
        ("nul\0l", "null"),
    ],
)
def test_places_that_cannot_be_written_are_refused_beforehand(tmp_path, path, complaint):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for attempt in (check_destination, partial(write_text, text="x")):
        with pytest.raises(InputError, match=f"(?i){complaint}"):
            attempt(tmp_path / path)
    if path != ".":
        with pytest.raises(InputError):
            check_folder(tmp_path / path if "missing" not in path else tmp_path / "file")


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("n" * 255)
    assert write_text(path, "x").read_text() == "x"
    assert write_text(path, "y", force=True).read_text() == "y"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_closed_folder_is_refused_beforehand(tmp_path, monkeypatch):
    """As an unprivileged user meets it; the tests may run as root."""

    def closed(*_where: object, **_how: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", closed)
    monkeypatch.setattr(Path, "iterdir", closed)
    for attempt in (check_destination, check_folder, partial(write_text, text="x")):
        with pytest.raises(InputError, match="Permission denied"):
            attempt(tmp_path / "run.json")


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    def closed(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(InputError, match="Permission denied"):
        check_folder(tmp_path)


def test_pipes_are_written_to_and_stay(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="--force"):
        write_text(pipe, "text")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        write_text(pipe, "text", force=True)
        assert read.result(10) == "text"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_devices_are_written_to_and_stay(tmp_path):
    # what a wrong program replaces here is a link to the device, not the machine's own
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    write_text(null, "text", force=True)
    assert null.is_symlink() and stat.S_ISCHR(null.stat().st_mode)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(InputError, match="cannot write"):
            write_text(tmp_path / "socket", "text", force=True)
        assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)


def test_links_stay_and_what_they_point_to_is_written(tmp_path):
    (tmp_path / "data").mkdir()
    link, target = tmp_path / "link", tmp_path / "data" / "run.json"
    link.symlink_to("data/run.json")
    write_text(link, "new")  # the link leads nowhere yet
    assert target.read_text() == "new"
    with pytest.raises(InputError, match="--force"):
        write_text(link, "newer")
    write_text(link, "newer", force=True)
    assert link.is_symlink() and target.read_text() == "newer"
    (tmp_path / "astray").symlink_to("missing/run.json")
    with pytest.raises(InputError, match="does not exist"):
        check_destination(tmp_path / "astray")


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
