"""The project's Markdown pages, and what tests read out of them: fenced blocks, commands, inline code, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)


@dataclass(frozen=True, slots=True)
class Page:
    """One page, by its path from the root."""

    path: Path

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        return [body for name, body in _FENCE.findall(self.text) if name == language]

    def block(self, language: str) -> str:
        """The only block of this language."""
        (found,) = self.blocks(language)
        return found

    def code(self) -> list[str]:
        """Inline code, which may run over a line's end."""
        return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", self.prose)]

    def shell(self) -> list[str]:
        """Lines of blocks that are commands (`bash` or no language), continued lines joined."""
        text = "\n".join((*self.blocks("bash"), *self.blocks(""))).replace("\\\n", " ")
        return text.splitlines()

    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)


def _pages() -> tuple[Page, ...]:
    files = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("epp/README.md"))
    return tuple(Page(file.relative_to(ROOT)) for file in sorted(files))


PAGES = _pages()
