"""Bare gRPC, with which the service's own is compared: bytes from memory, in messages as large."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from dataservice.serving.parts import CHUNK_BYTES

METHOD = "/bench/Bytes"


def held_bytes(size_bytes: int) -> NDArray[np.uint8]:
    """Bytes to send. Zeros that nothing has written would lie in one page, and be read from the
    processor's cache."""
    return np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)


def serve(*held: NDArray[np.uint8]) -> None:
    """Print the address, and send what is held, in turn, as often as each request says."""

    def sent(times: bytes, _context: object) -> Iterator[bytes]:
        for _ in range(int(times)):
            for data in held:
                for start in range(0, data.size, CHUNK_BYTES):
                    yield data[start : start + CHUNK_BYTES].tobytes()

    server = grpc.server(ThreadPoolExecutor(1))
    service, method = METHOD.strip("/").split("/")
    handler: Any = grpc.unary_stream_rpc_method_handler(sent)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()
