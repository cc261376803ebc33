"""Catalogs of large indexes, of which a job needs only the lengths to begin.

    opener: lengths ──► catalog ──► job runs ──────────────────────────► all is at hand, and kept
                           ├── opener: rows, for a step that is being planned ──┤
                           └── opener: details of all, at the lowest priority ──┘

Contract.
  Success   the catalog is usable at once. Its details are read by one process: of a team's
            catalogs one after another, of several teams' a few at once, so that a team whose
            storage hangs leaves the others their turns. A step that is planned before that has its
            own fetched.
  Failure   an index that turns out to be damaged ends whatever uses the catalog, by that error.
            Where it only could not be read, each step goes on fetching its own details.
  Closing   nothing is waited for: the processes end with the opener.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict

from dataservice.core.errors import IndexStaleError, ServiceError
from dataservice.core.job import JobRecord
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import IntArray
from dataservice.core.team import team_of
from dataservice.sources.catalog import CatalogHead, IndexedCatalog
from dataservice.sources.catalog_handover import RowFiles, take_over_details, take_over_lengths
from dataservice.sources.index_cache import IndexCache
from dataservice.sources.late_details import LateDetails
from dataservice.sources.manifest import AGAIN

log = logging.getLogger(__name__)

TEAMS_AT_ONCE = 2  # whose indexes are read whole: each process may take as much as one that opens


class LateIndexes:
    """Makes such catalogs, and completes them. Safe for use from several threads."""

    def __init__(
        self,
        *,
        fetch: Callable[[Sequence[object]], int],
        read: Callable[[Sequence[object]], int],
        cache: IndexCache,
        limits: DecodeLimits,
    ) -> None:
        """Both get what says which index it is, and give a descriptor of a DetailFile: `fetch` of
        the rows that come behind that, `read` of all."""
        self._fetch = fetch
        self._read = read
        self._cache = cache
        self._limits = limits
        self._turns: dict[str, threading.Lock] = {}  # by team
        self._places = threading.Semaphore(TEAMS_AT_ONCE)

    def catalog(self, record: JobRecord, head: CatalogHead, lengths: int) -> IndexedCatalog:
        """The catalog of these lengths; this function closes their file. Raises ValueError where
        they contradict each other."""
        identity = [head.identity.fingerprint, head.identity.places]
        index = [asdict(record), identity, head.rows_name]

        def fetch(rows: IntArray) -> int:
            return self._fetch([*index, rows.tolist()])

        try:
            catalog = take_over_lengths(head, lengths, self._limits, fetch)
        except BaseException:
            os.close(lengths)
            raise
        threading.Thread(
            target=self._complete,
            args=(weakref.ref(catalog), index, record.name, lengths),
            name="reading an index",
            daemon=True,
        ).start()
        return catalog

    def _complete(
        self,
        wanted: "weakref.ref[IndexedCatalog]",
        index: Sequence[object],
        job: str,
        lengths: int,
    ) -> None:
        """Read the details of a catalog, if its job is still there when its turn comes."""
        try:
            with self._turn(team_of(job)), self._places:
                details = self._read(index) if wanted() is not None else None
            catalog = wanted()
            if details is not None and catalog is not None:
                self._give(catalog, job, RowFiles(lengths=lengths, details=details))
            elif details is not None:
                os.close(details)
        except IndexStaleError as error:
            log.error("job %r: what its index says cannot be used: %s", job, error)
            catalog = wanted()
            if catalog is not None and isinstance(late := catalog.parts.details, LateDetails):
                late.fail(error)
        except ServiceError as error:
            log.warning(
                "job %r: its index could not be read whole, so each step waits for its own rows "
                "of it: %s",
                job,
                error,
            )
        finally:
            os.close(lengths)

    def _turn(self, team: str) -> threading.Lock:
        return self._turns.setdefault(team, threading.Lock())

    def _give(self, catalog: IndexedCatalog, job: str, files: RowFiles) -> None:
        """Complete a catalog, and keep its rows. Raises IndexStaleError where they are damaged."""
        kept = files.copied()
        try:
            take_over_details(catalog, files.details)
            log.info("job %r: its index has been read whole, and checked", job)
            self._cache.keep(team_of(job), catalog.parts.rows_name, kept)
        except ValueError as error:
            raise IndexStaleError(
                f"the index is damaged: {error}. Write it again: {AGAIN}; the same files give the "
                "same index, and checkpoints fit it. Then start the service again, so that it "
                "opens the index anew."
            ) from error
        finally:
            kept.close()
