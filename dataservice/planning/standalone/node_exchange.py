"""One exchange for encoded features: OrchMLLM's rearrangement composition Π_LLM ∘ Π_enc⁻¹.

Each item is encoded on one rank and needed on another, so two lookups compose the two
rearrangements, and one all-to-all replaces going back to the item's first home:

    encoder rank   0: a b d   1: c e        send lists, by target then item
    LLM rank       0: a c     1: b d e      0 → 0: a | 0 → 1: b d | 1 → 0: c | 1 → 1: e
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import check_permutation
from dataservice.planning.kernels.sort import group_stable


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Who sends which encoded items to whom.

    `send_order` int32[n] lists items by (encoder rank, LLM rank, item); rank r sends
    send_order[send_offsets[r] : send_offsets[r + 1]]. `receive_order` lists them by (LLM rank,
    encoder rank, item): just as the buffers of an all-to-all arrive. `source`, `target`,
    `pair_tokens` [pairs] are the rank pairs with traffic, by source then target; a full matrix
    is made only on request because it has ranks² entries.
    """

    ranks: int
    send_order: NDArray[np.int32]
    send_offsets: NDArray[np.int64]
    receive_order: NDArray[np.int32]
    receive_offsets: NDArray[np.int64]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    pair_tokens: NDArray[np.int64]

    @property
    def send_splits(self) -> NDArray[np.int64]:
        """int64[ranks, ranks] tokens that rank (row) sends to rank (column)."""
        splits = np.zeros((self.ranks, self.ranks), np.int64)
        splits[self.source, self.target] = self.pair_tokens
        return splits

    @property
    def receive_splits(self) -> NDArray[np.int64]:
        """int64[ranks, ranks] tokens that rank (row) receives from rank (column)."""
        return np.ascontiguousarray(self.send_splits.T)

    def send_splits_of(self, rank: int) -> NDArray[np.int64]:
        """int64[ranks] tokens `rank` sends to each rank: input splits of its all-to-all."""
        mine = self.source == rank
        splits = np.zeros(self.ranks, np.int64)
        splits[self.target[mine]] = self.pair_tokens[mine]
        return splits

    def receive_splits_of(self, rank: int) -> NDArray[np.int64]:
        """int64[ranks] tokens `rank` receives from each rank: output splits of its all-to-all."""
        mine = self.target == rank
        splits = np.zeros(self.ranks, np.int64)
        splits[self.source[mine]] = self.pair_tokens[mine]
        return splits

    def items_sent_by(self, rank: int) -> NDArray[np.int32]:
        """Items encoded on `rank`, in the order they leave it."""
        return self.send_order[self.send_offsets[rank] : self.send_offsets[rank + 1]]

    def items_received_by(self, rank: int) -> NDArray[np.int32]:
        """Items needed on `rank`, in the order they arrive."""
        return self.receive_order[self.receive_offsets[rank] : self.receive_offsets[rank + 1]]

    @property
    def moved_tokens(self) -> int:
        """Tokens that leave the rank they were encoded on."""
        return int(self.pair_tokens[self.source != self.target].sum())


def compose_exchange(
    encoder_rank_of: ArrayLike,
    llm_rank_of: ArrayLike,
    tokens: ArrayLike,
    *,
    ranks: int | None = None,
) -> Exchange:
    """Compose where items are encoded with where they are needed (OrchMLLM §6).

    `encoder_rank_of`, `llm_rank_of` [n] ranks, `tokens` [n] encoded tokens an item; `ranks` is
    the group size, by default one more than the largest rank named. Raises PlanningError on
    unequal lengths, ranks out of range or negative tokens. O(n + ranks).
    """
    source = np.require(encoder_rank_of, np.int64, ("C", "W"))
    target = np.require(llm_rank_of, np.int64, ("C", "W"))
    amounts = np.asarray(tokens, dtype=np.int64)
    if source.ndim != 1 or source.shape != target.shape or source.shape != amounts.shape:
        raise PlanningError(
            f"encoder_rank_of, llm_rank_of and tokens have shapes {source.shape}, {target.shape} "
            f"and {amounts.shape}; give one value an item in each"
        )
    n = source.size
    highest = int(max(source.max(), target.max())) if n else -1
    group = highest + 1 if ranks is None else ranks
    if n and (min(source.min(), target.min()) < 0 or highest >= group):
        raise PlanningError(
            f"ranks run from {min(source.min(), target.min())} to {highest} but the group has "
            f"{group}; number ranks from 0 and give ranks at least {highest + 1}"
        )
    if n and amounts.min() < 0:
        raise PlanningError(f"an item has {amounts.min()} tokens; lengths are at least 0")
    # Sorting by the minor key first and then, stably, by the major one.
    items = np.arange(n)
    by_target, receive_offsets = group_stable(target, items, group)
    by_source, send_offsets = group_stable(source, items, group)
    send_order, _ = group_stable(source, by_target, group)
    receive_order, _ = group_stable(target, by_source, group)
    check_permutation(send_order, n, "order in which items are sent")
    check_permutation(receive_order, n, "order in which items arrive")
    sender, receiver = source[send_order], target[send_order]
    changes = (sender[1:] != sender[:-1]) | (receiver[1:] != receiver[:-1])
    first = np.flatnonzero(np.concatenate((np.ones(min(n, 1), np.bool_), changes)))
    totals = np.add.reduceat(amounts[send_order], first) if n else np.empty(0, np.int64)
    return Exchange(
        ranks=group,
        send_order=send_order.astype(np.int32),
        send_offsets=send_offsets,
        receive_order=receive_order.astype(np.int32),
        receive_offsets=receive_offsets,
        source=sender[first].astype(np.int32),
        target=receiver[first].astype(np.int32),
        pair_tokens=totals,
    )
