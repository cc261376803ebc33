"""The console of the commands: printed text cannot control the terminal."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from dataservice.core.visible import LINE_BREAKS, visible

UNBOUNDED = 10_000  # characters; no table of ours needs as many


class Terminal(Console):
    """A console for text from any origin. Names, keys and errors from the service are only shown:
    they cannot move the cursor, set titles or reverse the direction of text. Where it writes to a
    pipe or a file, lines have the length that they need, unless COLUMNS says otherwise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = UNBOUNDED

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich does, with characters that cannot be printed written as escapes."""
        return _shown(super().render(renderable, options))


def _shown(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        text = segment.text
        if segment.control is not None or text.isprintable():
            yield segment  # control segments come from rich itself, not from any text
        else:
            yield Segment(visible(text, 10 * len(text), keep=LINE_BREAKS), segment.style)
