"""One keyword of a factory that is varied: which values it takes, and the workload for each.

Comes in: the user's factory, its other arguments, and the keyword. Goes out: `Sweep`. Knows no compilers and no budgets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rematplan.errors import InputError, UserCodeError
from rematplan.program.loss import traced_loss
from rematplan.records import SkippedValue
from rematplan.workload import Workload

_NOT_WHOLE = (str, float, bool, "str", "float", "bool")


class Sweep:
    """Workloads by the value of one keyword, made when they are asked for and kept.

    Attributes:
      name: of the factory.
      skipped: values that the factory, or the loss it returned, refused.
    """

    def __init__(self, factory: Callable[..., Workload], keywords: Mapping[str, Any], vary: str):
        self.factory = factory
        self.keywords = dict(keywords)
        self.vary = vary
        self.name = getattr(factory, "__name__", type(factory).__name__)
        self._made: dict[int, Workload] = {}
        self._refused: dict[int, SkippedValue] = {}
        self._first_error: Exception | None = None
        self._check()

    @property
    def skipped(self) -> tuple[SkippedValue, ...]:
        return tuple(self._refused[value] for value in sorted(self._refused))

    def workload(self, value: int) -> Workload | None:
        """The workload at a value; None if the factory refuses it.

        Raises:
          InputError: the factory does not return a workload.
          Exception: what the factory or the loss raises that says nothing of the value: anything but an InputError and,
            once a value was accepted, a TypeError or ValueError.
        """
        if value in self._refused:
            return None
        if value not in self._made:
            try:
                made = self.factory(**self.keywords, **{self.vary: value})
                if isinstance(made, Workload):
                    traced_loss(made)  # a loss may refuse a size, too
            except (InputError, TypeError, ValueError) as error:
                if not self._is_about_the_value(error):
                    raise
                self._first_error = self._first_error or error
                self._refused[value] = SkippedValue(value, _line(error))
                return None
            if not isinstance(made, Workload):
                kind = "None" if made is None else f"a value of type {type(made).__name__}"
                raise InputError(
                    f"the factory {self.name} returned {kind}, not a rematplan.Workload; "
                    "end it with `return rematplan.Workload(loss_fn, model, batch)`."
                )
            self._made[value] = made
        return self._made[value]

    def nothing_valid(self, low: int) -> InputError:
        """The error for a sweep none of whose first values is valid."""
        said = _line(self._first_error) if self._first_error is not None else "no value was tried"
        return InputError(
            f"{self.name} takes no value of {self.vary} at or right above {low}: {said} Begin the range at a value that it "
            "takes, or say of what it has to be a multiple."
        )

    def _is_about_the_value(self, error: Exception) -> bool:
        """Whether an error means that a value will not do, rather than that the code is wrong."""
        # the command line hands on what the user's code raised with the line that it came from
        raised = error.__cause__ if isinstance(error, UserCodeError) else error
        return isinstance(raised, InputError) or (bool(self._made) and isinstance(raised, (TypeError, ValueError)))

    def _check(self) -> None:
        """Refuses keywords that the factory does not have, or that are no numbers."""
        if self.vary in self.keywords:
            raise InputError(
                f"{self.vary} is both varied and given ({self.vary}={self.keywords[self.vary]!r}); leave one of them out."
            )
        try:
            signature = inspect.signature(self.factory)
        except (TypeError, ValueError):
            return  # some callables have no signature; calling them will tell
        try:
            signature.bind(**self.keywords, **{self.vary: 1})
        except TypeError as error:
            raise InputError(
                f"the factory {self.name} does not take these sizes: {error}; it takes {signature}."
            ) from error
        parameter = signature.parameters.get(self.vary)
        if parameter is None:  # one of **sizes
            return
        given, said = parameter.default, parameter.annotation
        has_default = given is not inspect.Parameter.empty and given is not None
        whole = isinstance(given, int) and not isinstance(given, bool)
        if (has_default and not whole) or (not has_default and said in _NOT_WHOLE):
            shown = f"its default is {given!r}" if has_default else f"it is a {getattr(said, '__name__', said)}"
            raise InputError(
                f"{self.vary} of {self.name} is not a whole number ({shown}); vary a size: it takes {signature}."
            )


def _line(error: Exception) -> str:
    """The message as one line, closed by a full stop."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if text.endswith((".", "!", "?")) else f"{text}."
