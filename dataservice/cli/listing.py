"""Tables that lose nothing where a terminal is narrow: names fold, and columns follow below."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

NARROWEST = 7  # characters of a column of words
_BETWEEN = 2  # characters between two columns, and in both margins together


class Listing:
    """A table of `columns`, of which the first names the rows. Those of `words` hold names and
    sentences, which go on in the next line of their cell, at `least` that many characters wide.
    `labels` are short words, the others numbers, each on one line. Columns that do not fit into the
    width of the terminal follow in a table below, which names the rows again."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        words: Sequence[str],
        labels: Sequence[str] = (),
        title: str | None = None,
        least: int = NARROWEST,
    ) -> None:
        self._columns = list(columns)
        self._words, self._labels = frozenset(words), frozenset(labels)
        self._title = title
        self._least = least
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """A cell for each column. Brackets in it are no markup."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One table, or as many as it takes."""
        title = self._title
        for places in self._split(options.max_width):
            yield self._table(places, title)
            title = None

    def _split(self, width: int) -> Iterator[list[int]]:
        """The places of each table's columns, the first column in each of them."""
        left = list(range(1, len(self._columns)))
        while left:
            room = width - self._width(0) - _BETWEEN
            taken = [0]
            for place in left:
                room -= self._width(place) + _BETWEEN
                if room < 0 and len(taken) > 1:
                    break
                taken.append(place)
            left = left[len(taken) - 1 :]
            yield taken

    def _width(self, place: int) -> int:
        """The characters that a column needs."""
        name = self._columns[place]
        widest = max(cell_len(text) for text in (name, *(row[place].plain for row in self._rows)))
        return min(widest, max(self._least, len(name))) if name in self._words else widest

    def _table(self, places: Sequence[int], title: str | None) -> Table:
        table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for place in places:
            name = self._columns[place]
            if name in self._words:
                table.add_column(name, overflow="fold")
            else:
                label = name in self._labels
                table.add_column(name, justify="left" if label else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[place] for place in places))
        return table
