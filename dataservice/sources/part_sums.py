"""Checksums of an index's parts, so that the next run need not read the rows that it keeps.

INDEX_DIR/SOURCE_NAME/sums.json  by name, the SHA-256 of each part that was whole

    part ──► bytes of a part that was whole? ──► kept
                    └─ other bytes, or none known ──► every row is read and checked, once

Of a part that a run has just written nothing is known: what lies there need not be what was
written. Only who writes an index goes by them. Whoever opens one checks its rows: this file may be
missing, or of anybody.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from importlib.metadata import version

from dataservice.core import distribution
from dataservice.core.errors import SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.manifest import PartRecord
from dataservice.sources.part_reader import require_whole

SUMS = "sums.json"
_BLOCK_BYTES = 2**20
_WRITE_EVERY_S = 30.0

log = logging.getLogger(__name__)


class PartSums:
    """The parts of one index that are known to be whole."""

    def __init__(self, folder: IndexFolder, limits: DecodeLimits) -> None:
        """Raises SourceError where the folder cannot be read."""
        self._folder, self._limits = folder, limits
        # What makes a part whole may be another matter to another release, or under other limits.
        self._judged_by = [version(distribution.NAME), repr(limits)]
        self._recorded = self._read()
        self._whole: dict[str, str] = {}
        self._written_s = time.monotonic()

    def require_whole(self, name: str, record: PartRecord) -> None:
        """Raises IndexStaleError unless a part is whole, and the one that its record describes; its
        rows are read only where it has not the bytes of one that was. Now and then all that are
        known are written down, for a run that goes on behind this one."""
        found = self._sum(name)
        if found != self._recorded.get(name):
            require_whole(self._folder, record, self._limits, name)
        self._whole[name] = found
        if time.monotonic() - self._written_s > _WRITE_EVERY_S:
            self._write(self._recorded | self._whole)

    def write(self) -> None:
        """Write down the parts that are known to be whole, and no others. Where that cannot be
        done, the next run takes longer, and the log says so."""
        if self._whole != self._recorded:
            self._write(self._whole)

    def _write(self, whole: Mapping[str, str]) -> None:
        sums = {"judged_by": self._judged_by, "sha256": whole}
        text = json.dumps(sums, indent=1, sort_keys=True)
        try:
            with self._folder.replace(SUMS) as stream:
                stream.write(text.encode())
        except (SourceError, OSError) as error:
            log.warning("the next run of index will read all rows again: %s", error)
        self._written_s = time.monotonic()

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
