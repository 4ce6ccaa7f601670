"""The pages of the documentation as they stand in the repository: their fences, and which of them Sphinx executes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A Markdown file; `executed` if its cells run while the book is built."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def executed(self) -> bool:
        return "\nkernelspec:" in self.text.partition("\n#")[0]

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks with exactly this info string, in order."""
        return [code for info, code in FENCE.findall(self.text) if info.strip() == language]


BOOK = [Page(path) for path in sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*BOOK, *(Page(ROOT / name) for name in ("README.md", "CONTRIBUTING.md"))]
