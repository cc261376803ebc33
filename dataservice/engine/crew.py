"""The workers as an operator sees them: listed, and restarted one after another."""

import asyncio
import logging
from collections.abc import Sequence

from dataservice.core.errors import ConflictError, NotFoundError
from dataservice.core.ports import WorkerPool
from dataservice.engine.api import WorkerStatus
from dataservice.engine.dispatch import Dispatcher

log = logging.getLogger(__name__)


class Crew:
    """The pool's workers with the dispatcher's books. One restart runs at a time."""

    def __init__(self, pool: WorkerPool, dispatcher: Dispatcher) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._restart: asyncio.Task[None] | None = None

    def status(self) -> list[WorkerStatus]:
        """The workers as they are now."""
        load = self._dispatcher.load()
        statuses = []
        for info in self._pool.workers():
            packs, outstanding_tokens = load.get(info.worker, (0, 0.0))
            statuses.append(
                WorkerStatus(info=info, packs=packs, outstanding_tokens=outstanding_tokens)
            )
        return statuses

    def restart(self, workers: Sequence[str]) -> list[str]:
        """Begin to replace these workers, all by default. Raises NotFoundError, ConflictError."""
        known = [info.worker for info in self._pool.workers() if info.state != "draining"]
        if unknown := sorted(set(workers) - set(known)):
            raise NotFoundError(
                f"there is no worker {', '.join(unknown)}; there are {', '.join(known) or 'none'}. "
                "See `dataservice workers list`: a worker that was replaced has another name."
            )
        if self._restart is not None and not self._restart.done():
            raise ConflictError(
                "workers are being replaced already. See `dataservice workers list` for those "
                "that drain, and come back when there are none."
            )
        chosen = [name for name in known if not workers or name in workers]
        self._restart = asyncio.create_task(self._renew(chosen))
        return chosen

    async def stop(self) -> None:
        """Replace no more; a worker that drains is left to the pool."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)

    async def _renew(self, workers: Sequence[str]) -> None:
        log.info("replacing %s", ", ".join(workers))
        try:
            await self._pool.renew(workers, self._dispatcher.drained)
        except Exception:
            log.exception("replacing workers failed")
        else:
            log.info("replaced %s", ", ".join(workers))
