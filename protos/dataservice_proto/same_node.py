"""What a worker and a rank on one machine say over a Unix socket, beside gRPC.

    worker ── where its socket is, a key of the holder's own ──► rank    answer of a granted Fetch
    worker ── WELCOME nonce ──────────────────────────► rank    from here on over the socket
    worker ◄─ HELLO holder, nonce, proof ────────────── rank
    worker ── WINDOW proof, sizes, a memory file ─────► rank
    worker ◄─ FETCH request ─────────────────────────── rank    one after another
    worker ── HEADER, FILLED, FILLED, … END ──────────► rank
    worker ◄─ FREED ─────────────────────────────────── rank    for each FILLED

The window is memory of this connection alone, in slots that are filled in turn. A socket that can
be opened, and answers with the right proof, is on the same machine: no name is believed. The key is
told over gRPC only, to who has shown a valid ticket there; each FETCH shows its ticket again.
"""

import hashlib
import hmac
import struct
from enum import IntEnum

VERSION = "1"
WANTED = "dataservice-same-node"
"""Metadata of a Fetch: the version that the rank reads, where it would rather use a socket."""
SOCKET = "dataservice-node-socket"
"""Metadata of its answer: a path, or @ and an abstract name."""
KEY = "dataservice-node-key-bin"
"""Metadata of its answer: 32 bytes that are known to this holder and the worker."""

NONCE_BYTES = 16
PROOF_BYTES = 32
SIZES = struct.Struct("<II")  # of a window: slots, bytes of each
SIZE = struct.Struct("<I")  # of what fills a slot
_FRAME = struct.Struct("<BI")
_MOST_FRAME_BYTES = 4 * 2**20  # as gRPC has it


class Kind(IntEnum):
    """What a frame is."""

    WELCOME = 1
    HELLO = 2
    WINDOW = 3
    FETCH = 4
    HEADER = 5
    FILLED = 6
    END = 7
    REFUSED = 8
    FREED = 9


def key_of(secret: bytes, holder: str) -> bytes:
    """The key of a holder at the worker that has this secret."""
    return hmac.digest(secret, f"dataservice same node {holder}".encode(), hashlib.sha256)


def proof_of(key: bytes, side: str, worker_nonce: bytes, rank_nonce: bytes) -> bytes:
    """What shows that a side, `worker` or `rank`, knows the key: 32 bytes."""
    return hmac.digest(key, side.encode() + worker_nonce + rank_nonce, hashlib.sha256)


def socket_address(announced: str) -> str:
    """What to bind or connect for SOCKET."""
    return f"\0{announced[1:]}" if announced.startswith("@") else announced


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """A frame as it is sent."""
    return _FRAME.pack(kind, len(payload)) + payload


class Frames:
    """Frames out of what arrives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """More has arrived."""
        self._data += data

    def take(self) -> tuple[Kind, bytes] | None:
        """The next frame; None until it is whole. Raises ValueError where it can be none."""
        if len(self._data) < _FRAME.size:
            return None
        kind, size_bytes = _FRAME.unpack_from(self._data)
        if size_bytes > _MOST_FRAME_BYTES:
            raise ValueError(f"a frame of {size_bytes:,} bytes")
        end = _FRAME.size + size_bytes
        if len(self._data) < end:
            return None
        payload = bytes(self._data[_FRAME.size : end])
        del self._data[:end]
        return Kind(kind), payload
