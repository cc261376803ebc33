"""The orders of a step's packs, and an estimate of the work that decoding each takes."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dataservice.core.orders import PackKey, PackOrder, PackSample
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog
from dataservice.core.sample import SampleLengths, SampleRef
from dataservice.core.team import TeamShare

WHOLE = TeamShare()


def pack_orders(
    plan: StepPlan,
    *,
    job: str,
    digest: str,
    pipeline: str,
    catalog: Catalog,
    share: TeamShare = WHOLE,
) -> list[PackOrder]:
    """One order for each pack: its samples in sequence order, with locations and planned shapes,
    and the share of the job's team. The samples of a pack are made each time that they are read: if
    they were kept, they would be most of what the coordinator holds."""
    details = catalog.details(plan.sample_ids[plan.pack_samples])
    epochs = plan.sample_epoch[plan.pack_samples]
    offsets = plan.pack_offsets.tolist()
    return [
        PackOrder(
            key=PackKey(job=job, step=plan.step, plan_digest=digest, pack=pack),
            degree=degree,
            pipeline=pipeline,
            share=share,
            samples=_SamplesOfPack(details, epochs, offsets[pack], offsets[pack + 1]),
        )
        for pack, degree in enumerate(plan.pack_degree.tolist())
    ]


class _SamplesOfPack(Sequence[PackSample]):
    """The samples of one pack, made from the details of its step."""

    def __init__(
        self,
        details: Sequence[tuple[SampleRef, SampleLengths]],
        epochs: NDArray[np.int32],
        start: int,
        stop: int,
    ) -> None:
        self._details = details
        self._epochs = epochs
        self._start, self._stop = start, stop

    def __iter__(self) -> Iterator[PackSample]:
        rows = slice(self._start, self._stop)
        epochs = self._epochs[rows].tolist()
        for (ref, lengths), epoch in zip(self._details[rows], epochs, strict=True):
            yield PackSample(ref=ref, lengths=lengths, epoch=epoch)

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, place: int) -> PackSample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[PackSample]: ...
    def __getitem__(self, place: int | slice) -> PackSample | Sequence[PackSample]:
        rows = range(self._start, self._stop)
        if isinstance(place, slice):
            return [self[row - self._start] for row in rows[place]]
        row = rows[place]
        ref, lengths = self._details[row]
        return PackSample(ref=ref, lengths=lengths, epoch=int(self._epochs[row]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def decode_work(plan: StepPlan) -> NDArray[np.int64]:
    """A stand-in for each pack's decode seconds, in tokens: int64[P].

    Encoder tokens are pixels and samples of sound, which dominate decoding; text is cheap.
    """
    sample_work = plan.sample_tokens.astype(np.int64)
    np.add.at(sample_work, plan.item_sample, 4 * plan.item_encoder_tokens)
    work = np.bincount(plan.pack_of_sample, weights=sample_work, minlength=plan.packs)
    return work.astype(np.int64)
