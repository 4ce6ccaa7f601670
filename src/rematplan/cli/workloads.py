"""`module:factory` or `file.py:factory` with `key=value` -> a `Workload`.

Says what is wrong with the user's words or code. Knows nothing of what is done with the workload.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rematplan.cli.userframe import users_frame
from rematplan.errors import InputError, RematplanError, UserCodeError

BUILT_IN_MODULE = "rematplan.workloads"
BUILT_IN = ("decoder", "gpt", "mlp", "policy_mlp", "resnet", "scan_gpt", "unet", "vit")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def load_workload(name: str, sizes: Sequence[str]) -> Any:
    """Calls the factory.

    Args:
      name: `module:factory`, `file.py:factory` or the name of a built-in workload.
      sizes: `key=value` words for the factory.

    Raises:
      InputError: if there is no such factory, it does not take these words, it raises, or returns something else.
    """
    keywords = parse_keywords(sizes)
    factory = load_factory(name)
    _check_keywords(factory, keywords, name)
    work = factory(**keywords)

    from rematplan.workload import Workload

    if not isinstance(work, Workload):
        raise InputError(
            f"the factory {name} returned {_described(work)}, not a rematplan.Workload; "
            "end it with `return rematplan.Workload(loss_fn, model, batch)`."
        )
    return work


def load_factory(name: str) -> Callable[..., Any]:
    """The factory; what the user's code raises in it becomes a UserCodeError that shows the user's own line.

    Args:
      name: as in `load_workload`.

    Raises:
      InputError: if there is none.
    """
    if name in BUILT_IN:
        name = f"{BUILT_IN_MODULE}:{name}"
    place, separator, factory_name = name.rpartition(":")
    if not separator or not place or not factory_name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(
            f"{name!r} is not a workload: write module:factory, file.py:factory or one of {', '.join(BUILT_IN)}.{hint}"
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    factory = _factory(module, factory_name, place)

    @functools.wraps(factory)
    def called(**keywords: Any) -> Any:
        return _run_users_code(lambda: factory(**keywords), doing=f"the factory {name}")

    return called


def parse_keywords(words: Iterable[str]) -> dict[str, Any]:
    """`key=value` words; values are whole numbers (`1_024`), numbers, true, false, none, Python literals, or text."""
    keywords: dict[str, Any] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier():
            raise InputError(f"{word!r} is not key=value; the factory's sizes are written like blocks=12.")
        if key in keywords:
            raise InputError(f"{key} is given twice ({keywords[key]!r} and {value!r}); give it once.")
        keywords[key] = parse_value(value)
    return keywords


def parse_value(text: str) -> Any:
    """One value: what Python would read, else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _load_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    if not _run_users_code(lambda: _is_module(name), doing=f"importing {name}"):
        raise InputError(
            f"there is no module {name!r} (looked in {folder} and the installed packages); "
            "for a file write file.py:factory."
        )
    return _run_users_code(lambda: importlib.import_module(name), doing=f"importing {name}")


def _is_module(name: str) -> bool:
    """Whether there is such a module; imports the packages above it, and raises what they raise."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if name in sys.modules:  # some, like __main__, cannot be looked for
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # one of the packages above it is missing, and not something that one of them imports
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False
        raise


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}; a workload in a file is written file.py:factory.")
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as running the file does
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise InputError(f"{path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(specification)
    # dataclasses and pickling look modules up by name; an imported module of the same name stays what it is
    sys.modules.setdefault(path.stem, module)
    loader = specification.loader
    _run_users_code(lambda: loader.exec_module(module), doing=f"loading {path.name}")
    return module


def _factory(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    factory = getattr(module, name, None)
    if factory is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise InputError(f"{place} has no factory {name!r}{hint}")
    if not callable(factory):
        raise InputError(f"{place}:{name} is {_described(factory)}, not a function that returns a rematplan.Workload.")
    return factory


def _check_keywords(factory: Callable[..., Any], keywords: dict[str, Any], name: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some callables have no signature; calling them will tell
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise InputError(f"the factory {name} does not take these sizes: {error}; it takes {signature}.") from error


def _run_users_code(call: Callable[[], Any], *, doing: str) -> Any:
    """Calls the user's code; what it raises becomes a UserCodeError that shows the user's own line."""
    try:
        return call()
    except RematplanError:
        raise
    except SyntaxError as error:
        raise UserCodeError(f"{doing} failed: {error.msg} ({error.filename}:{error.lineno}).") from error
    except SystemExit as error:
        raise UserCodeError(f"{doing} called sys.exit({error.code!r}); a factory has to return a Workload.") from error
    except Exception as error:
        frame = users_frame(error)
        if frame is None:
            raise  # not the user's code
        message = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise UserCodeError(f"{doing} raised {type(error).__name__}: {message} ({frame}).") from error


def _described(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
