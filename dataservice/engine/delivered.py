"""What workers say they deliver of a step, compared with what was delivered before.

    receipts ──► copies of one pack alike? ──► all receipts in ──► as the ledger says? ──► ledger

Contract.
  Copies       A pack may be decoded more than once: hedged, ordered anew, asked for again. Any
               two copies must agree on each sample that both could decode, since ranks may have
               been sent to either.
  Masks        What one copy masks and another decodes is no conflict: the sample was named bad
               and may have timed out. It is left out of the step's content, as are all that were
               masked; a later decoding is compared over the same samples.
  Not known    A step some of whose receipts never came has no content, and is not compared.
"""

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dataservice.core.content import SAMPLE_DIGEST, StepContent, content_of, differing_place
from dataservice.core.layout import expanded
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import PackOrder
from dataservice.core.plan import StepPlan
from dataservice.core.receipts import PackReceipts
from dataservice.engine.api import NamedPack

NAMED_PACKS = 8
NAMED_SAMPLES = 32

Verdict = Literal["same", "differs", "masked", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A step decoded again, beside what was recorded of it.

    "masked": samples that were delivered then could not be decoded this time; "unknown": the
    record is of other samples, or made another way. `packs` contain what differs, as far as that
    can be told.
    """

    verdict: Verdict
    note: str = ""
    packs: tuple[NamedPack, ...] = ()


class Delivered:
    """The receipts of the packs of one step. `missing` are the packs without one. `masked` are the
    samples that any copy masked, with the reason; `otherwise` has by pack, as source/key, those
    that two copies delivered differently. `noted` is set once the content is taken to the
    ledger."""

    def __init__(self, plan: StepPlan, orders: Sequence[PackOrder]) -> None:
        self.plan = plan
        self.masked: dict[int, str] = {}
        self.otherwise: dict[int, list[str]] = {}
        self.noted = False
        self._orders = PackOrders.of(orders)
        self.missing: set[int] = set(self._orders.pack.tolist())
        self._size_of = np.diff(plan.pack_offsets)
        self._digests = np.zeros(len(plan.sample_ids), SAMPLE_DIGEST)
        self._good = np.zeros(len(plan.sample_ids), bool)

    @property
    def complete(self) -> bool:
        """Every pack has a receipt, and there is at least one pack."""
        return bool(self._orders) and not self.missing

    def take(self, receipts: PackReceipts) -> None:
        """Take workers' receipts of their copies of different packs. One without digests tells
        nothing."""
        told = receipts.only(receipts.digests == self._size_of[receipts.pack])
        if not len(told):
            return
        rows = expanded(self.plan.pack_offsets[told.pack].astype(np.int64), told.digests)
        places, digests, masked = self.plan.pack_samples[rows], told.sample_digests, told.bad
        self.masked |= {bad.sample_id: bad.reason for bad in masked}
        good = np.ones(len(places), bool)
        if masked:
            good = ~np.isin(self.plan.sample_ids[places], [bad.sample_id for bad in masked])
        others = good & self._good[places] & (digests != self._digests[places])
        self._digests[places[good]] = digests[good]
        self._good[places] |= good
        self.missing.difference_update(told.pack.tolist())
        for place in places[others].tolist():
            self.otherwise.setdefault(self._pack_of(place), []).append(self._name(place))

    def content(self, masked: Collection[int] | None = None) -> StepContent:
        """The content of all samples but those `masked`, by default those that are masked now."""
        left_out = self.masked if masked is None else masked
        return content_of(self.plan.sample_ids, self._digests, left_out)

    def compared(self, recorded: StepContent, masked: Set[int]) -> Comparison:
        """Compare with what was recorded while the samples `masked` were masked."""
        if self.otherwise:
            names = ", ".join(name for names in self.otherwise.values() for name in names)
            return Comparison(
                verdict="differs",
                note=f"workers do not decode it alike: {names}",
                packs=self._named(self.otherwise),
            )
        newly = self.masked.keys() - masked
        if newly:
            places = np.flatnonzero(np.isin(self.plan.sample_ids, list(newly))).tolist()
            first = self.masked[int(self.plan.sample_ids[places[0]])]
            return Comparison(
                verdict="masked",
                note=f"{len(places)} samples that were delivered cannot be decoded now, the first "
                f"is {self._name(places[0])}: {first}",
                packs=self._named({self._pack_of(place) for place in places}),
            )
        now = self.content(masked)
        if now.which != recorded.which:
            return Comparison(
                verdict="unknown",
                note="what is recorded is of other samples, or of another release's digests",
            )
        if now == recorded:
            return Comparison(verdict="same")
        return self._difference(differing_place(recorded, now, len(self.plan.sample_ids)))

    def _difference(self, place: int | None) -> Comparison:
        if place is not None:
            packs = self._named([self._pack_of(place)])
            note = f"sample {self._name(place)} of pack {packs[0].pack} was delivered otherwise"
        else:
            packs = self._named(self._orders.pack.tolist())
            note = f"more than one of its {len(self.plan.sample_ids)} samples are other than those "
            note += "that were delivered"
        return Comparison(verdict="differs", note=note, packs=packs)

    def _named(self, packs: Iterable[int]) -> tuple[NamedPack, ...]:
        return tuple(
            NamedPack(pack=pack, samples=tuple(_names(self._order(pack))))
            for pack in sorted(packs)[:NAMED_PACKS]
        )

    def _pack_of(self, place: int) -> int:
        return int(self.plan.pack_of_sample[place])

    def _order(self, pack: int) -> PackOrder:
        return self._orders[int(np.flatnonzero(self._orders.pack == pack)[0])]

    def _name(self, place: int) -> str:
        pack = self._pack_of(place)
        (within,) = np.flatnonzero(self.plan.samples_of(pack) == place).tolist()
        ref = self._order(pack).samples[within].ref
        return f"{ref.source}/{ref.key}"


def _names(order: PackOrder) -> Sequence[str]:
    refs = [sample.ref for sample in order.samples[:NAMED_SAMPLES]]
    return [f"{ref.source}/{ref.key}" for ref in refs]
