"""Rules that explain traps: facts about a program and its checkpointing -> `Finding`s.

`written.py` is about what the user wrote, `configured.py` about a policy or plan on it, `residuals.py` about what is kept,
`measured.py` about a compiler's figures and a budget. Each rule is a function of plain data that only says what is certain
from that data. `docs/findings.md` explains every code with a minimal program.
"""

from rematplan.findings.configured import of_regions, of_saving, without_policies
from rematplan.findings.measured import of_budget, of_loops, of_rows, of_target
from rematplan.findings.residuals import of_residuals
from rematplan.findings.written import of_program

__all__ = [
    "of_budget",
    "of_loops",
    "of_program",
    "of_regions",
    "of_residuals",
    "of_rows",
    "of_saving",
    "of_target",
    "without_policies",
]
