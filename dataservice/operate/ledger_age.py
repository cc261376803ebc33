"""Moves old entries of the ledger out of state.db, and gives back the room that they were in; some
at a time while the service runs."""

import asyncio
import logging
import time

from dataservice.core.state_store import StateStore
from dataservice.core.threads import CallThreads

log = logging.getLogger(__name__)

LOOK_EVERY_S = 3600.0
DAY_S = 86_400.0
# Seconds between two files: other calls of the store wait while one is written.
REST_S = 2.0

in_archiving = CallThreads("old entries of the ledger", 1)


async def archive_now_and_then(
    store: StateStore, after_days: float, *, every_s: float = LOOK_EVERY_S, rest_s: float = REST_S
) -> None:
    """Until cancelled: archive the entries that were planned `after_days` ago or before, then give
    back what room they have left. What fails is logged, and tried again at the next visit."""
    while True:
        moved = given_bytes = 0
        try:
            while some := await in_archiving(
                store.archive_ledger, time.time() - after_days * DAY_S
            ):
                moved += some
                await asyncio.sleep(rest_s)
        except Exception:
            log.exception("old entries of the ledger stay in state.db; it is tried again")
        try:  # also where the disk was too full for a file
            while some := await in_archiving(store.trim):
                given_bytes += some
                await asyncio.sleep(rest_s)
        except Exception:
            log.exception("free room stays in the state directory; it is tried again")
        if moved:
            log.info("%d old entries of the ledger went from state.db to Parquet files", moved)
        if given_bytes:
            log.info("%d KB of free room were given back", given_bytes >> 10)
        await asyncio.sleep(every_s)
