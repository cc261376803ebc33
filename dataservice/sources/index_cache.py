"""The checked rows of indexes on a disk of this machine, mapped again when a job is opened again.

    team, what the index is, its parts as they lie there ──digest──► NAME.details, NAME.lengths

Reading an index takes a microsecond a sample, of which nearly all is to check it. So what was read
and checked once is kept, in the form in which it is mapped: the next opening of any job of the team
over the same parts, also after the service was started again, reads their manifests alone.

Contract.
  Found    the rows are those that reading the parts gives. Manifests, files of the sources,
           processor, tokenizer and limits are compared all the same: `find_index` does it.
  Two      jobs or services that keep the same rows at once keep one of both; nobody waits. A
           file has its name once it is whole and on the disk, and is never written to again.
  Damaged  rows that are not whole are removed, and the index is read. Of their values some places
           are looked at: the folder deserves the trust of the state directory.
  Full     what was opened least recently goes, so that about `limit_bytes` are kept, and at most
           half of what the disk has for it. Rows in use stay with who maps them until they end.
           What cannot be written is not kept, and nothing else comes of it.
"""

import hashlib
import logging
import os
import re
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path

from dataservice.core.limits import DecodeLimits
from dataservice.sources.catalog import CatalogHead, IndexedCatalog
from dataservice.sources.catalog_handover import RowFiles, take_over
from dataservice.sources.unnamed_file import named

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{64}")
LENGTHS, DETAILS = ".lengths", ".details"


class IndexCache:
    """The rows in one folder. Safe for use from several threads, and beside other services."""

    def __init__(self, folder: Path | None, limit_bytes: int = 0) -> None:
        """Makes the folder, for this user alone. Where it cannot, or others may look into the
        folder, nothing is kept, as without any."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not ours or found.st_mode & 0o077:
                raise PermissionError("it is not a folder of this user alone; chmod 700")
        except OSError as error:
            self._folder = None
            log.warning(
                "no opened index is kept, each is read whenever its job is opened: %s: %s",
                folder,
                error.strerror or error,
            )

    @property
    def folder(self) -> str | None:
        """Where files are to lie that `keep` gives a name."""
        return None if self._folder is None else str(self._folder)

    def names(self, team: str) -> list[str]:
        """The rows that are kept for a team."""
        if self._folder is None:
            return []
        return sorted(path.stem for path in self._of(team).glob(f"*{LENGTHS}"))

    def find(self, team: str, head: CatalogHead, limits: DecodeLimits) -> IndexedCatalog | None:
        """The catalog of this head, if its rows are kept."""
        path = self._path(team, head.rows_name)
        if path is None:
            return None
        try:
            lengths = os.open(path.with_suffix(LENGTHS), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                details = os.open(path.with_suffix(DETAILS), os.O_RDONLY | os.O_NOFOLLOW)
            except BaseException:
                os.close(lengths)
                raise
            os.utime(lengths)
        except OSError:
            return None
        try:
            return take_over(head, RowFiles(lengths=lengths, details=details), limits, checked=True)
        except ValueError as error:
            log.warning("an index that was kept is damaged, and is read again: %s", error)
            self._remove(path)
            return None

    def keep_soon(self, team: str, name: str, files: RowFiles) -> None:
        """The same as `keep` in a thread, which closes the files."""

        def keep() -> None:
            try:
                self.keep(team, name, files)
            finally:
                files.close()

        threading.Thread(target=keep, name="keeping an index", daemon=True).start()

    def keep(self, team: str, name: str, files: RowFiles) -> None:
        """Keep rows that were taken over, under the head's name for them. Their files stay the
        caller's. Takes as long as the disk needs to write them."""
        path = self._path(team, name)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for descriptor, suffix in ((files.details, DETAILS), (files.lengths, LENGTHS)):
                os.fchmod(descriptor, 0o400)
                os.fsync(descriptor)
                with suppress(FileExistsError):  # another was quicker, with the same rows
                    named(descriptor, str(path.with_suffix(suffix)))
            self._make_room()
        except OSError as error:
            log.info("an opened index is not kept: %s", error.strerror or error)

    def _make_room(self) -> None:
        """Remove the rows that were opened least recently. O(kept)."""
        assert self._folder is not None
        kept = []
        for path in self._folder.glob(f"*/*{DETAILS}"):  # each is there before its lengths are
            with suppress(OSError):
                found = [path.stat()]
                with suppress(FileNotFoundError):
                    found.append(path.with_suffix(LENGTHS).stat())
                kept.append((found[-1].st_mtime_ns, sum(each.st_size for each in found), path))
        left_bytes = sum(size_bytes for _, size_bytes, _ in kept)
        most_bytes = (left_bytes + shutil.disk_usage(self._folder).free) // 2
        for _, size_bytes, path in sorted(kept):
            if left_bytes <= min(self._limit_bytes, most_bytes):
                return
            left_bytes -= size_bytes
            self._remove(path)

    def _remove(self, path: Path) -> None:
        for suffix in (LENGTHS, DETAILS):
            with suppress(OSError):
                path.with_suffix(suffix).unlink()

    def _of(self, team: str) -> Path:
        assert self._folder is not None
        return self._folder / hashlib.sha256(team.encode()).hexdigest()[:32]

    def _path(self, team: str, name: str) -> Path | None:
        if self._folder is None or not _NAME.fullmatch(name):
            return None
        return self._of(team) / name


NO_CACHE = IndexCache(None)
