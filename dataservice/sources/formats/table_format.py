"""What formats of tables have in common: samples are made of rows, by the rules for columns."""

from collections.abc import Iterator
from contextlib import contextmanager

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut
from dataservice.sources.formats.file_format import FileFormat
from dataservice.sources.formats.table_rows import TableRows
from dataservice.sources.storage import Storage

# Descriptions of this many files are kept by formats that read rows one by one.
KEPT_DESCRIPTIONS = 1024


class TableFormat(FileFormat):
    """The files of one source, of which every row is a sample."""

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        super().__init__(spec, storage, limits)
        self._samples = TableRows(spec, storage, limits)

    @contextmanager
    def _damage(self, path: str, noun: str) -> Iterator[None]:
        """Turn the ValueErrors of a damaged file, which should be a `noun`, into SourceError."""
        try:
            yield
        except ValueError as error:
            raise SourceError(
                f"{self._owner}: {path} is not an {noun}, or a truncated or damaged one: "
                f"{cut(error)}. Copy the file again, or correct the source's format."
            ) from error
