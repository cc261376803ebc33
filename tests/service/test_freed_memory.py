"""What was freed goes back to the system."""

import asyncio
import os
from functools import partial

import numpy as np
import pytest

from benchmarks.neighbours import resident_bytes
from dataservice.operate.freed_memory import (
    MUCH_BYTES,
    give_back,
    give_back_now_and_then,
    kept_bytes,
)

MIB = 2**20


@pytest.mark.skipif(kept_bytes() == 0, reason="the C library cannot tell what it keeps")
def test_small_pieces_that_were_freed_leave_the_process():
    pieces = [np.ones(2000) for _ in range(20_000)]  # 16 kB each, 320 MB: too small to be mapped
    pins = pieces[-1:]  # at the end of the heap
    most_bytes = resident_bytes(os.getpid())
    del pieces
    give_back()
    assert resident_bytes(os.getpid()) < most_bytes - 200 * MIB
    assert len(pins) == 1


async def test_memory_is_given_back_once_much_is_kept_and_not_again_until_more_is():
    kept = iter([0, MUCH_BYTES - 1, MUCH_BYTES, 100, 50, MUCH_BYTES + 49, MUCH_BYTES + 50, 0])
    given, looks = [], []

    def look():
        looks.append(next(kept))
        return looks[-1]

    twice = asyncio.Event()

    def give():
        given.append(looks[-1])
        if len(given) == 2:
            loop.call_soon_threadsafe(twice.set)

    loop = asyncio.get_running_loop()
    task = asyncio.create_task(give_back_now_and_then(0.001, looks=1, kept=look, give=give))
    await asyncio.wait_for(twice.wait(), 20)
    task.cancel()
    assert given == [MUCH_BYTES, MUCH_BYTES + 50]


async def test_memory_that_the_next_step_uses_again_is_left():
    used_again = [MUCH_BYTES, 10, MUCH_BYTES, MUCH_BYTES, 10, MUCH_BYTES, MUCH_BYTES]
    free_for_long = [MUCH_BYTES + 1, 0]
    kept, given = iter([0, *used_again, *free_for_long]), asyncio.Event()
    left = [len(free_for_long)]  # of the looks, when memory was given back

    def give():
        left[0] = len(list(kept))
        loop.call_soon_threadsafe(given.set)

    loop = asyncio.get_running_loop()
    look = partial(next, kept)
    task = asyncio.create_task(give_back_now_and_then(0.001, looks=3, kept=look, give=give))
    await asyncio.wait_for(given.wait(), 20)
    task.cancel()
    assert left == [1]
