"""Environment of all tests: no accelerator, a cache folder of their own, and files that are no tests left alone."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

# Set before anything imports JAX, and inherited by the processes that pytest-xdist and the compiler targets start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_OWN_CACHE = "REMATPLAN_TEST_CACHE"
if _OWN_CACHE not in os.environ:
    # One folder for a whole test run: workers share what one of them compiled, and no test reads the user's cache.
    os.environ[_OWN_CACHE] = tempfile.mkdtemp(prefix="rematplan-tests-")
    atexit.register(shutil.rmtree, os.environ[_OWN_CACHE], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ[_OWN_CACHE]

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start inherits that. Tests of
# interruption need the ordinary answer to it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
