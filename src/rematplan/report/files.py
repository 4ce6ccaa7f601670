"""Writing results without losing any: never half a file, never over an existing one unless asked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rematplan.errors import InputError


def check_destination(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Whether `path` can be written, asked before the work that fills it; `force` allows replacing.

    Raises:
      InputError: if it exists and may not be replaced, is a folder, or lies in a folder that is missing or read-only.
    """
    path = Path(path)
    folder = path.parent
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file in it.")
    if path.exists() and not force:
        raise InputError(f"{path} exists and was left as it is; pass --force to replace it or give another name.")
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: the folder {folder} does not exist; create it first.")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: the folder {folder} is not writable; give a path elsewhere.")
    return path


def check_folder(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """As `check_destination` for a folder of results: it may exist, but empty unless `force` is set."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is not a folder; give another name for the folder of results.")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise InputError(f"the folder {path} is not empty and was left as it is; pass --force or give another name.")
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not os.access(nearest, os.W_OK):
        raise InputError(f"cannot create {path}: the folder {nearest} is not writable; give a path elsewhere.")
    return path


def write_text(path: str | os.PathLike[str], text: str, *, force: bool = False) -> Path:
    """Writes `text` to `path` as UTF-8, as `write_bytes` does."""
    return write_bytes(path, text.encode(), force=force)


def write_bytes(path: str | os.PathLike[str], content: bytes, *, force: bool = False) -> Path:
    """Writes `content` to `path` all at once: an interruption leaves the old file, or none, never half of one."""
    path = check_destination(path, force=force)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files private; results get the permissions that the user's umask asks for
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; give a path elsewhere.") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path
