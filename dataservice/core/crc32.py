"""CRC-32 as peers compute it, for rooms that speak to none."""

from collections.abc import Iterable

from dataservice_proto.crc32 import crc32, crc32_combine

__all__ = ["crc32", "crc32_end_to_end"]


def crc32_end_to_end(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of bytes end to end, by the CRC-32 and size of each piece; reads none of them.
    O(pieces)."""
    whole = 0
    for checksum, size_bytes in pieces:
        whole = crc32_combine(whole, checksum, size_bytes)
    return whole
