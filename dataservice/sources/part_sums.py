"""Checksums of an index's parts, so that the next run need not read the rows that it keeps.

INDEX_DIR/SOURCE_NAME/sums.json  by name, the SHA-256 of each part that was whole when a run ended

    part ──► bytes of a part that was whole? ──► kept
                    └─ other bytes, or none known ──► every row is read and checked

Only who writes an index goes by them. Whoever opens one checks its rows: this file may be missing,
or of anybody.
"""

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version

from dataservice.core import distribution
from dataservice.core.limits import DecodeLimits
from dataservice.sources.index_folder import IndexFolder

SUMS = "sums.json"
_BLOCK_BYTES = 2**20


class PartSums:
    """The parts of one index that are known to be whole."""

    def __init__(self, folder: IndexFolder, limits: DecodeLimits) -> None:
        """Raises SourceError where the folder cannot be read."""
        self._folder = folder
        # What makes a part whole may be another matter to another release, or under other limits.
        self._judged_by = [version(distribution.NAME), repr(limits)]
        self._recorded = self._read()
        self._found: dict[str, str] = {}

    def vouch_for(self, name: str) -> bool:
        """Whether a part has the bytes of one that was whole. Reads it, where a sum is known.
        Raises FileNotFoundError where there is no such part."""
        if name not in self._recorded:
            return False
        self._found[name] = self._sum(name)
        return self._found[name] == self._recorded[name]

    def record(self, names: Iterable[str]) -> None:
        """Write down the parts of a finished run, all of which are whole. Raises SourceError where
        it cannot be written."""
        sums = {name: self._found.get(name) or self._sum(name) for name in names}
        text = json.dumps({"judged_by": self._judged_by, "sha256": sums}, indent=1)
        with self._folder.replace(SUMS) as stream:
            stream.write(text.encode())

    def _read(self) -> dict[str, str]:
        try:
            recorded = json.loads(self._folder.read(SUMS) or b"{}")
            same = recorded.get("judged_by") == self._judged_by
            return {str(name): str(of) for name, of in recorded["sha256"].items()} if same else {}
        except (ValueError, KeyError, AttributeError, RecursionError):
            return {}

    def _sum(self, name: str) -> str:
        found = hashlib.sha256()
        with self._folder.open(name) as stream:
            while block := stream.read(_BLOCK_BYTES):
                found.update(block)
        return found.hexdigest()
