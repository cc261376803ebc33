"""What processes that index run in tests: each does as the errand that comes says."""

import json
import os
import signal
import socket
import time
from dataclasses import dataclass

from dataservice.core.errors import SourceError
from dataservice.sources.unnamed_file import unnamed_file
from dataservice.workers.decoder_messages import Answer, Kind, read_plain, refusal, send_answer


@dataclass(frozen=True)
class Obedient:
    def __call__(self, orders: socket.socket) -> None:
        order = read_plain(orders)
        match order["errand"]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)
            case "refuse":
                send_answer(orders, refusal(SourceError("the source is empty")))
            case "babble":
                send_answer(orders, Answer(kind=Kind.INLINE, payload=b"[1]"))
            case "credentials":
                _send(orders, json.dumps(order["credentials"]).encode())
            case size_bytes:
                _send(orders, bytes(range(256)) * (int(size_bytes) // 256))


def _send(orders: socket.socket, data: bytes) -> None:
    send_answer(orders, Answer(kind=Kind.INLINE, payload=b"[2, 30]"))
    send_answer(orders, Answer(kind=Kind.BAD, payload=b'[0, "torn"]'))
    descriptor = unnamed_file()
    os.pwrite(descriptor, data, 0)
    send_answer(orders, Answer(kind=Kind.MEMORY, payload=b'[1, ""]', descriptor=descriptor))
    send_answer(orders, Answer(kind=Kind.DONE))
