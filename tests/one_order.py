"""Packs ordered one by one: through a link that takes many, and by workers that are scripted so."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from dataservice.core.errors import ServiceError
from dataservice.core.orders import PackKey, PackOrder, PackReceipt
from dataservice.core.ports import WorkerInfo, WorkerLink
from dataservice.core.receipts import PackAnswers, PackReceipts


async def prepared(link: WorkerLink, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
    """The receipt of one pack. Raises why it could not be made."""
    found: list[PackAnswers] = [answers async for answers in link.order(worker, [order])]
    for answers in found:
        for error in answers.failures.values():
            raise error
    (receipt,) = (receipt for answers in found for receipt in each_of(answers.receipts))
    return receipt


def each_of(receipts: PackReceipts) -> list[PackReceipt]:
    """The receipts one by one; of several packs, the work by source is that of all."""
    bad_end, digest_end = receipts.bad_samples.cumsum(), receipts.digests.cumsum()
    return [
        PackReceipt(
            key=PackKey(
                job=receipts.job,
                step=receipts.step,
                plan_digest=receipts.plan_digest,
                pack=int(receipts.pack[k]),
            ),
            size_bytes=int(receipts.size_bytes[k]),
            decode_s=float(receipts.decode_s[k]),
            room_s=float(receipts.room_s[k]),
            bad_samples=receipts.bad[bad_end[k] - receipts.bad_samples[k] : bad_end[k]],
            sample_digests=receipts.sample_digests[
                digest_end[k] - receipts.digests[k] : digest_end[k]
            ].tobytes(),
            sources=receipts.sources,
        )
        for k in range(len(receipts))
    ]


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
                    yield PackAnswers(receipts=PackReceipts.of([task.result()]))
                except ServiceError as error:
                    yield PackAnswers(failures={packs[task].key.pack: error})
        finally:
            for task in packs:
                task.cancel()
            await asyncio.gather(*packs, return_exceptions=True)
