"""The documents for readers, README, CONTRIBUTING and `docs/`, cut into what tests look at.

A block of code says its language. A word behind it is the name of the file that the reader makes
of it, and a comment above it says why a block cannot run here:

    <!-- not run: there is no cluster where the tests run -->
    ```sh
    kubectl apply -k deploy/overlays/production
    ```
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_RUN = re.compile(r"<!-- not run: *(.*?) *-->", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of code; `line` counts from 1. `not_run` is the reason, or None where it runs."""

    page: Path
    line: int
    language: str
    file_name: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link to `target`, a path or URL as it is written, `#anchor` included."""

    text: str
    target: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code of a page, in order."""
    before: Token | None = None
    for token in _tokens(page):
        if token.type == "fence" and token.map is not None:
            above = NOT_RUN.fullmatch(before.content.strip()) if before is not None else None
            language, _, file_name = token.info.strip().partition(" ")
            yield Block(
                page=page,
                line=token.map[0] + 1,
                language=language,
                file_name=file_name,
                text=token.content,
                not_run=above.group(1) if above else None,
            )
        before = token


def links(page: Path) -> Iterator[Link]:
    """The links of a page, in order."""
    for token in _inline(page):
        target: str | None = None
        text: list[str] = []
        for child in token.children or ():
            if child.type == "link_open":
                target, text = str(child.attrs["href"]), []
            elif child.type == "link_close" and target is not None:
                yield Link(text="".join(text), target=target)
                target = None
            else:
                text.append(child.content)


def anchors(page: Path) -> set[str]:
    """What `#…` may lead to in a page, as GitHub names its headings."""
    found: set[str] = set()
    for title in headings(page):
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        same = sum(1 for each in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", each))
        found.add(f"{name}-{same}" if same else name)
    return found


def headings(page: Path) -> Iterator[str]:
    """The titles of a page as they are shown, without marks."""
    tokens = _tokens(page)
    for opening, inside in pairwise(tokens):
        if opening.type == "heading_open":
            yield "".join(child.content for child in inside.children or ())


def code_words(page: Path) -> set[str]:
    """What stands in back-ticks within the text of a page."""
    children = (child for token in _inline(page) for child in token.children or ())
    return {child.content for child in children if child.type == "code_inline"}


def _inline(page: Path) -> Iterator[Token]:
    return (token for token in _tokens(page) if token.type == "inline")


@cache
def _tokens(page: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(page.read_text()))
