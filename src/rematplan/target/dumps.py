"""What the TPU compiler writes about a program when told to (`xla_dump_to`): its reports, and the program itself.

Comes in: the folder. Goes out: the text of one file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_PROGRAM = "*after_codegen.txt"


def read_dump(folder: Path, pattern: str) -> str:
    """The text of the last file of this name.

    Raises:
      RuntimeError: the compiler wrote none.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        dumped = ", ".join(sorted(path.name for path in folder.iterdir())[:5])
        raise RuntimeError(f"the compiler dumped no {pattern}; it dumped {dumped or 'nothing'}")
    return found[-1].read_text(encoding="utf-8")


def scheduled_text(read_back: Callable[[], str], dumped: Callable[[], Path]) -> str:
    """A compiled TPU program as text: from its executable or, where jaxlib cannot read that, from the compiler's dump.

    jaxlib 0.10.2 refuses programs in which libtpu 0.0.52 hands gathers to SparseCores: an embedding's or a loss's large enough,
    on v5p, v6e and v7x.

    Args:
      read_back: asks the executable.
      dumped: the folder of the dump, or what first makes it; called only if the executable was not readable.
    """
    try:
        return read_back()
    except RuntimeError:
        folder = dumped()
        if not any(folder.glob(_PROGRAM)):
            raise
        return read_dump(folder, _PROGRAM)
