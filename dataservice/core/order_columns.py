"""Orders of packs of one step as columns: chosen, shared out and sent without an object for any."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import expanded, sample_starts
from dataservice.core.orders import PackKey, PackKeys, PackOrder
from dataservice.core.sample_columns import (
    PackedSamples,
    SampleColumns,
    Samples,
    SamplesFoundOnce,
)
from dataservice.core.team import TeamShare

# Of a step of no more, the samples are looked up by who plans it, and kept until it is over.
FEW_SAMPLES = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackOrders(Sequence[PackOrder]):
    """k orders of one step, of one job: see PackOrder. `pack` and `degree` int[k]; a pack's samples
    are the `counts` int64[k] rows from `starts` int64[k] on of the step's `samples`."""

    job: str
    step: int
    plan_digest: str
    pipeline: str
    share: TeamShare
    pack: NDArray[np.int64]
    degree: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    samples: Samples

    @staticmethod
    def of(orders: Sequence[PackOrder]) -> "PackOrders":
        """The same orders, which are of one step."""
        if isinstance(orders, PackOrders):
            return orders
        key = orders[0].key if orders else PackKey(job="", step=0, plan_digest="", pack=0)
        counts = np.array([len(order.samples) for order in orders], np.int64)
        return PackOrders(
            job=key.job,
            step=key.step,
            plan_digest=key.plan_digest,
            pipeline=orders[0].pipeline if orders else "",
            share=orders[0].share if orders else TeamShare(),
            pack=np.array([order.key.pack for order in orders], np.int64),
            degree=np.array([order.degree for order in orders], np.int64),
            starts=sample_starts(counts)[:-1],
            counts=counts,
            samples=SampleColumns.of([sample for order in orders for sample in order.samples]),
        )

    def __len__(self) -> int:
        return len(self.pack)

    @overload
    def __getitem__(self, place: int) -> PackOrder: ...
    @overload
    def __getitem__(self, place: slice) -> "PackOrders": ...
    def __getitem__(self, place: int | slice) -> "PackOrder | PackOrders":
        if isinstance(place, slice):
            return self._chosen(place)
        start = int(self.starts[place])
        return PackOrder(
            key=self.key(place),
            degree=int(self.degree[place]),
            pipeline=self.pipeline,
            share=self.share,
            samples=PackedSamples(self.samples, range(start, start + int(self.counts[place]))),
        )

    def key(self, place: int) -> PackKey:
        """The name of one of the packs."""
        pack = int(self.pack[place])
        return PackKey(job=self.job, step=self.step, plan_digest=self.plan_digest, pack=pack)

    def keys(self, places: Sequence[int]) -> PackKeys:
        """The names of some of the packs."""
        packs = self.pack[list(places)].tolist()
        return PackKeys(job=self.job, step=self.step, plan_digest=self.plan_digest, packs=packs)

    def only(self, places: Sequence[int] | NDArray[np.int64]) -> "PackOrders":
        """Some of the orders, in this order."""
        return self._chosen(np.asarray(places, np.int64))

    def shared_out(self, shares: Iterable[Sequence[int] | NDArray[np.int64]]) -> list["PackOrders"]:
        """Some of the orders for each share, whose samples are looked up for all shares at once,
        when those of one are asked for."""
        places = [np.asarray(share, np.int64) for share in shares]
        if not places:
            return []
        if isinstance(self.samples, SampleColumns):
            return [self.only(share) for share in places]
        all_of_them = self.only(np.concatenate(places))
        rows = expanded(all_of_them.starts, all_of_them.counts)
        found = SamplesFoundOnce(self.samples, rows)
        starts = sample_starts(all_of_them.counts)[:-1]
        together = replace(all_of_them, samples=found, starts=starts)
        ends = np.cumsum([len(each) for each in places]).tolist()
        return [together[end - len(each) : end] for each, end in zip(places, ends, strict=True)]

    @property
    def written_soon(self) -> bool:
        """Whether they have few samples, all at hand: they are written sooner than handed over to a
        thread that would."""
        return isinstance(self.samples, SampleColumns) and self.counts.sum() <= FEW_SAMPLES

    def columns(self) -> SampleColumns:
        """The samples of all packs end to end."""
        starts, counts = self.starts, self.counts
        if len(self) and (starts[1:] == (starts + counts)[:-1]).all():
            return self.samples.cut(int(starts[0]), int(starts[-1] + counts[-1]))
        return self.samples.take(expanded(starts, counts))

    def _chosen(self, at: slice | NDArray[np.int64]) -> "PackOrders":
        return replace(
            self,
            pack=self.pack[at],
            degree=self.degree[at],
            starts=self.starts[at],
            counts=self.counts[at],
        )
