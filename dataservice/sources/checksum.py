"""A checksum of what a sample was made of when it was indexed.

It covers the record and every media file as read, wherever the format keeps them, so that a
file damaged or replaced later shows itself on the next read, whatever its codec makes of it.
"""

import json
import zlib

from dataservice.core.sample import RawSample


def sample_crc32(raw: RawSample) -> int:
    """CRC-32 of record, kinds and media bytes. Names do not count. O(bytes)."""
    crc = zlib.crc32(json.dumps(raw.record, check_circular=False).encode())
    for blob in raw.media:
        crc = zlib.crc32(f"\0{blob.kind} {len(blob.data)}\0".encode(), crc)
        crc = zlib.crc32(blob.data, crc)
    return crc
