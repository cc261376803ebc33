"""FLAC of 16 bits at 16 kHz, by the codec's own decoder (libFLAC, in libsndfile).

It gives the samples that FFmpeg gives, in five sixths of the time, and sees more damage: each
frame has a checksum, and all that the header promises must be there. Where a frame is missing
libFLAC writes silence, so frames are counted before. Any other recording is left to FFmpeg, which
resamples and mixes, and tells what is wrong with frames.
"""

import io

import numpy as np
import soundfile
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.sample import MediaBlob
from dataservice.decode.processors.whisper import SAMPLE_RATE_HZ
from dataservice.decode.tags import without_tags

# "fLaC", then blocks, each with 4 bytes of a header: whether it is the last, its kind, its size.
# The first, of 34 bytes, describes the stream: RFC 9639, section 8.
_INFO_ENDS = 42
_LAST = 0x80
_FRAME = b"\xff\xf8"  # of a stream whose frames have one size
_MOST_FRAMES = 2**16  # over an hour in the smallest frames in use
_SAMPLES_BITS = 36


def plain_flac(blob: MediaBlob) -> bytes | None:
    """The file without tags, where it is FLAC in no container, mono, of 16 bits a sample and at 16
    kHz, its header states how long it is, and all its frames are there, in order. O(bytes)."""
    data = without_tags(blob.data)
    if not data.startswith((b"fLaC\x00\0\0\x22", b"fLaC\x80\0\0\x22")):
        return None
    # Rate, 20 bits; channels - 1, 3 bits; bits a sample - 1, 5 bits; samples.
    signal, samples = divmod(int.from_bytes(data[18:26]), 1 << _SAMPLES_BITS)
    least, most = int.from_bytes(data[8:10]), int.from_bytes(data[10:12])
    if signal != SAMPLE_RATE_HZ << 8 | 15 or not 0 < samples <= most * _MOST_FRAMES:
        return None
    bare = _bare(data)
    whole = least == most and _in_order(bare[_INFO_ENDS:], -(-samples // most))
    return bare if whole else None


def _in_order(sound: bytes, frames: int) -> bool:
    """Whether so many frames of one size follow each other; the last may be shorter. Each begins
    with the same four bytes and its number, coded as UTF-8 codes a character; that the four occur
    elsewhere is rare, and then FFmpeg looks closer."""
    if not sound.startswith(_FRAME):
        return False
    found = sound.split(sound[:4], frames + 1)[1:]
    if not frames - 1 <= len(found) <= frames:
        return False
    return all(
        frame.startswith(chr(number).encode("utf-8", "surrogatepass"))
        for number, frame in enumerate(found)
    )


def read_plain(name: str, plain: bytes, room: NDArray[np.float32]) -> int:
    """Write the samples of such a file, over the full scale, to the beginning of memory of as many
    as are planned; returns how many the file has, which may be more or less.

    Raises:
        SampleError: the file is damaged, or ends before all that its header promises.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(plain)) as file:
            wanted = room[: file.frames]
            # At once: each call of `read` ends with a search for where it ended.
            if len(file.read(out=wanted)) < len(wanted):
                raise _damaged(name, len(room), "its end is missing.")
            return int(file.frames)
    except soundfile.LibsndfileError as error:
        raise _damaged(name, len(room), error.error_string) from error


def _bare(data: bytes) -> bytes:
    """The file with nothing but its first block and its sound. libsndfile expands the others
    (titles, covers, tables of positions), and refuses a file for a mistake in one of them."""
    at, block = _INFO_ENDS, data[4:8]
    while not block[0] & _LAST and len(block := data[at : at + 4]) == 4:
        at += 4 + int.from_bytes(block[1:])
    return data[:4] + bytes([_LAST]) + data[5:_INFO_ENDS] + data[at:]


def _damaged(name: str, promised: int, seen: str) -> SampleError:
    return SampleError(
        f"audio {name!r} is truncated or damaged: its header promises "
        f"{promised / SAMPLE_RATE_HZ:.2f} s, but {seen.removeprefix('Error : ')} Replace the file "
        "or leave the sample out."
    )
