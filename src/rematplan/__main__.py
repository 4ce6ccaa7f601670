"""`python -m rematplan`: the command line."""

from __future__ import annotations

import sys

from rematplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
