"""The orders of a step's packs, and a guess of what each takes to decode."""

from collections.abc import Sequence
from functools import cached_property
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
    """One order a pack: its samples in sequence order, with locations and planned shapes, and
    the share of the job's team. The samples of a pack are made when they are looked at."""
    details = catalog.details(plan.sample_ids[plan.pack_samples])
    offsets = plan.pack_offsets.tolist()
    return [
        PackOrder(
            key=PackKey(job=job, step=plan.step, plan_digest=digest, pack=pack),
            degree=degree,
            pipeline=pipeline,
            share=share,
            samples=_SamplesOfPack(details, offsets[pack], offsets[pack + 1]),
        )
        for pack, degree in enumerate(plan.pack_degree.tolist())
    ]


class _SamplesOfPack(Sequence[PackSample]):
    """A pack's part of its step's details."""

    def __init__(
        self, details: Sequence[tuple[SampleRef, SampleLengths]], start: int, stop: int
    ) -> None:
        self._details = details
        self._start, self._stop = start, stop

    @cached_property
    def _made(self) -> tuple[PackSample, ...]:
        rows = self._details[self._start : self._stop]
        return tuple(PackSample(ref=ref, lengths=lengths) for ref, lengths in rows)

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, place: int) -> PackSample: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[PackSample, ...]: ...
    def __getitem__(self, place: int | slice) -> PackSample | tuple[PackSample, ...]:
        return self._made[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)


def decode_work(plan: StepPlan) -> NDArray[np.float64]:
    """A stand-in for each pack's decode seconds, in tokens: float64[P].

    Encoder tokens are pixels and samples of sound, which dominate decoding; text is cheap.
    """
    sample_work = plan.sample_tokens.astype(np.float64)
    np.add.at(sample_work, plan.item_sample, 4.0 * plan.item_encoder_tokens)
    work: NDArray[np.float64] = np.bincount(
        plan.pack_of_sample, weights=sample_work, minlength=plan.packs
    ).astype(np.float64)
    return work
