"""Every private piece of JAX that rematplan uses, in one place, each with the reason.

`tests/test_jax_private.py` fails loudly when JAX moves one of them.
"""

from __future__ import annotations

import os
from typing import Any

import flax
import jax
from jax._src import source_info_util  # no public way from an equation to its user frame (0.10.2)
from jax._src.sharding_impls import UnspecifiedValue  # jit's "no sharding given" marker has no public test (0.10.2)

# frames of these packages are not the user's
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(p.__file__)) + os.sep for p in (jax, flax) if p.__file__) + (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)
_OWN_MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads") + os.sep


def is_unspecified(sharding: Any) -> bool:
    """Whether a jit parameter's sharding was left open."""
    return sharding is None or isinstance(sharding, UnspecifiedValue)


def user_location(source_info: Any) -> str:
    """`file.py:12 (function)` of the innermost frame outside JAX, Flax and rematplan; empty if there is none."""
    fallback = ""
    for frame in source_info_util.user_frames(source_info.traceback):
        text = f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name.split('.')[-1]})"
        fallback = fallback or text
        if frame.file_name.startswith(_OWN_MODELS) or not frame.file_name.startswith(_LIBRARIES):
            return text
    return fallback


def itemsize(dtype: Any) -> int:
    """Bytes of one element, PRNG keys included."""
    return int(getattr(dtype, "itemsize", 4))
