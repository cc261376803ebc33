from collections.abc import Iterator

import pytest

from tests.cli.support import CommandLine, command_line


@pytest.fixture(scope="module")
def cli() -> Iterator[CommandLine]:
    """The command, whose service does not answer."""
    with command_line() as run:
        run.service = "127.0.0.1:9"  # nobody's
        yield run
