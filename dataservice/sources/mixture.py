"""The mixture: the order of all samples of all sources over all epochs, from a seed.

An epoch holds, of a source with weight w, ⌊w⌋ full passes and a fraction w - ⌊w⌋. The fraction
is a window that rolls round a fixed permutation of the source: epoch e takes the places from
c(e) to c(e+1), where c(e) = e·fraction·samples rounded half up. So no sample comes twice in one
window, and over epochs all samples come equally often: with weight 0.5, once in any two epochs
2k and 2k+1. All samples of the epoch are then shuffled together.

    source A, weight 1    a0 a1 a2 a3 a4                    ┐
    source B, weight 0.5  epoch 0: b3 b0   epoch 1: b1 b2   ┘ shuffled by (seed, epoch)
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, SpecError
from dataservice.core.job import BatchSize
from dataservice.core.ports import Draw
from dataservice.sources.shuffle import keys, permutation

_KEPT_EPOCHS = 2
_WINDOW = 1  # domain of hash: which samples a fraction takes
_ORDER = 2  # domain of hash: where in the epoch a sample comes


@dataclass(frozen=True, slots=True)
class _Epoch:
    """`order` int64[n] are sample ids; `tokens_before` int64[n+1] the LLM tokens before each
    place, kept only where batches are counted in tokens."""

    order: NDArray[np.int64]
    tokens_before: NDArray[np.int64] | None


class Mixture:
    """The port SampleStream. Pure and safe for use from several threads.

    Memory: 8 bytes a sample and kept epoch (two at most), 16 where batches are counted in
    tokens. An epoch is worked out when first drawn from, in O(n log n).
    """

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
        self._kept: OrderedDict[tuple[int, bool], _Epoch] = OrderedDict()
        self._lock = threading.Lock()

    def epoch_samples(self, epoch: int) -> int:
        """How many samples this epoch holds."""
        return self._samples_before(epoch + 1) - self._samples_before(epoch)

    def draw(self, *, epoch: int, position: int, batch: BatchSize) -> Draw:
        """The samples of one step that starts at this place; fewer at the end of the last epoch.

        By tokens, samples are taken while they fit, and always at least one.

        Raises:
            CursorMismatchError: there is no such place.
            SpecError: the batch is counted in tokens and this mixture has no lengths.
        """
        self._require_place(epoch, position)
        ids: list[NDArray[np.int64]] = []
        epochs: list[NDArray[np.int32]] = []
        left = batch.samples or batch.tokens or 0
        while epoch < self._epochs:
            count, cost = self._fitting(epoch, position, batch, left, first=not ids)
            if count:
                ids.append(self._epoch(epoch, batch).order[position : position + count])
                epochs.append(np.full(count, epoch, dtype=np.int32))
            left -= cost
            position += count
            if position < self.epoch_samples(epoch):
                break
            epoch, position = epoch + 1, 0  # the place behind an epoch is the start of the next
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

    # ---- how much fits --------------------------------------------------------------------

    def _fitting(
        self, epoch: int, position: int, batch: BatchSize, left: int, *, first: bool
    ) -> tuple[int, int]:
        """(samples that fit from this place to the end of the epoch, what they cost)."""
        rest = self.epoch_samples(epoch) - position
        if batch.samples is not None:
            count = min(left, rest)
            return count, count
        if not rest:
            return 0, 0
        before = self._epoch(epoch, batch).tokens_before
        assert before is not None
        limit = before[position] + left
        count = int(np.searchsorted(before, limit, side="right")) - 1 - position
        count = min(max(count, int(first)), rest)
        return count, int(before[position + count] - before[position])

    def _skip_empty(self, epoch: int, position: int) -> int:
        """A weight far below 1 can leave an epoch of few samples empty."""
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
        return sum(
            epoch * math.floor(weight) * size + self._window_start(source, epoch)
            for source, (size, weight) in enumerate(zip(self._sizes, self._weights, strict=True))
        )

    def _window_start(self, source: int, epoch: int) -> int:
        """c(epoch): where the rolling window of a source begins, counted without wrapping."""
        fraction = self._weights[source] % 1
        return math.floor(epoch * fraction * self._sizes[source] + Fraction(1, 2))

    def _epoch(self, epoch: int, batch: BatchSize) -> _Epoch:
        """The order of an epoch, from the cache or worked out now."""
        by_tokens = batch.tokens is not None
        with self._lock:
            kept = self._kept.get((epoch, by_tokens))
            if kept is None:
                kept = self._shuffled(epoch, by_tokens)
                self._kept[(epoch, by_tokens)] = kept
            self._kept.move_to_end((epoch, by_tokens))
            while len(self._kept) > _KEPT_EPOCHS:
                self._kept.popitem(last=False)
        return kept

    def _shuffled(self, epoch: int, by_tokens: bool) -> _Epoch:
        ids, order_keys = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.uint64)]
        for source in range(len(self._sizes)):
            for number, rows in enumerate(self._passes(source, epoch)):
                ids.append(rows + self._offsets[source])
                order_keys.append(keys(rows, _ORDER, self._seed, epoch, source, number))
        order = np.concatenate(ids)[np.argsort(np.concatenate(order_keys), kind="stable")]
        order.flags.writeable = False  # slices of it are handed out
        if not by_tokens:
            return _Epoch(order, None)
        if self._llm_tokens is None:
            raise SpecError(
                "the batch is counted in tokens, but the mixture was made without lengths. Pass "
                "llm_tokens, or count the batch in samples."
            )
        tokens_before = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self._llm_tokens[order], out=tokens_before[1:])
        return _Epoch(order, tokens_before)

    def _passes(self, source: int, epoch: int) -> list[NDArray[np.int64]]:
        """Rows of each pass over a source: the full ones, then the window."""
        size = self._sizes[source]
        passes = [np.arange(size, dtype=np.int64)] * math.floor(self._weights[source])
        start, end = (self._window_start(source, e) for e in (epoch, epoch + 1))
        if end > start:
            places = np.arange(start, end) % size
            passes.append(permutation(size, _WINDOW, self._seed, source)[places])
        return passes


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
