"""Writing results without losing any: never half a file, never over an existing one unless asked."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Generator
from contextvars import ContextVar
from pathlib import Path

from rematplan.errors import InputError

_NOTED: ContextVar[list[Path] | None] = ContextVar("_NOTED", default=None)
_NEW_FILE = 0o666  # less what the user's umask takes away


def check_destination(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Whether `path` can be written, asked before the work that fills it; `force` allows replacing.

    Raises:
      InputError: if it exists and may not be replaced, is a folder, or lies in a folder that is missing or read-only.
    """
    path = Path(path)
    there = _status(path, doing="write")
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise InputError(f"{path} is a folder; give the name of a file in it.")
    if there is not None and not force:
        raise InputError(f"{path} exists and was left as it is; pass --force to replace it or give another name.")
    if there is not None and not stat.S_ISREG(there.st_mode):
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write {path}: it is not writable; give a path elsewhere.")
        return path
    folder = _real(path).parent
    held = _status(folder, doing="write")
    if held is None or not stat.S_ISDIR(held.st_mode):
        raise InputError(f"cannot write {path}: the folder {folder} does not exist; create it first.")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: the folder {folder} is not writable; give a path elsewhere.")
    return path


def check_folder(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """As `check_destination` for a folder of results: it may exist, but empty unless `force` is set."""
    path = Path(path)
    try:
        there = _status(path, doing="create")
        if there is not None and not stat.S_ISDIR(there.st_mode):
            raise InputError(f"{path} is not a folder; give another name for the folder of results.")
        if there is not None and not force and any(path.iterdir()):
            raise InputError(
                f"the folder {path} is not empty and was left as it is; pass --force or give another name."
            )
    except OSError as error:
        raise InputError(f"cannot read the folder {path}: {error.strerror or error}; give a path elsewhere.") from error
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise InputError(f"cannot create {path}: {nearest} is not a folder; give a path elsewhere.")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"cannot create {path}: the folder {nearest} is not writable; give a path elsewhere.")
    return path


def write_text(path: str | os.PathLike[str], text: str, *, force: bool = False) -> Path:
    """Writes `text` to `path` as UTF-8, as `write_bytes` does."""
    return write_bytes(path, text.encode(), force=force)


def write_bytes(path: str | os.PathLike[str], content: bytes, *, force: bool = False) -> Path:
    """Writes `content` to `path` all at once: an interruption leaves the old file, or none, never half of one.

    A link stays, and what it points to is written; pipes and devices, which hold nothing, get the bytes as they are.
    """
    path = check_destination(path, force=force)
    try:
        there = _status(path, doing="write")
        if there is None or stat.S_ISREG(there.st_mode):
            _replace(_real(path), content, replaced=there)
        else:
            with os.fdopen(os.open(path, os.O_WRONLY), "wb") as stream:
                stream.write(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; give a path elsewhere.") from error
    noted = _NOTED.get()
    if noted is not None:
        noted.append(path)
    return path


@contextlib.contextmanager
def noting() -> Generator[list[Path]]:
    """A list of what is written from here on."""
    written: list[Path] = []
    token = _NOTED.set(written)
    try:
        yield written
    finally:
        _NOTED.reset(token)


def _replace(path: Path, content: bytes, *, replaced: os.stat_result | None) -> None:
    """Puts a new file in the place of `path`, with the permissions of what it replaces."""
    # not of the file's own name, which may be as long as names can be
    temporary = path.with_name(f".rematplan-{secrets.token_hex(8)}.part")
    mode = _NEW_FILE if replaced is None else stat.S_IMODE(replaced.st_mode)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            if replaced is not None:
                os.fchmod(stream.fileno(), mode)  # also what the umask took away
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has its place
            temporary.unlink()


def _real(path: Path) -> Path:
    """What a link points to, whether or not it exists; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _status(path: Path, *, doing: str) -> os.stat_result | None:
    """What is at a path, links followed; None if there is nothing.

    Raises:
      InputError: the path cannot be looked at: its name is too long, or a folder above it is closed.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: no path at all
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot {doing} {path}: {reason}; give a path elsewhere.") from error
