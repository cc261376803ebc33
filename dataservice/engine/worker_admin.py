"""What an operator asks of the workers: to list them, and to restart them one after another."""

import asyncio
import logging
from collections.abc import Sequence

from dataservice.core.errors import ConflictError, NotFoundError
from dataservice.core.ports import WorkerPool
from dataservice.engine.api import WorkerStatus
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.tasks import cancel_all

log = logging.getLogger(__name__)


class WorkerAdmin:
    """The pool's workers, with what the dispatcher has ordered from them. One restart runs at a
    time."""

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
        """Begin to replace these workers, all by default. Returns their names. Raises NotFoundError
        where there is no such worker, ConflictError while others are being replaced."""
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
        """Replace no more workers; one that drains is left to the pool."""
        await cancel_all(self._restart)

    async def _renew(self, workers: Sequence[str]) -> None:
        log.info("replacing %s", ", ".join(workers))
        try:
            await self._pool.renew(workers, self._dispatcher.drained)
        except Exception:
            log.exception("replacing workers failed")
        else:
            log.info("replaced %s", ", ".join(workers))
