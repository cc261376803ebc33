"""Receipts of packs as columns: those that a worker sends together, of packs of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.content import SAMPLE_DIGEST
from dataservice.core.errors import ServiceError
from dataservice.core.orders import BadSample, PackKey, PackReceipt, SourceWork


def _no_numbers() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_seconds() -> NDArray[np.float64]:
    return np.zeros(0, np.float64)


def _no_digests() -> NDArray[np.uint64]:
    return np.zeros(0, SAMPLE_DIGEST)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackReceipts:
    """What assembling k packs took: see PackReceipt. `pack`, `size_bytes`, `bad_samples` and
    `digests` int64[k], `decode_s` and `room_s` float64[k]; `bad_samples` and `digests` are numbers
    of rows in `bad` and `sample_digests` uint64[sum(digests)], which are end to end by pack.
    `sources` are sums of all packs, by source."""

    job: str = ""
    step: int = 0
    plan_digest: str = ""
    pack: NDArray[np.int64] = field(default_factory=_no_numbers)
    size_bytes: NDArray[np.int64] = field(default_factory=_no_numbers)
    decode_s: NDArray[np.float64] = field(default_factory=_no_seconds)
    room_s: NDArray[np.float64] = field(default_factory=_no_seconds)
    bad_samples: NDArray[np.int64] = field(default_factory=_no_numbers)
    digests: NDArray[np.int64] = field(default_factory=_no_numbers)
    bad: tuple[BadSample, ...] = ()
    sample_digests: NDArray[np.uint64] = field(default_factory=_no_digests)
    sources: tuple[SourceWork, ...] = ()

    @staticmethod
    def of(receipts: Sequence[PackReceipt]) -> "PackReceipts":
        """The receipts of packs of one step."""
        if not receipts:
            return PackReceipts()
        key = receipts[0].key
        told = [_digests(each) for each in receipts]
        return PackReceipts(
            job=key.job,
            step=key.step,
            plan_digest=key.plan_digest,
            pack=np.array([each.key.pack for each in receipts], np.int64),
            size_bytes=np.array([each.size_bytes for each in receipts], np.int64),
            decode_s=np.array([each.decode_s for each in receipts], np.float64),
            room_s=np.array([each.room_s for each in receipts], np.float64),
            bad_samples=np.array([len(each.bad_samples) for each in receipts], np.int64),
            digests=np.array(list(map(len, told)), np.int64),
            bad=tuple(bad for each in receipts for bad in each.bad_samples),
            sample_digests=np.concatenate(told),
            sources=summed([work for each in receipts for work in each.sources]),
        )

    def __len__(self) -> int:
        return len(self.pack)

    def is_of(self, key: PackKey) -> bool:
        """Whether they are of the plan that has this pack."""
        about = key.job, key.step, key.plan_digest
        return about == (self.job, self.step, self.plan_digest)

    @property
    def bad_pack(self) -> NDArray[np.int64]:
        """The pack of each bad sample."""
        return np.repeat(self.pack, self.bad_samples)

    def only(self, kept: NDArray[np.bool_]) -> "PackReceipts":
        """Those that are `kept`, bool[k]; the `sources` stay those of all."""
        if kept.all():
            return self
        bad = np.repeat(kept, self.bad_samples).tolist()
        return replace(
            self,
            pack=self.pack[kept],
            size_bytes=self.size_bytes[kept],
            decode_s=self.decode_s[kept],
            room_s=self.room_s[kept],
            bad_samples=self.bad_samples[kept],
            digests=self.digests[kept],
            bad=tuple(each for each, stays in zip(self.bad, bad, strict=True) if stays),
            sample_digests=self.sample_digests[np.repeat(kept, self.digests)],
        )


def _digests(receipt: PackReceipt) -> NDArray[np.uint64]:
    """None where the bytes are no digests."""
    whole = len(receipt.sample_digests) % SAMPLE_DIGEST.itemsize == 0
    return np.frombuffer(receipt.sample_digests if whole else b"", SAMPLE_DIGEST)


def summed(works: Sequence[SourceWork]) -> tuple[SourceWork, ...]:
    """The work of each source in all."""
    by_source: dict[str, list[SourceWork]] = {}
    for work in works:
        by_source.setdefault(work.source, []).append(work)
    return tuple(
        of[0]
        if len(of) == 1
        else SourceWork(
            source=source,
            samples=sum(work.samples for work in of),
            read_s=sum(work.read_s for work in of),
            decode_s=sum(work.decode_s for work in of),
            read_bytes=sum(work.read_bytes for work in of),
            read_cpu_s=sum(work.read_cpu_s for work in of),
            decode_cpu_s=sum(work.decode_cpu_s for work in of),
        )
        for source, of in by_source.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackAnswers:
    """Packs that are ready, and those that could not be made, by pack with the reason."""

    receipts: PackReceipts = field(default_factory=PackReceipts)
    failures: Mapping[int, ServiceError] = field(default_factory=dict)
