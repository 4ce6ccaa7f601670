"""Which line of the user's own code an exception came from."""

from __future__ import annotations

import site
import sys
import sysconfig
import traceback
from pathlib import Path

import rematplan

_OWN = Path(rematplan.__file__).resolve().parent
# What rematplan runs on. A user's model may call it, and it then raises: the frame to show is the last one before. Everything
# else that is installed may be where a model comes from.
_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "ml_dtypes", "opt_einsum", "orbax", "treescope", "etils"),
    *("absl", "msgpack", "cyclopts", "rich", "altair", "narwhals", "jinja2", "vl_convert", "dask", "distributed"),
    *("cloudpickle", "tornado"),
)
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    if folder
)


def users_frame(error: BaseException) -> str | None:
    """`file.py:12 in make: the line` of the innermost frame of the user's code; None if it was not the user's code.

    That is a frame of what is not installed, such as a script or a project; else of the installed package that was called
    first. The program's own entry frames (`python -m`, console script) are not the user's: they have no frame of rematplan
    outside them. An exception that a frame of rematplan itself raised is rematplan's, wherever it was called from.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if frames and _is_under(Path(frames[-1].filename).resolve(), (_OWN,)):
        return None
    libraries = (_OWN, *_library_places())
    entered = False
    scripts: list[traceback.FrameSummary] = []
    packages: dict[Path, traceback.FrameSummary] = {}  # by folder, the innermost frame of each
    for frame in frames:
        path = Path(frame.filename).resolve()
        if _is_under(path, (_OWN,)):
            entered = True
        elif entered and not frame.filename.startswith("<") and not _is_under(path, libraries):
            root = next((folder for folder in _INSTALLED if path.is_relative_to(folder)), None)
            if root is not None:
                packages[root / path.relative_to(root).parts[0]] = frame
            elif not _is_under(path, _STANDARD):
                scripts.append(frame)
    found = scripts[-1] if scripts else next(iter(packages.values()), None)
    if found is None:
        return None
    line = f": {found.line.strip()}" if found.line else ""
    return f"{found.filename}:{found.lineno} in {found.name}{line}"


def _library_places() -> tuple[Path, ...]:
    """Where the libraries lie; what was not imported has no frame."""
    modules = [module for name in _LIBRARIES if (module := sys.modules.get(name)) is not None]
    places = [place for m in modules for place in (getattr(m, "__path__", None) or [getattr(m, "__file__", None)])]
    return tuple(Path(place).resolve() for place in places if place)


def _is_under(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
