"""Memory of parts that is filled again: never while a tensor of it is left."""

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_client.recycled_buffers import LEAST_BYTES, RecycledBuffers, block_bytes


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_memory_comes_again_once_its_last_view_is_gone():
    buffers = RecycledBuffers()
    first = buffers.empty(2 * LEAST_BYTES)
    place, view = address(first), first[5:100].view(torch.uint8)
    del first
    other = buffers.empty(2 * LEAST_BYTES)
    assert address(other) != place
    del view
    assert address(buffers.empty(2 * LEAST_BYTES)) == place


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5 * LEAST_BYTES), st.integers(0, 4)), max_size=30))
def test_what_is_held_keeps_its_bytes_whatever_comes_later(asked):
    buffers, held = RecycledBuffers(kept_bytes=6 * LEAST_BYTES), {}
    for number, (size_bytes, place) in enumerate(asked):
        held.pop(place, None)
        fresh = buffers.empty(size_bytes)
        assert (fresh.dtype, tuple(fresh.shape)) == (torch.uint8, (size_bytes,))
        assert fresh.untyped_storage().nbytes() == size_bytes  # a copy of it takes no more
        fresh.fill_(number)
        held[place] = fresh[size_bytes // 2 :], number
        for view, wanted in held.values():
            assert bool((view == wanted).all())


def test_of_many_sizes_no_more_than_its_limit_is_kept():
    def mapped():
        with open("/proc/self/maps") as maps:
            return len(maps.readlines())

    buffers = RecycledBuffers(kept_bytes=4 * LEAST_BYTES)
    buffers.empty(LEAST_BYTES)
    gc.collect()
    before = mapped()
    held = [buffers.empty(size) for size in range(LEAST_BYTES, 40 * LEAST_BYTES, LEAST_BYTES)]
    del held
    buffers.empty(LEAST_BYTES)
    gc.collect()
    assert mapped() <= before + 5


def test_a_forked_process_has_bytes_of_its_own():
    tensor = RecycledBuffers().empty(LEAST_BYTES).fill_(1)
    bytes_of = tensor.numpy()  # torch's threads are not in a forked process
    child = os.fork()
    if child == 0:
        bytes_of[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes_of.min() == bytes_of.max() == 1


def test_blocks_are_at_most_a_quarter_too_large():
    for size_bytes in np.random.default_rng(0).integers(LEAST_BYTES, 2**40, 1000).tolist():
        assert size_bytes <= block_bytes(size_bytes) <= 1.25 * size_bytes + 4096


def test_memory_of_parts_is_in_huge_pages_where_the_kernel_has_them():
    held = RecycledBuffers().empty(8 * LEAST_BYTES)
    try:
        offered = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        mapped = Path("/proc/self/smaps").read_text()
    except OSError:
        pytest.skip("no kernel that tells of huge pages")
    flags, wanted = "", address(held)
    for line in mapped.splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(span[1], 16) <= wanted < int(span[2], 16)
        elif within and line.startswith("VmFlags"):
            flags = line
    assert flags
    assert " hg" in flags or "[never]" in offered
