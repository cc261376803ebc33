"""What every list of a data set's files is held to, whichever format has it."""

import re
from pathlib import Path

import pytest

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.sources.formats.registry import list_files


def check_that_its_list_is_believed(
    source: SourceSpec, folder: Path, *, lost: str, list_name: str, damaged: str
) -> None:
    """A file that the list names may not be missing, and a damaged list is refused."""
    (folder / lost).unlink()
    with pytest.raises(SourceError, match=rf"lacks 1 of the 2 files.*{re.escape(lost)}"):
        list_files(source)
    (folder / list_name).write_text(damaged)
    with pytest.raises(SourceError, match=rf"{re.escape(list_name)} is no list"):
        list_files(source)
