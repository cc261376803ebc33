"""What a WAV file promises, which FFmpeg silently makes as short as the bytes that are there."""

import struct

_FORMAT_BYTES = struct.Struct("<8xI")  # format, channels and rate; then bytes a second
_CHUNK = struct.Struct("<4sI")
_FIRST_CHUNK = 12
# Programs that write to a pipe do not know the size: 0, or the most that 31 or 32 bits hold, less
# the header and whole samples.
_UNKNOWN_BYTES = 0x7FFF_F000


def missing_wav_s(data: bytes) -> float:
    """Seconds of sound that the header of a WAV file promises behind its end; 0 where it leaves
    open how many there are, and for any other file. O(chunks before the sound)."""
    if data[:4] != b"RIFF" or data[8:_FIRST_CHUNK] != b"WAVE":
        return 0.0
    at, bytes_per_s = _FIRST_CHUNK, 0
    while at + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if name == b"fmt " and at + _FORMAT_BYTES.size <= len(data):
            (bytes_per_s,) = _FORMAT_BYTES.unpack_from(data, at)
        if name == b"data":
            known = bytes_per_s and size < _UNKNOWN_BYTES
            return max(0, size - (len(data) - at)) / bytes_per_s if known else 0.0
        at += size + size % 2  # chunks begin at even bytes
    return 0.0
