"""Workers inside this process: for tests, and for a service on one small machine."""

from dataservice.core.ports import ServedWorker, ServeWorker
from dataservice.workers.pool import PoolConfig, Running, SupervisedPool, log


class LocalWorkerPool(SupervisedPool[ServedWorker]):
    """core.ports.WorkerPool whose workers share this process and its event loop."""

    def __init__(self, *, serve: ServeWorker, config: PoolConfig) -> None:
        super().__init__(config)
        self._serve = serve

    async def _open(self) -> None:
        pass

    async def _launch(self, worker: str) -> Running[ServedWorker]:
        served = await self._serve(worker)
        return Running(worker=worker, address=served.address, handle=served, where=served.where)

    async def _alive(self, handle: ServedWorker) -> bool:
        return True  # it lives as long as this process does

    async def _end(self, handle: ServedWorker, *, gracefully: bool) -> None:
        try:
            await handle.stop()
        except Exception:
            log.exception("the worker at %s did not stop cleanly", handle.address)

    async def _close(self) -> None:
        pass
