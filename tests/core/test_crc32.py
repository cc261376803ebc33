"""The checksum of parts: zlib's numbers, whichever package computes them."""

import sys
import zlib

import numpy as np
from dataservice_proto.crc32 import combine, fastest, fastest_combine
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.crc32 import crc32, crc32_end_to_end


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_it_is_the_crc_of_zlib_also_in_pieces(data, cut):
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_of_pieces_end_to_end_it_follows_from_each_ones(pieces):
    known = [(zlib.crc32(piece), len(piece)) for piece in pieces]
    assert crc32_end_to_end(known) == zlib.crc32(b"".join(pieces))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_without_the_package_pieces_are_combined_to_the_same(first, second):
    wanted = zlib.crc32(first + second)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == wanted


def test_pieces_larger_than_four_gigabytes_are_combined():
    zeros, block, times = 0, bytes(2**20), 4097
    for _ in range(times):
        zeros = crc32(block, zeros)
    known = (zlib.crc32(b"ahead"), zeros, times * 2**20)
    behind = zlib.crc32(b"ahead")
    for _ in range(times):
        behind = crc32(block, behind)
    assert combine(*known) == behind
    assert crc32_end_to_end([(known[0], 5), known[1:]]) == behind


def test_it_reads_any_bytes_in_memory():
    data = np.random.default_rng(0).integers(0, 256, 2**20 + 5, np.uint8)
    wanted = zlib.crc32(data.tobytes())
    assert {crc32(data), crc32(data.data), crc32(memoryview(data)[:]), crc32(bytearray(data))} == {
        wanted
    }
    for begin in range(9):  # a view begins anywhere
        assert crc32(data.data[begin:]) == zlib.crc32(data.data[begin:])


def test_without_the_package_it_is_zlibs_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "zlib_ng", None)
    assert fastest() is zlib.crc32
    assert fastest_combine() is combine
