"""Where a model places the tokens of a pack: M-RoPE's three numbers a token, from the plan alone.

Text counts on by one. Within an image or a clip, time, height and width count the item's merged
patches, each from the position where the item begins; the text behind it goes on at the height or
the width of its grid, whichever is larger, or with `past_time` also past its last time:

    tokens    a  b  [image of 2 × 3 patches]  c
    time      0  1   2 2 2 2 2 2              5
    height    0  1   2 2 2 3 3 3              5
    width     0  1   2 3 4 2 3 4              5

Source: Qwen2-VL (arXiv:2409.12191) section 2.1, Qwen2.5-VL (arXiv:2502.13923) section 2.1.1, and
`get_rope_index` of transformers 5; `past_time` is the paper's rule, and that of transformers 4.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.errors import MalformedShard
from trainer_client.shard import PackItems


@dataclass(frozen=True, kw_only=True, slots=True)
class MropeRule:
    """With `tokens_per_second` above 0, a clip's patches are placed by seconds, else one by one."""

    tokens_per_second: float = 0.0
    past_time: bool = False


def held_rows(bounds: NDArray[np.int64], degree: int, cp_rank: int) -> NDArray[np.int64]:
    """The rows of a pack, int64[local tokens], that member `cp_rank` of a group holds: chunks i and
    2d-1-i of every sample. `bounds` int64[S+1] are the padded sample offsets."""
    padded = np.diff(bounds)
    held = np.array([0] if degree == 1 else [cp_rank, 2 * degree - 1 - cp_rank])
    chunk_tokens = padded // (2 * degree) if degree > 1 else padded
    first = (bounds[:-1, None] + chunk_tokens[:, None] * held).ravel()  # [sample · chunk]
    tokens = np.repeat(chunk_tokens, len(held))
    before = np.cumsum(tokens) - tokens
    rows: NDArray[np.int64] = np.arange(int(tokens.sum())) + np.repeat(first - before, tokens)
    return rows


def sample_of(bounds: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sample of each row, by its place in the pack."""
    return np.searchsorted(bounds, rows, side="right") - 1


def in_sample(bounds: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each row's place in its sample."""
    return rows - bounds[sample_of(bounds, rows)]


def mrope_positions(
    bounds: NDArray[np.int64], items: PackItems, rule: MropeRule
) -> NDArray[np.int64]:
    """(time, height, width) of every token of a pack: int64[3, tokens]. O(tokens).

    `bounds` int64[S+1] are the padded sample offsets. Items without a grid count as text. Raises
    MalformedShard where a grid has another number of patches than the item has tokens.
    """
    total = int(bounds[-1])
    with_grid = items.grid[:, 0] > 0
    start, tokens = items.start[with_grid], items.tokens[with_grid]
    t, h, w = _merged(items.grid[with_grid], tokens)
    interval = _interval(items.seconds_per_patch[with_grid], t, rule)
    advance = np.maximum(h, w)
    if rule.past_time:
        advance = np.maximum(advance, _times(t - 1, interval) + 1)
    shift = np.zeros(total + 1, dtype=np.int64)
    np.add.at(shift, start + tokens, advance - tokens)
    shift = np.cumsum(shift)[:total]
    sample_start = np.repeat(bounds[:-1], np.diff(bounds))
    text = np.arange(total) - sample_start + shift - shift[sample_start]
    positions = np.repeat(text[None], 3, axis=0)
    item = np.repeat(np.arange(len(start)), tokens)
    within = np.arange(len(item)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    row = start[item] + within
    origin = text[start][item]
    patch = within % (h * w)[item]
    positions[0, row] = origin + _times(within // (h * w)[item], interval[item])
    positions[1, row] = origin + patch // w[item]
    positions[2, row] = origin + patch % w[item]
    return positions


def local_positions(
    bounds: NDArray[np.int64], items: PackItems, rule: MropeRule, *, degree: int, cp_rank: int
) -> torch.Tensor:
    """`mrope_positions` of the rows that member `cp_rank` of a group holds: int64[3, local]."""
    whole = mrope_positions(bounds, items, rule)
    return torch.from_numpy(whole[:, held_rows(bounds, degree, cp_rank)])


def _merged(
    grid: NDArray[np.int64], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Time, height and width in merged patches: int64[m] each."""
    t, h, w, merge = grid.T
    t, h, w = t, h // np.maximum(merge, 1), w // np.maximum(merge, 1)
    if (wrong := np.flatnonzero(t * h * w != tokens)).size:
        first = wrong[0]
        raise MalformedShard(
            f"an item has the grid {grid[first].tolist()} (t, h, w, merge), which is "
            f"{int((t * h * w)[first])} tokens, and {int(tokens[first])} tokens in the plan"
        )
    return t, h, w


def _interval(
    seconds: NDArray[np.float64], t: NDArray[np.int64], rule: MropeRule
) -> NDArray[np.float32]:
    """What the time grows by from patch to patch: float32[m], as transformers computes it."""
    known = ~np.isnan(seconds)
    if rule.tokens_per_second <= 0:
        return np.ones(len(t), dtype=np.float32)
    known_s = np.where(known, seconds, 1.0 / rule.tokens_per_second).astype(np.float32)
    return np.multiply(known_s, rule.tokens_per_second, dtype=np.float32)


def _times(patch: NDArray[np.int64], interval: NDArray[np.float32]) -> NDArray[np.int64]:
    return (patch.astype(np.float32) * interval).astype(np.int64)
