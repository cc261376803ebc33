"""Detects whether a write-ahead log has lost transactions that were on disk.

SQLite reads a log up to the first frame that fails its checksum, and silently drops the rest. After
a crash this is right: the last transaction was still being written. But a transaction begins only
after the one before it is on disk. So if another whole transaction follows the transaction of the
damaged frame, SQLite would drop transactions that callers were told are safe.

Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

import struct
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct(">8I")  # magic, version, page size, checkpoint, salts 1 2, checksums 1 2
_FRAME = struct.Struct(">6I")  # page, pages after a commit or 0, salts 1 2, checksums 1 2
_MAGIC = 0x377F0682  # its last bit says that checksums read words as big-endian


def lost_transactions(path: Path) -> str:
    """What is wrong with the log at `path`, or "" when no acknowledged transaction is missing.

    Reads the log once and changes nothing; O(size of the log), which SQLite keeps at a few MiB but
    where a kill left that of a VACUUM. Raises OSError when the log cannot be read.
    """
    if not path.exists() or path.stat().st_size < _HEADER.size:
        return ""  # a crash may happen before the first transaction is complete
    with path.open("rb") as log:
        header = log.read(_HEADER.size)
        magic, _, page_bytes, _, salt_1, salt_2, *kept = _HEADER.unpack(header)
        order = ">" if magic & 1 else "<"
        if magic & ~1 != _MAGIC or _checksum(header[:24], (0, 0), order) != tuple(kept):
            return _header_verdict(log)
        return _frames_verdict(log, page_bytes, (salt_1, salt_2), (kept[0], kept[1]), order)


def _header_verdict(log: BinaryIO) -> str:
    return "its header is damaged" if log.read(1) else ""


def _frames_verdict(
    log: BinaryIO, page_bytes: int, salts: tuple[int, int], sums: tuple[int, int], order: str
) -> str:
    number, damaged, commits = 0, 0, 0
    while len(frame := log.read(_FRAME.size + page_bytes)) == _FRAME.size + page_bytes:
        number += 1
        _, committed_pages, salt_1, salt_2, *kept = _FRAME.unpack(frame[: _FRAME.size])
        ours = (salt_1, salt_2) == salts  # else older than the log's last restart, or damaged
        if not damaged:
            sums = _checksum(frame[:8] + frame[_FRAME.size :], sums, order)
            if ours and sums == tuple(kept):
                continue
            damaged = number
        # One commit ends the transaction of the damaged frame; a second one ends a later
        # transaction.
        commits += ours and committed_pages > 0
        if commits == 2:
            return f"frame {damaged} is damaged, and whole transactions follow it"
    return ""


def _checksum(data: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    sum_1, sum_2 = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        sum_1 = (sum_1 + first + sum_2) & 0xFFFFFFFF
        sum_2 = (sum_2 + second + sum_1) & 0xFFFFFFFF
    return sum_1, sum_2
