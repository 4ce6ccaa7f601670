"""What `inspect` costs as a program grows: GPT of 22 to 176 blocks, up to 20 000 operations.

    python -m benchmarks.inspect

`operations` are those of the traced loss; `microseconds` the wall time for each of them; memory is the process's largest so
far. Sizes of arrays play no part: nothing is computed.
"""

from __future__ import annotations

import argparse
import resource
import time

from rich.console import Console
from rich.table import Table

import rematplan as rp
from rematplan import workloads
from rematplan.program.loss import traced_loss

BLOCKS = (22, 44, 88, 176)
GIB = 1 << 30


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    given = parser.parse_args()
    table = Table("blocks", "operations", "seconds", "microseconds", "residuals", "GiB")
    for blocks in given.blocks:
        work = workloads.gpt(blocks=blocks)
        begun = time.monotonic()
        found = rp.inspect(work)
        seconds = time.monotonic() - begun
        count = len(traced_loss(work).graph.operations)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        table.add_row(
            str(blocks),
            str(count),
            f"{seconds:.1f}",
            f"{seconds / count * 1e6:.0f}",
            str(len(found.residuals)),
            f"{memory:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
