import io

from rich.table import Table
from rich.text import Text

from dataservice.cli.terminal import Terminal


def test_nothing_that_is_printed_acts_on_the_terminal():
    sink = io.StringIO()
    terminal = Terminal(file=sink, force_terminal=True, width=80)
    acting = "\x1b]0;owned\x07\x1b[2J\u202ename"
    table = Table("client")
    table.add_row(acting)
    for renderable in (acting, Text(acting, style="red"), table):
        terminal.print(renderable, highlight=False)
    written = sink.getvalue()
    assert "\x1b]0;" not in written
    assert "\x1b[2J" not in written
    assert "\u202e" not in written
    assert "\x1b[31m" in written  # its own colours stay
    assert written.count("name") == 2  # the table has no room for all of it
    assert written.count("owned") == 3
