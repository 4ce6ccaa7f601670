"""How a record shows itself: in a rich console, in a notebook, and as text. One base class; it knows no record.

Comes in: a record's `KIND` and `to_json()`. The renderers read that plain data only, so a record that was loaded from a
file looks as it did when it was made. rich and the charts are imported when something is shown, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import RenderableType


class Displayed:
    """Base of the records that the interface returns."""

    KIND: ClassVar[str]  # chooses the renderer: the verb of the command line that prints such a record

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON-ready dictionary."""
        raise TypeError(f"{type(self).__name__} does not define to_json")

    def __rich__(self) -> RenderableType:
        from rematplan.report.terminal import render

        return render(self.KIND, self.to_json())

    def __str__(self) -> str:
        from rematplan.report.terminal import render_text

        return render_text(self.KIND, self.to_json())

    def _repr_html_(self) -> str:
        from rematplan.report.notebook import html_fragment

        return html_fragment(self.KIND, self.to_json())
