"""Notices a trainer that trains steps with images or sound without reading them.

A rank must encode the items that it receives. If neither the items nor their exchange were read by
the time the step is trained, the model has seen only placeholder tokens, and the loss does not show
it. A rank that received no items is not warned, nor is any rank after it first read a modality.
"""

from dataclasses import dataclass

from trainer_client.notices import MediaNotRead, tell
from trainer_client.shard import MODALITIES, Shard

# Number of steps that a loader may hand out before the first of them is trained: the batches of
# one optimizer step, and those fetched ahead.
LOOKAHEAD_STEPS = 16
LAST_STEPS = 1  # number of steps that may be untrained when the data has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handed:
    """The items of a step that this rank received, and whether each wave's items were read."""

    step: int
    items: int
    reads: tuple[set[str], ...]


class MediaWatch:
    """Told of every shard and commit until each modality was read or warned of. For one thread."""

    def __init__(self, *, job: str, rank: int) -> None:
        self._job, self._rank = job, rank
        self._waiting: dict[str, list[_Handed]] = {modality: [] for modality in MODALITIES}

    def hand(self, shard: Shard) -> None:
        """A shard goes to the loop."""
        for modality, waiting in self._waiting.items():
            batches = [batch for mb in shard.planned if (batch := getattr(mb, modality))]
            if items := sum(batch.item_count for batch in batches):
                reads = tuple(batch.reads for batch in batches)
                waiting.append(_Handed(step=shard.step, items=items, reads=reads))

    def committed(self, step: int) -> None:
        """The loop says that it has trained `step`."""
        self._judge(step, spared=0)

    def asked(self, step: int) -> None:
        """The loop asks for the shard after `step`."""
        self._judge(step, spared=LOOKAHEAD_STEPS)

    def ended(self, step: int) -> None:
        """The loop was told that `step` was the last."""
        self._judge(step, spared=LAST_STEPS)

    def _judge(self, step: int, *, spared: int) -> None:
        for modality, waiting in tuple(self._waiting.items()):
            if any(reads for handed in waiting for reads in handed.reads):
                del self._waiting[modality]
                continue
            trained = [handed for handed in waiting if handed.step <= step]
            if len(trained) > spared:
                del self._waiting[modality]
                self._tell(modality, trained)

    def _tell(self, modality: str, trained: list[_Handed]) -> None:
        items = sum(handed.items for handed in trained)
        steps = f"steps {trained[0].step} to {trained[-1].step}"
        tell(
            MediaNotRead,
            f"media not read: rank {self._rank} of job {self._job!r} was given {items} {modality} "
            f"items for {f'step {trained[0].step}' if len(trained) == 1 else steps}, and trained "
            f"without reading mb.{modality}.items or mb.{modality}.exchange: the model sees "
            f"placeholder tokens and no features. Encode and exchange them, as run_step of "
            "trainer_client.runtime does; on a rank that does not encode, leave `media` out of "
            "ShardDataset(parts=...).",
        )
