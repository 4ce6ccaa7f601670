"""Which line of the user's own code an exception came from."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

import rematplan

_OWN = Path(rematplan.__file__).resolve().parent
# A user's model may call the standard library, JAX or Flax, which then raise: the frame to show is the last one before.
_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    if folder
)


def users_frame(error: BaseException) -> str | None:
    """`file.py:12 in make: the line` of the innermost frame of the user's code; None if it was not the user's code.

    The program's own entry frames (`python -m`, console script) are not the user's: they have no frame of rematplan
    outside them. An exception that a frame of rematplan itself raised is rematplan's, wherever it was called from.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if frames and _is_under(frames[-1].filename, (_OWN,)):
        return None
    entered = False
    found: traceback.FrameSummary | None = None
    for frame in frames:
        if _is_under(frame.filename, (_OWN,)):
            entered = True
        elif entered and not frame.filename.startswith("<") and not _is_under(frame.filename, _INSTALLED):
            found = frame
    if found is None:
        return None
    line = f": {found.line.strip()}" if found.line else ""
    return f"{found.filename}:{found.lineno} in {found.name}{line}"


def _is_under(filename: str, folders: tuple[Path, ...]) -> bool:
    path = Path(filename).resolve()
    return any(path.is_relative_to(folder) for folder in folders)
