"""Errors that a user can meet, each with the exit code that the command line gives for it.

Every message is one paragraph: the number, the cause, the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rematplan.records import Finding


class RematplanError(Exception):
    """Base of every error that rematplan raises on purpose. Exit code 1."""

    exit_code = 1


class InputError(RematplanError):
    """Wrong usage or input: an unknown chip, a missing compiler, a budget that cannot be read. Exit code 2."""

    exit_code = 2


class UserCodeError(InputError):
    """The user's own code raised `__cause__`, which says nothing of the values that it was called with. Exit code 2."""


class InfeasibleBudget(RematplanError):
    """No plan fits the budget. Exit code 3.

    Attributes:
      minimum_bytes: the smallest budget for which a plan was found.
      parts: what that minimum consists of, in bytes, by a readable label.
      findings: why, where more is known: `budget-below-state`.
    """

    exit_code = 3

    def __init__(self, message: str, *, minimum_bytes: int, parts: Mapping[str, int], findings: Sequence[Finding] = ()):
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.parts = dict(parts)
        self.findings = tuple(findings)


class PlanMismatch(RematplanError):
    """The plan is not for this function, or of an unknown format version. Exit code 4."""

    exit_code = 4


class VerificationFailed(RematplanError):
    """The planned function does not compute the same thing. Exit code 5."""

    exit_code = 5


class CompilerError(RematplanError):
    """The target's compiler crashed or refused the program for a reason other than memory. Exit code 1."""
