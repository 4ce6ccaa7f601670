"""The public surface: lazy, complete, and free of JAX until used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rematplan as rp


def test_importing_the_package_does_not_import_jax():
    code = "import sys, rematplan; print(sorted({'jax', 'flax', 'numpy', 'scipy', 'rich'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'remta'.*remat"):
        rp.remta  # noqa: B018
