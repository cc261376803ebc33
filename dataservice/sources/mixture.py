"""The mixture: the order of all samples of all sources over all epochs, from a seed.

From a source with weight w, an epoch takes ⌊w⌋ full passes and a fraction w - ⌊w⌋. The fraction is
a window that rolls round a fixed permutation of the source: epoch e takes the places from c(e) to
c(e+1), where c(e) = e·fraction·samples rounded half up. So no sample appears twice in one window,
and over epochs all samples appear equally often: with weight 0.5, once in any two epochs 2k and
2k+1. All samples of the epoch are then shuffled together.

    slots of epoch 0      A: a0 a1 a2 a3 a4 │ B: b3 b0     A of weight 1, B of weight 0.5
    slots of epoch 1      A: a0 a1 a2 a3 a4 │ B: b1 b2
    place ──permutation by (seed, epoch)──▶ slot ──▶ source, pass, row

No order is stored: each place is computed from its number (shuffle.py), so the cost of a step
depends on the samples it draws, not on the size of the sources.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, SpecError
from dataservice.core.job import BatchSize
from dataservice.core.ports import Draw
from dataservice.sources.shuffle import permuted

_WINDOW = 1  # hash domain: which samples a fraction takes
_ORDER = 2  # hash domain: where in the epoch a sample appears
# When a batch is counted in tokens, its number of samples is unknown: they are drawn in chunks of
# doubling size.
_FIRST_PIECE = 256
# Counting keeps some ten arrays of this many numbers: larger ones leave the processor's cache.
_COUNTED_PIECE = 2**14


class Mixture:
    """The port SampleStream. Pure and safe for use from several threads. The time and memory of a
    draw depend only on the samples drawn."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        epochs: int,
        llm_tokens: NDArray[np.int32] | None = None,
    ) -> None:
        """
        Args:
            sizes: samples of each source; sample ids are dense over them, in this order.
            weights: passes over each source in an epoch.
            llm_tokens: int32[sum of sizes] by sample id; needed to draw by tokens.

        Raises:
            SpecError: the values cannot make a mixture.
        """
        _require_mixture(sizes, weights, epochs, llm_tokens)
        self._sizes = tuple(int(size) for size in sizes)
        # The shortest decimal that reads as this float: 0.1 means one tenth.
        self._weights = tuple(Fraction(repr(float(weight))) for weight in weights)
        self._offsets = np.cumsum([0, *self._sizes], dtype=np.int64)
        self._seed = seed
        self._epochs = epochs
        self._llm_tokens = llm_tokens

    def epoch_samples(self, epoch: int) -> int:
        """How many samples this epoch holds."""
        return self._samples_before(epoch + 1) - self._samples_before(epoch)

    def draw(self, *, epoch: int, position: int, batch: BatchSize) -> Draw:
        """The samples of one step that starts at this position; fewer at the end of the last epoch.

        When the batch is counted in tokens, samples are taken while they fit, and always at least
        one.

        Raises:
            CursorMismatchError: there is no such position.
            SpecError: the batch is counted in tokens and this mixture has no lengths.
        """
        self._require_place(epoch, position)
        ids: list[NDArray[np.int64]] = []
        epochs: list[NDArray[np.int32]] = []
        left = batch.samples or batch.tokens or 0
        while epoch < self._epochs:
            taken, cost = self._fitting(epoch, position, batch, left, first=not ids)
            if len(taken):
                ids.append(taken)
                epochs.append(np.full(len(taken), epoch, dtype=np.int32))
            left -= cost
            position += len(taken)
            if position < self.epoch_samples(epoch):
                break
            epoch, position = epoch + 1, 0  # the end of an epoch is the start of the next
            if left <= 0:
                break
        epoch = self._skip_empty(epoch, position)
        return Draw(
            sample_ids=np.concatenate([np.zeros(0, dtype=np.int64), *ids]),
            epoch=np.concatenate([np.zeros(0, dtype=np.int32), *epochs]),
            next_epoch=epoch,
            next_position=position,
        )

    def steps_left(self, cursor: Cursor, batch: BatchSize) -> int | None:
        """Steps until the last epoch ends; None for batches counted in tokens, where only
        drawing can tell. Raises CursorMismatchError."""
        self._require_place(cursor.epoch, cursor.position)
        if batch.samples is None:
            return None
        behind = self._samples_before(cursor.epoch) + cursor.position
        left = self._samples_before(self._epochs) - behind
        return max(0, -(-left // batch.samples) - cursor.step_in_window)

    # ---- how much of each source ----------------------------------------------------------

    @property
    def epochs(self) -> int:
        """How many epochs there are."""
        return self._epochs

    def drawn_before(self, epoch: int) -> NDArray[np.int64]:
        """How many samples of each source all epochs before this one hold: int64[sources].
        O(sources)."""
        before = [
            epoch * math.floor(weight) * size + self._window_start(source, epoch)
            for source, (size, weight) in enumerate(zip(self._sizes, self._weights, strict=True))
        ]
        return np.array(before, dtype=np.int64)

    def drawn_between(self, *, epoch: int, start: int, end: int) -> NDArray[np.int64]:
        """How many samples of each source lie at the places `start` .. `end` - 1 of an epoch:
        int64[sources]. O(end - start), in pieces that fit into a cache; no sample is looked at by
        itself."""
        counts = np.zeros(len(self._sizes), dtype=np.int64)
        ends = np.cumsum(self._epoch_counts(epoch))
        for begin in range(start, end, _COUNTED_PIECE):
            slots = self._slots(epoch, begin, min(begin + _COUNTED_PIECE, end), int(ends[-1]))
            source_of = np.searchsorted(ends, slots, side="right")
            counts += np.bincount(source_of, minlength=len(counts))
        return counts

    # ---- how much fits --------------------------------------------------------------------

    def _fitting(
        self, epoch: int, position: int, batch: BatchSize, left: int, *, first: bool
    ) -> tuple[NDArray[np.int64], int]:
        """(ids that fit, from this position to the end of the epoch; their cost in the batch's
        unit)."""
        if batch.samples is not None:
            end = min(position + left, self.epoch_samples(epoch))
            return self._ids(epoch, position, end), end - position
        return self._fitting_tokens(epoch, position, left, first=first)

    def _fitting_tokens(
        self, epoch: int, position: int, left: int, *, first: bool
    ) -> tuple[NDArray[np.int64], int]:
        """The same, counted in tokens; the `first` sample of a step is taken whatever its
        length."""
        if self._llm_tokens is None:
            raise SpecError(
                "the batch is counted in tokens, but the mixture was made without lengths. Pass "
                "llm_tokens, or count the batch in samples."
            )
        end, piece, cost = self.epoch_samples(epoch), _FIRST_PIECE, 0
        taken = [np.zeros(0, dtype=np.int64)]
        while position < end:
            ids = self._ids(epoch, position, min(position + piece, end))
            behind = cost + np.cumsum(self._llm_tokens[ids], dtype=np.int64)
            count = int(np.searchsorted(behind, left, side="right"))
            count = max(count, int(first and len(taken) == 1))
            taken.append(ids[:count])
            if count:
                cost = int(behind[count - 1])
            if count < len(ids):
                break
            position += count
            piece *= 2
        return np.concatenate(taken), cost

    def _skip_empty(self, epoch: int, position: int) -> int:
        """This epoch, or at its start the next one that is not empty: few samples and a weight far
        below 1 can leave an epoch without any."""
        while epoch < self._epochs and not position and not self.epoch_samples(epoch):
            epoch += 1
        return epoch

    def _require_place(self, epoch: int, position: int) -> None:
        if not 0 <= epoch <= self._epochs:
            raise CursorMismatchError(
                f"the cursor is in epoch {epoch}, the job has epochs 0 to {self._epochs - 1}. "
                "Resume from a checkpoint of this job."
            )
        samples = self.epoch_samples(epoch) if epoch < self._epochs else 0
        if not 0 <= position <= samples:
            raise CursorMismatchError(
                f"the cursor is at sample {position} of epoch {epoch}, which has {samples}. "
                "Resume from a checkpoint of this job, or restore the sources and weights that it "
                "was trained with."
            )

    # ---- what an epoch holds --------------------------------------------------------------

    def _samples_before(self, epoch: int) -> int:
        """Samples of all epochs before this one."""
        return int(self.drawn_before(epoch).sum())

    def _epoch_counts(self, epoch: int) -> NDArray[np.int64]:
        """How many samples of each source this epoch holds: int64[sources]."""
        return self.drawn_before(epoch + 1) - self.drawn_before(epoch)

    def _window_start(self, source: int, epoch: int) -> int:
        """c(epoch): where the rolling window of a source begins, counted without wrapping."""
        fraction = self._weights[source] % 1
        return math.floor(epoch * fraction * self._sizes[source] + Fraction(1, 2))

    def _slots(self, epoch: int, start: int, end: int, size: int) -> NDArray[np.int64]:
        """The slots at the places `start` .. `end` - 1 of an epoch of `size` samples:
        int64[end - start]. Those of one source lie next to each other, in the order of the
        sources."""
        return permuted(np.arange(start, end), size, _ORDER, self._seed, epoch)

    def _ids(self, epoch: int, start: int, end: int) -> NDArray[np.int64]:
        """Sample ids at the places `start` .. `end` - 1 of an epoch: int64[end - start]."""
        counts = self._epoch_counts(epoch)
        ends = np.cumsum(counts)
        slots = self._slots(epoch, start, end, int(ends[-1]))
        sizes = np.array(self._sizes)
        full = np.array([math.floor(weight) for weight in self._weights]) * sizes
        window = np.array([self._window_start(source, epoch) for source in range(len(sizes))])
        source_of = np.searchsorted(ends, slots, side="right")
        within = slots - (ends - counts)[source_of]
        rows = within % sizes[source_of]
        rolled = np.flatnonzero(within >= full[source_of])
        for source in np.unique(source_of[rolled]):
            mine = rolled[source_of[rolled] == source]
            places = (within[mine] - full[source] + window[source]) % sizes[source]
            rows[mine] = permuted(places, int(sizes[source]), _WINDOW, self._seed, int(source))
        ids: NDArray[np.int64] = rows + self._offsets[source_of]
        return ids


def _require_mixture(
    sizes: Sequence[int],
    weights: Sequence[float],
    epochs: int,
    llm_tokens: NDArray[np.int32] | None,
) -> None:
    if not sizes or len(sizes) != len(weights):
        raise SpecError(
            f"a mixture needs at least one source and a weight for each; got {len(sizes)} sizes "
            f"and {len(weights)} weights."
        )
    if min(sizes) < 1 or not all(0 < weight < math.inf for weight in weights):
        raise SpecError(
            f"sizes {tuple(sizes)} must be at least 1 and weights {tuple(weights)} above 0. Leave "
            "empty sources out."
        )
    if epochs < 1:
        raise SpecError(f"epochs is {epochs}; it must be at least 1.")
    if llm_tokens is not None and len(llm_tokens) != sum(sizes):
        raise SpecError(
            f"llm_tokens has {len(llm_tokens)} lengths for {sum(sizes)} samples. Pass the "
            "catalog's own."
        )
