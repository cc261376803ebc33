"""The mixture: the order of all samples of all sources over all epochs, from a seed.

The samples of each source stand in a ring, in a fixed order. A source of weight w has given
c(t) = t·w·samples of them, rounded half up, after t epochs: an epoch takes a stretch of the ring
that begins where the last one ended, shuffled. So a whole weight takes every sample that often, and
with weight 0.5 each comes once in any two epochs 2k and 2k+1. Once round the ring is a pass: no
sample comes again before all others of its source have come, at any place, whatever changes. The
sources take turns in proportion (interleave.py).

    A, weight 1    ring a0 .. a4    epoch 0 takes all       a3 b1 a1 a4 b0 a0 a2
    B, weight 0.5  ring b0 .. b3    b0 b1, epoch 1 b2 b3    b3 a0 a2 b2 a3 a1 a4

Weights may change, at the start of an epoch or at a step. From there on a source whose weight
changed gives by its new weight, first of all what its old weight had still to give in that epoch;
all others go on as before. A place is (epoch, position, begun); `begun` names the changes in force
there, each with the place where it began. So whoever has a place can draw from it: neither steps
nor how the mixture came there are asked for.

No order is stored: each place is computed from its number (shuffle.py), so the cost of a step
depends on the samples it draws, not on the size of the sources.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, SpecError
from dataservice.core.job import BatchSize, MixtureChange
from dataservice.core.ports import Draw, Drawn
from dataservice.core.quoting import cut
from dataservice.sources.begun_changes import entries, entry_of, names_in, with_change
from dataservice.sources.interleave import Interleaving
from dataservice.sources.shuffle import permuted_each
from dataservice.sources.source_lines import Line, Window, first_giving, windows_by_age

_RING = 1  # hash domain: the order of a source's samples in its ring
_TURNS = 2  # hash domain: how the sources take turns
_WINDOW = 3  # hash domain: in which order an epoch gives what it takes of a ring
# When a batch is counted in tokens, its number of samples is unknown: they are drawn in chunks of
# doubling size.
_FIRST_PIECE = 256
# Samples that are drawn at once where fewer are wanted, by a quarter at most: see `_ids_ahead`.
_AHEAD = 1024
# Part of the name of a job's order: another order of the same sources has another.
ORDER_VERSION = 2
# Steps follow each other in one stretch; those of attempts and replays lie in a few others.
_KEPT = 64

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class _Stage:
    """What is in force from a place on, until another change begins: where that is, which time
    that is in epochs, how much each source had given, and gives from there on."""

    epoch: int
    position: int
    time: Fraction
    given: NDArray[np.int64]
    weights: tuple[Fraction, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The places of an epoch from `start` on, while nothing changes: when they begin, what was
    `given` before, how the sources take turns, and what each gives in the epoch."""

    start: int
    time: Fraction
    given: NDArray[np.int64]
    turns: Interleaving
    windows: tuple[Window, ...]
    shuffled: tuple[Mapping[int, Window], ...]

    @property
    def end(self) -> int:
        return self.start + self.turns.places


class Mixture:
    """The port SampleStream. Pure and safe for use from several threads. The time and memory of a
    draw depend only on the samples drawn. `largest_epoch` is the most samples that an epoch may
    have, by the greatest weight that each source ever has."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        epochs: int,
        llm_tokens: NDArray[np.int32] | None = None,
        max_passes: Sequence[float | None] = (),
        share_tokens: Sequence[int] | None = None,
        names: Sequence[str] = (),
        changes: Mapping[str, MixtureChange] | None = None,
    ) -> None:
        """
        Args:
            sizes: samples of each source; sample ids are dense over them, in this order.
            weights: passes over each source in an epoch.
            llm_tokens: int32[sum of sizes] by sample id; needed to draw by tokens.
            max_passes: the most passes over each source in all epochs together; None for any
                number.
            share_tokens: tokens of each source, where weights are shares of an epoch's tokens:
                see `passes_of`.
            names: of the sources, as `changes` name them.
            changes: what replaces weights, by the name that places call each change by.

        Raises:
            SpecError: the values cannot make a mixture. Whether changes leave a source a weight
                is for `require_weights`.
        """
        _require_mixture(sizes, weights, epochs, llm_tokens)
        self._again = partial(
            Mixture,
            sizes,
            weights,
            seed=seed,
            epochs=epochs,
            llm_tokens=llm_tokens,
            max_passes=max_passes,
            share_tokens=share_tokens,
            names=names,
        )
        self._given = changes = dict(changes or {})
        self._share_tokens = share_tokens
        self._sizes = tuple(int(size) for size in sizes)
        self._offsets = np.cumsum([0, *self._sizes], dtype=np.int64)
        self._seed = seed
        self._epochs = epochs
        self._llm_tokens = llm_tokens
        numbers = {name: number for number, name in enumerate(names)}
        self._changes = {
            name: {_source(numbers, each): weight for each, weight in change.weights.items()}
            for name, change in changes.items()
        }
        self._by_step = _due(changes, "from_step")
        self._by_epoch = _due(changes, "from_epoch")
        most = [
            None if most is None else math.floor(_exact(most) * size)
            for most, size in zip(max_passes or [None] * len(sizes), self._sizes, strict=True)
        ]
        now = tuple(map(_exact, weights))
        self._first = _Stage(
            epoch=0,
            position=0,
            time=Fraction(0),
            given=np.zeros(len(sizes), dtype=np.int64),
            weights=now,
            lines=tuple(
                Line(0, 0, Fraction(0), 0, per_epoch, each)
                for per_epoch, each in zip(self._per_epoch(now), most, strict=True)
            ),
        )
        self.largest_epoch = self._largest_epoch(now)
        self._stages: dict[str, _Stage] = {}
        self._stretches: dict[tuple[int, str], _Stretch] = {}
        self._ahead: tuple[_Stretch, int, int, NDArray[np.int64]] | None = None

    def changed(self, more: Mapping[str, MixtureChange]) -> "Mixture":
        """The same with further changes. Raises SpecError where they name other sources."""
        return self._again(changes={**self._given, **more})

    def require_weights(self) -> None:
        """Raises SpecError where a change by step is sure to leave no source a weight. One that a
        change by epoch gives may have come before that step, or not: drawing there tells."""
        given = {
            source
            for epoch, name in self._by_epoch
            if epoch < self._epochs
            for source, weight in self._changes[name].items()
            if weight
        }
        now = self._first.weights
        for _, due in groupby(self._by_step, key=itemgetter(0)):
            replaced: dict[int, float] = {}
            for _, name in due:
                replaced.update(self._changes[name])
            now = _replaced(now, replaced)
            if not given - replaced.keys():
                _require_some(now)

    @property
    def epochs(self) -> int:
        """How many epochs there are."""
        return self._epochs

    def draw(self, *, epoch: int, position: int, batch: BatchSize, begun: str = "") -> Draw:
        """The samples of one step that starts at this place; fewer at the end of the last epoch.

        When the batch is counted in tokens, samples are taken while they fit, and always at least
        one.

        Raises:
            CursorMismatchError: there is no such place.
            SpecError: the batch is counted in tokens and this mixture has no lengths, or no source
                has a weight here.
        """
        self._require_place(epoch, position, begun)
        begun = self._begun_at(epoch, position, begun)
        ids: list[NDArray[np.int64]] = []
        epochs: list[NDArray[np.int32]] = []
        left = batch.samples or batch.tokens or 0
        while epoch < self._epochs:
            _require_some(self._stage(begun).weights)
            stretch = self._stretch(epoch, begun)
            taken, cost = self._fitting(stretch, position, batch, left, first=not ids)
            if len(taken):
                ids.append(taken)
                epochs.append(np.full(len(taken), epoch, dtype=np.int32))
            left -= cost
            position += len(taken)
            if position < stretch.end:
                break
            # The end of an epoch is the start of the next one that has samples: few samples, and
            # weights far below 1 or a source that has given its most, can leave some without any.
            epoch, position = epoch + 1, 0
            epoch, begun = self._filled(epoch, self._begun_at(epoch, 0, begun))
            if left <= 0:
                break
        return Draw(
            sample_ids=np.concatenate([np.zeros(0, dtype=np.int64), *ids]),
            epoch=np.concatenate([np.zeros(0, dtype=np.int32), *epochs]),
            next_epoch=epoch,
            next_position=position,
            next_begun=begun,
        )

    def begin_changes(self, cursor: Cursor) -> Cursor:
        """The cursor with the changes that are due by its step. Those of epochs begin when one is
        drawn; what an older version of the job file drew lacks those appended since, which begin
        late, here. Inside a window of steps, which was drawn as a whole, nothing begins."""
        if cursor.step_in_window or cursor.epoch >= self._epochs:
            return cursor
        begun, known = cursor.begun, names_in(cursor.begun)
        due = [name for epoch, name in self._by_epoch if epoch <= cursor.epoch]
        due += [name for step, name in self._by_step if step <= cursor.step]
        for name in due:
            if name not in known:
                begun = with_change(begun, name, cursor.epoch, cursor.position)
        return replace(cursor, begun=begun)

    def sources_met(self, begun: str) -> int:
        """How many sources there are up to the last one that has, or had, a weight where these
        changes have begun. Changes that it does not know count for nothing."""
        met = {source for source, weight in enumerate(self._first.weights) if weight}
        for name in names_in(begun):
            changed = self._changes.get(name, {})
            met.update(source for source, weight in changed.items() if weight)
        return 1 + max(met)

    def drawn(self, cursor: Cursor) -> Drawn:
        """How much of each source lies before this place: O(sources), and a look at a thousand
        places. Raises CursorMismatchError."""
        epoch, begun = min(cursor.epoch, self._epochs - 1), cursor.begun
        self._require_place(cursor.epoch, cursor.position, begun)
        if cursor.epoch == epoch:
            begun = self._begun_at(epoch, cursor.position, begun)
        stretch = self._stretch(epoch, begun)
        at_start = [each for each in entries(begun) if (each[1], each[2]) <= (epoch, 0)]
        first = self._stretch(epoch, ",".join(map(entry_of, at_start)))
        over = cursor.epoch > epoch
        passed = stretch.turns.places if over else cursor.position - stretch.start
        final = begun
        for due, name in self._by_epoch:
            if epoch < due < self._epochs:
                final = with_change(final, name, due, 0)
        ends = [line.at(self._epochs) for line in self._stage(final).lines]
        return Drawn(
            before_epoch=first.given,
            so_far=stretch.given + stretch.turns.before(passed),
            through_epoch=stretch.given + stretch.turns.before(stretch.turns.places),
            in_all=np.array(ends, dtype=np.int64),
        )

    # ---- how much fits --------------------------------------------------------------------

    def _fitting(
        self, stretch: _Stretch, position: int, batch: BatchSize, left: int, *, first: bool
    ) -> tuple[NDArray[np.int64], int]:
        """(ids that fit, from this position to the end of the epoch; their cost in the batch's
        unit)."""
        if batch.samples is not None:
            end = min(position + left, stretch.end)
            return self._ids_ahead(stretch, position, end), end - position
        return self._fitting_tokens(stretch, position, left, first=first)

    def _fitting_tokens(
        self, stretch: _Stretch, position: int, left: int, *, first: bool
    ) -> tuple[NDArray[np.int64], int]:
        """The same, counted in tokens; the `first` sample of a step is taken whatever its
        length."""
        if self._llm_tokens is None:
            raise SpecError(
                "the batch is counted in tokens, but the mixture was made without lengths. Pass "
                "llm_tokens, or count the batch in samples."
            )
        end, piece, cost = stretch.end, _FIRST_PIECE, 0
        taken = [np.zeros(0, dtype=np.int64)]
        while position < end:
            ids = self._ids(stretch, position, min(position + piece, end))
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

    def _ids_ahead(self, stretch: _Stretch, start: int, end: int) -> NDArray[np.int64]:
        """As `_ids`. Of few samples most of the time would go to what many take too, so more are
        drawn, and kept for whoever draws on from here."""
        if end - start > _AHEAD // 4:
            return self._ids(stretch, start, end)
        ahead = self._ahead  # one assignment: other threads draw too
        if ahead is None or ahead[0] is not stretch or not ahead[1] <= start <= end <= ahead[2]:
            far = min(start + _AHEAD, stretch.end)
            ahead = self._ahead = stretch, start, far, self._ids(stretch, start, far)
        return ahead[3][start - ahead[1] : end - ahead[1]]

    def _ids(self, stretch: _Stretch, start: int, end: int) -> NDArray[np.int64]:
        """Sample ids at these positions of a stretch's epoch: int64[end - start]."""
        source, rank = stretch.turns.turns(start - stretch.start, end - stretch.start)
        row = stretch.given[source] + rank
        settled = self._shuffle(source, row, stretch.windows)
        for windows in stretch.shuffled:
            low, high = np.zeros((2, len(self._sizes)), dtype=np.int64)
            for one, window in windows.items():
                low[one], high[one] = window.start, window.start + window.count
            inside = np.flatnonzero((low[source] <= row) & (row < high[source]))
            places = row[inside]
            settled[inside] |= self._shuffle(source[inside], places, windows)
            row[inside] = places
        row %= np.array(self._sizes)[source]
        rest = np.flatnonzero(~settled)
        present, which = _numbered(source[rest])
        named = [(_RING, self._seed, each) for each in present]
        row[rest] = permuted_each(row[rest], which, [self._sizes[each] for each in present], named)
        return row + self._offsets[source]

    def _shuffle(
        self,
        source: NDArray[np.int64],
        row: NDArray[np.int64],
        windows: Sequence[Window] | Mapping[int, Window],
    ) -> NDArray[np.bool_]:
        """Where in the row of its source each of these places (int64[n]) is taken from, in `row`
        itself. They lie in the windows of their sources, and are shuffled with the rest of the
        window, pass by pass: none of a pass comes before all of the last one came. Returns which of
        them were shuffled with their whole pass, so that the ring's own order adds nothing."""
        if not len(row):
            return np.zeros(0, dtype=np.bool_)
        turns = row // np.array(self._sizes)[source]
        first = int(turns.min())
        width = int(turns.max()) - first + 1
        turns -= first
        turns += source * width
        present, which = _numbered(turns)
        starts, counts, whole, named = [], [], [], []
        for each in present:
            one, turn = each // width, each % width + first
            window, size = windows[one], self._sizes[one]
            start = max(window.start, turn * size)
            starts.append(start)
            counts.append(min(window.start + window.count, (turn + 1) * size) - start)
            whole.append(counts[-1] == size)
            named.append((_WINDOW, self._seed, one, window.epoch, window.position, turn))
        begins = np.array(starts)[which]
        row -= begins
        np.add(begins, permuted_each(row, which, counts, named), out=row)
        settled: NDArray[np.bool_] = np.array(whole)[which]
        return settled

    # ---- places ---------------------------------------------------------------------------

    def _begun_at(self, epoch: int, position: int, begun: str) -> str:
        """The changes in force here, where at the start of an epoch its own begin."""
        if position or epoch >= self._epochs:
            return begun
        known = names_in(begun)
        for due, name in self._by_epoch:
            if due == epoch and name not in known:
                begun = with_change(begun, name, epoch, 0)
        return begun

    def _filled(self, epoch: int, begun: str) -> tuple[int, str]:
        """The first epoch from the start of this one on that has a sample, or in which no source
        has a weight, and the changes in force there; the end where there is none. O(sources · log
        epochs) between two changes."""
        while epoch < self._epochs and any(self._stage(begun).weights):
            lines = self._stage(begun).lines
            end = min((due for due, _ in self._by_epoch if due > epoch), default=self._epochs)
            end = min(end, self._epochs)
            found = first_giving(lines, epoch, end)
            if found < end:
                return found, begun
            epoch, begun = end, self._begun_at(end, 0, begun)
        return epoch, begun

    def _stage(self, begun: str) -> _Stage:
        """What is in force where these changes have begun. Raises CursorMismatchError where there
        is no such place."""
        if not begun:
            return self._first
        found = self._stages.get(begun)
        return _kept(self._stages, begun, self._made_stage(begun)) if found is None else found

    def _stretch(self, epoch: int, begun: str) -> _Stretch:
        """The last places of an epoch, at which exactly these changes are in force."""
        key = (epoch, begun)
        found = self._stretches.get(key)
        return _kept(self._stretches, key, self._made_stretch(*key)) if found is None else found

    def _made_stage(self, begun: str) -> _Stage:
        if begun.count(",") > len(self._changes):
            raise CursorMismatchError(
                f"the checkpoint was made under {begun.count(',') + 1} changes of the mixture, and "
                f"this job knows {len(self._changes)}. Take a checkpoint of this job, with the "
                "state directory that its changes were recorded in."
            )
        before, _, last = begun.rpartition(",")
        name, epoch, position = entries(last)[0]
        if name not in self._changes:
            raise CursorMismatchError(
                f"the checkpoint was made under a change of the mixture, {name!r}, that this job "
                f"does not know; it knows {', '.join(self._changes) or 'none'}. Take a checkpoint "
                "of this job, with the state directory that its changes were recorded in."
            )
        if name in names_in(before):
            raise CursorMismatchError(
                f"the checkpoint's change of the mixture, {name!r}, began twice. Load the "
                "state_dict that ShardDataset gave."
            )
        self._require_place(epoch, position, before)
        stretch = self._stretch(epoch, before)
        places, passed = stretch.turns.places, position - stretch.start
        part = Fraction(passed, places) if places else Fraction(0)
        time = stretch.time + (epoch + 1 - stretch.time) * part
        given = stretch.given + stretch.turns.before(passed)
        weights = _replaced(self._stage(before).weights, self._changes[name])
        lines = tuple(
            line
            if line.per_epoch == per_epoch
            else Line(
                epoch,
                position,
                time,
                so_far,
                per_epoch,
                line.most,
                (*line.shuffled, line.window(epoch)) if position else line.shuffled,
            )
            for line, per_epoch, so_far in zip(
                self._stage(before).lines, self._per_epoch(weights), given.tolist(), strict=True
            )
        )
        return _Stage(epoch, position, time, given, weights, lines)

    def _largest_epoch(self, weights: Sequence[Fraction]) -> float:
        """Each source by the greatest weight that it ever has; by shares, none comes twice."""
        if self._share_tokens is not None:
            return float(sum(self._sizes))
        most = list(weights)
        for change in self._changes.values():
            for source, weight in change.items():
                most[source] = max(most[source], _exact(weight))
        return float(sum(self._per_epoch(most)))

    def _per_epoch(self, weights: Sequence[Fraction]) -> list[Fraction]:
        """How many samples of each source an epoch takes."""
        passes = weights if self._share_tokens is None else passes_of(weights, self._share_tokens)
        return [each * size for each, size in zip(passes, self._sizes, strict=True)]

    def _made_stretch(self, epoch: int, begun: str) -> _Stretch:
        stage = self._stage(begun)
        windows = tuple(line.window(epoch) for line in stage.lines)
        start, time, given = stage.position, stage.time, stage.given
        if stage.epoch < epoch:
            start, time = 0, Fraction(epoch)
            given = np.array([window.start for window in windows], dtype=np.int64)
        until = np.array([window.start + window.count for window in windows], dtype=np.int64)
        turns = Interleaving(np.maximum(until - given, 0), _TURNS, self._seed, epoch, start)
        return _Stretch(start, time, given, turns, windows, windows_by_age(stage.lines, windows))

    def _require_place(self, epoch: int, position: int, begun: str) -> None:
        if not 0 <= epoch <= self._epochs:
            raise CursorMismatchError(
                f"the cursor is in epoch {epoch}, the job has epochs 0 to {self._epochs - 1}. "
                "Resume from a checkpoint of this job."
            )
        stage = self._stage(begun)
        stretch = self._stretch(epoch, begun) if epoch < self._epochs else None
        start, end = (0, 0) if stretch is None else (stretch.start, stretch.end)
        if stage.epoch > epoch or not start <= position <= end:
            raise CursorMismatchError(
                f"the cursor is at sample {position} of epoch {epoch}, which has "
                f"{f'samples {start} to {end}' if start else end}. Resume from a checkpoint of "
                "this job, or restore the sources and weights that it was trained with."
            )


def _numbered(labels: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
    """The different ones of these numbers, and for each the place of its own among them."""
    most = int(labels.max(initial=0))
    if len(labels) and labels.min() == most:  # all are alike, as where one source is drawn
        return [most], np.zeros(len(labels), dtype=np.int64)
    if most > 8 * len(labels) + 1024:
        present, which = np.unique(labels, return_inverse=True)
        return present.tolist(), which
    there = np.bincount(labels) > 0
    return np.flatnonzero(there).tolist(), (np.cumsum(there) - 1)[labels]


def _kept(cache: dict[Key, Made], key: Key, made: Made) -> Made:
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = made
    return made


def passes_of(weights: Sequence[Fraction], tokens: Sequence[int]) -> list[Fraction]:
    """Passes over sources of so many tokens in an epoch, of whose tokens each gives a share in
    proportion to its weight. The epoch is as long as it can be without any source coming twice."""
    per_token = [weight / held for weight, held in zip(weights, tokens, strict=True)]
    most = max(per_token)
    return [each / most for each in per_token] if most else per_token


def _replaced(weights: tuple[Fraction, ...], change: Mapping[int, float]) -> tuple[Fraction, ...]:
    return tuple(
        _exact(change[source]) if source in change else weight
        for source, weight in enumerate(weights)
    )


def _require_some(weights: Sequence[Fraction]) -> None:
    if not any(weights):
        raise SpecError(
            f"all {len(weights)} sources have weight 0 by a change of the mixture: nothing is left "
            "to train. Give at least one a weight."
        )


def _exact(weight: float) -> Fraction:
    """The shortest decimal that reads as this float: 0.1 means one tenth."""
    return Fraction(repr(float(weight)))


def _due(changes: Mapping[str, MixtureChange], since: str) -> list[tuple[int, str]]:
    """When changes are due, by step or by epoch; of those that are due together, the one that was
    asked for last comes last, and counts."""
    when = [(getattr(change, since), name) for name, change in changes.items()]
    return sorted((each for each in when if each[0] is not None), key=itemgetter(0))


def _source(numbers: Mapping[str, int], name: str) -> int:
    if name not in numbers:
        raise SpecError(
            f"a change of the mixture names the source {cut(name)!r}; the job's are "
            f"{cut(', '.join(numbers))}."
        )
    return numbers[name]


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
    if min(sizes) < 1 or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise SpecError(
            f"sizes {tuple(sizes)} must be at least 1, weights {tuple(weights)} at least 0 and one "
            "of them above. Leave empty sources out."
        )
    if epochs < 1:
        raise SpecError(f"epochs is {epochs}; it must be at least 1.")
    if llm_tokens is not None and len(llm_tokens) != sum(sizes):
        raise SpecError(
            f"llm_tokens has {len(llm_tokens)} lengths for {sum(sizes)} samples. Pass the "
            "catalog's own."
        )
