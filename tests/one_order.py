"""Packs ordered one by one: through a link that takes many, and by workers that are scripted so."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from dataservice.core.errors import ServiceError
from dataservice.core.orders import PackAnswers, PackOrder, PackReceipt
from dataservice.core.ports import WorkerInfo, WorkerLink


async def prepared(link: WorkerLink, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
    """The receipt of one pack. Raises why it could not be made."""
    found: list[PackAnswers] = [answers async for answers in link.order(worker, [order])]
    for answers in found:
        for error in answers.failures.values():
            raise error
    (receipt,) = (receipt for answers in found for receipt in answers.receipts)
    return receipt


class OneByOne:
    """Workers whose `prepare` answers one order take several as a link does."""

    async def prepare(self, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
        raise NotImplementedError

    async def order(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        packs = {asyncio.create_task(self.prepare(worker, each)): each for each in orders}
        done: asyncio.Queue[asyncio.Task[PackReceipt]] = asyncio.Queue()
        for task in packs:
            task.add_done_callback(done.put_nowait)
        try:
            for _ in orders:
                task = await done.get()
                try:
                    yield PackAnswers(receipts=(task.result(),))
                except ServiceError as error:
                    yield PackAnswers(failures={packs[task].key.pack: error})
        finally:
            for task in packs:
                task.cancel()
            await asyncio.gather(*packs, return_exceptions=True)
