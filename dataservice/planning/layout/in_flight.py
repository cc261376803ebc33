"""What a device holds at once: microbatches whose backward is still due, read off the schedule.

The order of a device's operations is fixed by the schedule, so the sets of microbatches that it
holds are known without any times. Microbatches that keep the same bytes are counted and not told
apart.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.pipeline_parallel.simulator import FORWARD, Program

_FEW_COLUMNS = 64


def held_counts(
    program: Program, stages: int, virtual_stages: int, class_of: NDArray[np.int64]
) -> list[NDArray[np.int32]]:
    """Of each device, the largest it holds: int32[row, chunk of the device, class].

    `class_of` [microbatch] names each one's class. What a device holds at any time is no more than
    one of its rows, in every chunk and class.
    """
    classes = int(class_of.max()) + 1
    found = []
    for device in range(stages):
        mine = np.flatnonzero(program.chunk % stages == device)
        kind = program.kind[mine]
        column = program.chunk[mine] // stages * classes + class_of[program.position[mine]]
        change = np.zeros((mine.size, virtual_stages * classes), np.int32)
        change[np.arange(mine.size), column] = np.where(kind == FORWARD, 1, -1)
        held = np.cumsum(change, axis=0, dtype=np.int32)
        # What is followed by another forward is a part of what is held after it.
        last = np.append(kind[1:] != FORWARD, True) & (kind == FORWARD)
        rows = largest_rows(held[last])
        found.append(rows.reshape(len(rows), virtual_stages, classes))
    return found


def largest_rows(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Those of int[row, column] that no other row covers in every column. Equal rows are one, but
    where columns are many, as each microbatch is then unlike the others and so are rows."""
    distinct = np.unique(rows, axis=0) if rows.shape[1] <= _FEW_COLUMNS else rows
    size = distinct.sum(axis=1)
    kept = distinct[:0]
    for most in np.unique(size)[::-1]:  # distinct rows of one sum cover none of one another
        rows = distinct[size == most]
        covered = np.any(np.all(kept[None] >= rows[:, None], axis=2), axis=1)
        kept = np.concatenate([kept, rows[~covered]])
    return kept
