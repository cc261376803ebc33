"""Best-fit decreasing in two dimensions, text and vision tokens.

Open packs are filed by the room they have left: a row for vision room (one a tile where lengths
come in tiles) and in each row thousands of columns of text room, a bit set where a pack is filed.
The tightest pack in a row is the first set bit at or right of the sample's need:

    text room →        · · ■ · ■ · · ■
    vision room ↓      · · · · · ■ · ·      two look-ups a row, whatever the number of packs
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.integers import lowest_bit
from dataservice.planning.kernels.sort import argsort_descending, argsort_falling
from dataservice.planning.packs.packing import Packing, check_limit, check_pair, to_packing

_MOST_ROWS = 64
# Words of 64 columns each, in one row and in all rows; a row's summary has a bit for every word.
_LEAST_WORDS, _MOST_WORDS = 64, 512
_LOOKS = 8  # packs tried in a border cell, where room is only known to the cell
_MISSES = 256  # cells of the border row without one that fits, after which it is left


@leaf
def _next_column(
    words: NDArray[np.uint64], summary: NDArray[np.uint64], row: int, start: int
) -> int:
    """First set column of a row at or after `start`, or −1."""
    word = start >> 6
    if word >= words.shape[1]:
        return -1
    rest = words[row, word] >> np.uint64(start & 63)
    if rest != 0:
        return start + lowest_bit(rest)
    word += 1
    at = word >> 6
    while at < summary.shape[1]:
        later = summary[row, at]
        if at == word >> 6:
            later = (later >> np.uint64(word & 63)) << np.uint64(word & 63)
        if later != 0:
            word = (at << 6) + lowest_bit(later)
            return (word << 6) + lowest_bit(words[row, word])
        at += 1
    return -1


@leaf
def _file(
    pack: int,
    row: int,
    column: int,
    head: NDArray[np.int32],
    after: NDArray[np.int32],
    before: NDArray[np.int32],
    words: NDArray[np.uint64],
    summary: NDArray[np.uint64],
) -> None:
    first = head[row, column]
    after[pack] = first
    before[pack] = -1
    if first >= 0:
        before[first] = pack
    head[row, column] = pack
    words[row, column >> 6] |= np.uint64(1) << np.uint64(column & 63)
    summary[row, column >> 12] |= np.uint64(1) << np.uint64((column >> 6) & 63)


@leaf
def _take_out(
    pack: int,
    row: int,
    column: int,
    head: NDArray[np.int32],
    after: NDArray[np.int32],
    before: NDArray[np.int32],
    words: NDArray[np.uint64],
    summary: NDArray[np.uint64],
) -> None:
    if after[pack] >= 0:
        before[after[pack]] = before[pack]
    if before[pack] >= 0:
        after[before[pack]] = after[pack]
        return
    head[row, column] = after[pack]
    if after[pack] < 0:
        words[row, column >> 6] &= ~(np.uint64(1) << np.uint64(column & 63))
        if words[row, column >> 6] == 0:
            summary[row, column >> 12] &= ~(np.uint64(1) << np.uint64((column >> 6) & 63))


@leaf
def _columns(n: int, max_text: int, row_count: int) -> tuple[int, int]:
    """Words of 64 columns in each of the rows, and the tokens of a column as a power of two, since
    divisions would take most of the time."""
    most_words = max(_LEAST_WORDS, _MOST_WORDS // row_count)
    word_count = min(most_words, max(4, n // 64), max_text // 64 + 1)
    shift = 0
    while max_text >> shift >= 64 * word_count:
        shift += 1
    return word_count, shift


@kernel
def _best_fit(
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    max_text: int,
    max_vision: int,
    grain: int,
) -> tuple[NDArray[np.int64], int]:
    n = text.size
    pack_of = np.empty(n, np.int64)
    room_text = np.empty(n, np.int64)  # int64[packs], at most one a sample
    room_vision = np.empty(n, np.int64)  # int64[packs]
    after = np.empty(n, np.int32)  # int32[packs]: packs of a cell, as lists
    before = np.empty(n, np.int32)
    row_width = grain if max_vision // grain < _MOST_ROWS else max_vision // _MOST_ROWS + 1
    row_count = max_vision // row_width + 1
    word_count, shift = _columns(n, max_text, row_count)
    head = np.full((row_count, 64 * word_count), -1, np.int32)  # int32[rows, columns]
    words = np.zeros((row_count, word_count), np.uint64)  # uint64[rows, words]: a bit a column
    # uint64[rows, summary words]: a bit a word
    summary = np.zeros((row_count, word_count // 64 + 1), np.uint64)
    text_share = (1 << shift) / max_text
    vision_share = row_width / max(max_vision, 1)
    opened = 0
    for sample in range(n):
        need_text, need_vision = text[sample], vision[sample]
        column_from = need_text >> shift
        row_from = need_vision // row_width if need_vision else 0
        found, found_row, found_column = -1, -1, -1
        least = np.inf
        for row in range(row_from, row_count):
            if (row - row_from) * vision_share >= least:
                break
            column = _next_column(words, summary, row, column_from)
            misses = 0
            while column >= 0 and misses < _MISSES:
                misses += 1
                waste = (row - row_from) * vision_share + (column - column_from) * text_share
                if waste >= least:
                    break
                pack = head[row, column]
                looks = 0
                while pack >= 0 and looks < _LOOKS:
                    if room_text[pack] >= need_text and room_vision[pack] >= need_vision:
                        found, found_row, found_column, least = pack, row, column, waste
                        break
                    pack = after[pack]
                    looks += 1
                column = _next_column(words, summary, row, column + 1)
        if found < 0:
            found = opened
            opened += 1
            room_text[found] = max_text
            room_vision[found] = max_vision
        else:
            _take_out(found, found_row, found_column, head, after, before, words, summary)
        room_text[found] -= need_text
        room_vision[found] -= need_vision
        pack_of[sample] = found
        row = found_row
        if need_vision or row < 0:
            row = room_vision[found] // row_width
        column = room_text[found] >> shift
        _file(found, row, column, head, after, before, words, summary)
    return pack_of, opened


def pack_by_best_fit(
    order: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    max_text: int,
    max_vision: int,
    first_pack: int,
    pack_of: NDArray[np.int64],
) -> int:
    """Write the pack of every sample in `order`, numbering from `first_pack`; returns how many
    packs were opened. Every sample must fit alone. A few dozen word operations a sample."""
    in_order = vision[order]
    grain = max(int(np.gcd.reduce(in_order)), 1) if max_vision and order.size else 1
    packs, opened = _best_fit(text[order], in_order, max_text, max_vision, grain)
    pack_of[order] = first_pack + packs
    return int(opened)


def by_falling_need(
    text: NDArray[np.int64], vision: NDArray[np.int64], max_text: int, max_vision: int
) -> NDArray[np.int64]:
    """Samples by their larger share of a limit, largest first."""
    if max_vision == 0:
        return argsort_falling(text)
    return argsort_descending(np.maximum(text / max(max_text, 1), vision / max(max_vision, 1)))


def pack_bfd(
    text_tokens: ArrayLike,
    vision_tokens: ArrayLike,
    *,
    max_text: int,
    max_vision: int,
) -> Packing:
    """Pack samples by two-dimensional best-fit decreasing.

    `text_tokens`, `vision_tokens` [n] lengths; no pack exceeds `max_text` or `max_vision` tokens
    but those of one oversize sample, which come last. All packs within the limits are satisfied.
    Raises PlanningError on bad input. O(n log n), about a microsecond a sample.
    """
    text, vision = check_pair(text_tokens, vision_tokens)
    max_text = check_limit(max_text, "max_text", least=1)
    max_vision = check_limit(max_vision, "max_vision", least=0)
    pack_of = best_fit_falling(text, vision, max_text, max_vision)
    return to_packing(
        pack_of, text, vision, max_text=max_text, max_vision=max_vision, min_text=0, min_vision=0
    )


def best_fit_falling(
    text: NDArray[np.int64], vision: NDArray[np.int64], max_text: int, max_vision: int
) -> NDArray[np.int64]:
    """The packs of `pack_bfd` alone, int64[n], of lengths and limits that are known to be right."""
    order = by_falling_need(text, vision, max_text, max_vision)
    fits = (text <= max_text) & (vision <= max_vision)
    alone = np.flatnonzero(~fits)
    if alone.size:
        order = order[fits[order]]
    pack_of = np.empty(text.size, np.int64)
    opened = pack_by_best_fit(order, text, vision, max_text, max_vision, 0, pack_of)
    pack_of[alone] = opened + np.arange(alone.size)
    return pack_of


@kernel
def bound_falling(text: NDArray[np.int64], max_text: int, least_packs: int) -> tuple[int, int]:
    """How many packs `pack_bfd` opens at most of falling `text` int64[n] that fit alone, and what
    each but the last holds at least, where it opens no fewer than `least_packs`. O(n).

    A sample of s tokens opens a pack where no other has room for it. So each of those holds at
    least max_text − s, but for the column that a pack is filed by; and at least s, as they fall.
    Their tokens are among those that came before. The last pack is opened by no longer sample than
    the first that may open the `least_packs`-th.
    """
    slack = (1 << _columns(text.size, max_text, 1)[1]) - 1
    before, most, held = 0, 0, 0
    for place in range(text.size):
        size = text[place]
        each = max(size, max_text - size - slack, 1)
        packs = before // each + 1
        if packs >= least_packs and held == 0:
            held = max(max_text - size - slack, (max_text - slack) // 2, 1)
        most = max(most, packs)
        before += size
    return most, held
