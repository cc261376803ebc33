"""Which rows of a packed sequence meet in which step of the ring.

A pack of ``S`` sequences, each padded to a multiple of ``2d``, is cut per sequence into
``2d`` chunks; member ``i`` holds chunks ``i`` and ``2d-1-i`` of every sequence, one after the
other (zigzag). In step ``t`` member ``i`` meets the keys of member ``j = (i - t) mod d``:

    j == i   causal inside the local rows
    j <  i   all my queries see chunk j, which lies before both of my chunks; 2d-1-j is masked
    j >  i   my late chunk 2d-1-i sees both chunks of j; my early chunk sees neither

so after the first step no mask is needed and every member does the same work: half of the
rectangle. Full attention uses the whole rectangle. Rows beyond a sequence's true length take
no part, neither as queries nor as keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_client.runtime.faults import LayoutError
from trainer_client.shard import Microbatch
from trainer_client.staging import copied_once

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Some local rows, sequence by sequence.

    Attributes
    ----------
    index: a slice where the rows are contiguous, else int64[rows].
    bounds: S'+1 offsets into the chosen rows, on the host; ``cu_seqlens``: the same, int32
        on the device.
    """

    index: slice | Tensor
    bounds: tuple[int, ...]
    cu_seqlens: Tensor

    @property
    def longest(self) -> int:
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    def cover(self, rows: int) -> bool:
        """Whether these are all local rows, in order; ``rows`` is their number."""
        return isinstance(self.index, slice) and self.index == slice(0, rows)

    def take(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The chosen rows, contiguous where the kernel would copy them anyway."""
        if isinstance(self.index, slice):
            start, stop = self.index.start, self.index.stop
            return tensor.narrow(dim, start, stop - start)
        return tensor.index_select(dim, self.index)

    def put(self, tensor: Tensor, rows: Tensor, dim: int = 0) -> None:
        """Overwrite the chosen rows of ``tensor``."""
        if isinstance(self.index, slice):
            self.take(tensor, dim).copy_(rows)
        else:
            tensor.index_copy_(dim, self.index, rows)

    def move(self, tensor: Tensor, rows: Tensor, weight: Tensor) -> None:
        """Move the chosen rows of ``tensor`` towards ``rows`` by ``weight``, which 1 reaches."""
        if isinstance(self.index, slice):
            self.take(tensor).lerp_(rows, weight)
        else:
            tensor.index_copy_(0, self.index, torch.lerp(self.take(tensor), rows, weight))

    def add(self, tensor: Tensor, rows: Tensor) -> None:
        """Add to the chosen rows of ``tensor`` along dimension 0."""
        if isinstance(self.index, slice):
            self.take(tensor).add_(rows)
        else:
            tensor.index_add_(0, self.index, rows.to(tensor.dtype))


# Without slots, of which Python 3.10 makes none that can be referenced weakly.
@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Queries and keys that meet in one ring step; both hold the same S' sequences.

    A block is itself alone: kernels keep masks by it.

    Attributes
    ----------
    causal: a query sees keys up to its own; then there are as many keys as queries.
    window: keys that a causal query sees, its own included; None: all.
    spans: int64 [queries]; rows of one number >= 0 also see those ahead in the same sequence.
    """

    queries: Rows
    keys: Rows
    causal: bool
    window: int | None = None
    spans: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RingLayout:
    """Blocks of one member, one per ring step; None where nothing meets.

    Attributes
    ----------
    rows: local rows of the member. ``degree``: members of the group.
    """

    rows: int
    degree: int
    blocks: tuple[Block | None, ...]


def build_ring_layout(
    cu_seqlens: Sequence[int],
    *,
    degree: int,
    cp_rank: int,
    causal: bool,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    spans: Tensor | None = None,
    device: torch.device | None = None,
) -> RingLayout:
    """The blocks of member ``cp_rank``.

    Parameters
    ----------
    cu_seqlens: S+1 offsets of the whole padded pack, tokens.
    lengths: S true lengths, tokens; None means nothing is padding.
    window, spans: as in ``Block``, spans of all rows. A window that holds every sequence is none.
    device: where its tensors go, by one copy; None leaves them on the host.

    Raises
    ------
    LayoutError: offsets do not start at 0 or fall; a padded length is no multiple of ``2d``
        (``d > 1``); a true length exceeds its padded length; a window or spans without causal
        attention, or at a degree above 1.

    Cost: O(d·S + local rows).
    """
    offsets = np.asarray(cu_seqlens, dtype=np.int64)
    padded = _checked_lengths(offsets, degree)
    true = padded if lengths is None else np.asarray(lengths, dtype=np.int64)
    if true.shape != padded.shape or np.any(true > padded) or np.any(true < 0):
        raise LayoutError(
            f"true lengths {true.tolist()} do not fit the padded lengths {padded.tolist()}; "
            "give one length in [0, padded] for each sequence of cu_seqlens"
        )
    cut = _Cut(offsets=offsets, padded=padded, true=true, degree=degree)
    blocks = tuple(
        cut.block(cp_rank, (cp_rank - step) % degree, causal=causal) for step in range(degree)
    )
    layout = RingLayout(rows=int(offsets[-1]) // degree, degree=degree, blocks=blocks)
    if device is not None:
        layout = copied_once(layout, device)
    longest = int(true.max(initial=0))
    return masked(layout, causal=causal, longest=longest, window=window, spans=spans)


def masked(
    layout: RingLayout, *, causal: bool, longest: int, window: int | None, spans: Tensor | None
) -> RingLayout:
    """A layout of a pack whose longest sample has ``longest`` tokens, with a window and spans, as
    in ``build_ring_layout``. Its rows are those that it had, so nothing is copied."""
    if window is not None and window >= longest:
        window = None
    if window is None and spans is None:
        return layout
    _check_mask(
        window, spans, rows=layout.rows, degree=layout.degree, causal=causal, longest=longest
    )
    (alone,) = layout.blocks
    if alone is None:
        return layout
    seen = None if spans is None else alone.queries.take(spans)  # both where the layout is
    return replace(layout, blocks=(replace(alone, window=window, spans=seen),))


def _check_mask(
    window: int | None,
    spans: Tensor | None,
    *,
    rows: int,
    degree: int,
    causal: bool,
    longest: int,
) -> None:
    what = f"a sliding window of {window} tokens" if spans is None else "bidirectional spans"
    if not causal:
        raise LayoutError(f"{what} of attention that is not causal; leave them out, or causal=True")
    if degree > 1:
        raise LayoutError(
            f"a layer attends with {what}, and the pack, whose longest sample has {longest} "
            f"tokens, is spread over {degree} replicas; the ring computes causal and full "
            "attention only. Windows and spans are exact at CP degree 1: give the job "
            "plan: {strategy: packing, static_degree: 1}."
        )
    if window is not None and window < 1:
        raise LayoutError(f"the window is {window} tokens; a query sees itself, so it is 1 or more")
    if spans is not None and spans.shape != (rows,):
        raise LayoutError(f"spans {tuple(spans.shape)} must be one number for each of {rows} rows")


def causal_layouts(microbatch: Microbatch) -> dict[bool, RingLayout]:
    """What ``PackedAttention`` would work out for a microbatch in the first layer of a decoder, by
    ``causal``; nothing where it is idle."""
    if microbatch.idle:
        return {}
    layout = build_ring_layout(
        microbatch.cu_seqlens.tolist(),
        degree=len(microbatch.cp_group),
        cp_rank=microbatch.cp_rank,
        causal=True,
        lengths=microbatch.lengths.tolist(),
    )
    return {True: layout}


def _checked_lengths(offsets: Ints, degree: int) -> Ints:
    padded = np.diff(offsets)
    if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or np.any(padded < 0):
        raise LayoutError(
            f"cu_seqlens {offsets.tolist()} must be one dimension of offsets that start at 0 "
            "and never fall"
        )
    wrong = np.flatnonzero(padded % (2 * degree)) if degree > 1 else np.empty(0, np.int64)
    if wrong.size:
        raise LayoutError(
            f"sequence {wrong[0]} has {padded[wrong[0]]} tokens, which {degree} replicas cannot "
            f"cut in zigzag; pad every sequence to a multiple of {2 * degree}"
        )
    return padded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A pack cut for a group: arrays are [S], tokens."""

    offsets: Ints
    padded: Ints
    true: Ints
    degree: int

    def block(self, mine: int, theirs: int, *, causal: bool) -> Block | None:
        query_slots: tuple[int, ...] = (0, 1)
        key_slots: tuple[int, ...] = (0, 1)
        if causal and theirs < mine:
            key_slots = (0,)
        elif causal and theirs > mine:
            query_slots = (1,)
        query_starts, query_counts = self._ranges(mine, query_slots)
        key_starts, key_counts = self._ranges(theirs, key_slots)
        meet = (query_counts.sum(axis=1) > 0) & (key_counts.sum(axis=1) > 0)
        if not meet.any():
            return None
        return Block(
            queries=self._rows(query_starts[meet], query_counts[meet]),
            keys=self._rows(key_starts[meet], key_counts[meet]),
            causal=causal and theirs == mine,
        )

    def _ranges(self, member: int, slots: tuple[int, ...]) -> tuple[Ints, Ints]:
        """First local row and number of true rows, both [S, slots], of a member's chunks."""
        chunks = 2 * self.degree if self.degree > 1 else 1
        chunk_tokens = self.padded // chunks
        # Degree 1 is one chunk a sequence; only its slot 0 exists.
        held = (member, chunks - 1 - member)[:chunks]
        local = self.offsets[:-1] // self.degree
        chosen = [slot for slot in slots if slot < len(held)]
        starts = np.stack([local + slot * chunk_tokens for slot in chosen], axis=1)
        true = [np.clip(self.true - held[s] * chunk_tokens, 0, chunk_tokens) for s in chosen]
        return starts, np.stack(true, axis=1)

    def _rows(self, starts: Ints, counts: Ints) -> Rows:
        bounds = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
        starts, counts = starts.ravel(), counts.ravel()
        starts, counts = starts[counts > 0], counts[counts > 0]
        ends = np.cumsum(counts)
        rows = int(ends[-1])
        index: slice | Tensor
        if np.array_equal(starts[1:], (starts + counts)[:-1]):
            index = slice(int(starts[0]), int(starts[0]) + rows)
        else:
            # row r of range g is starts[g] + (r - rows before g)
            shift = np.repeat(starts - (ends - counts), counts)
            index = torch.from_numpy(np.arange(rows) + shift)
        return Rows(
            index=index,
            bounds=tuple(bounds.tolist()),
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        )
