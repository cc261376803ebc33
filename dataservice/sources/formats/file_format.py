"""What all formats begin with: the source, its storage, and the files with their suffixes."""

from typing import ClassVar

from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.sources.storage import SourceFile, Storage


class FileFormat:
    """The files of one source, of which a format has its own way to read samples."""

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        self._spec = spec
        self._owner = f"source {spec.name!r}"
        self._storage = storage
        self._limits = limits

    def files(self) -> tuple[SourceFile, ...]:
        """The files at the source's URL; of a folder, those with a suffix of this format."""
        return self._storage.files(self.suffixes)
