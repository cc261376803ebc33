"""Listening on host:port, or on the first free one of a range of ports."""

import contextlib
import errno
import socket

import grpc
import grpc.aio

from dataservice.core.address import EVERY_HOST, join_address, split_address
from dataservice.core.errors import SpecError


def bind(
    server: grpc.aio.Server | grpc.Server, listen: str, credentials: grpc.ServerCredentials | None
) -> int:
    """Listen on the port, or on the first free one of a range such as 20100-20115. Returns the
    port. Raises SpecError where none can be listened on."""
    host, ports = split_address(listen)
    first, _, last = ports.partition("-")
    last = last or first
    if not first.isdecimal() or not last.isdecimal() or int(last) > 65535:
        raise SpecError(f"listen address {listen!r} is not host:port, such as 0.0.0.0:50051.")
    # For 0.0.0.0 gRPC listens on all IPv4 and IPv6 addresses; it does not know the other forms.
    host = "0.0.0.0" if host in EVERY_HOST else host
    for port in range(int(first), int(last) + 1):
        with contextlib.suppress(RuntimeError):
            if credentials is None:
                return server.add_insecure_port(join_address(host, port))
            return server.add_secure_port(join_address(host, port), credentials)
    raise SpecError(f"cannot listen on {listen}: {_refusal()}")


def _refusal() -> str:
    """Why, which gRPC does not tell, and what to do."""
    try:
        socket.socket().close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return (
                f"{error.strerror}. Raise the limit of open files (`ulimit -n`, LimitNOFILE= of "
                "systemd, nofile of a container)."
            )
    return (
        "another process has the port, or the host is not of this machine. Stop what uses the "
        "port, or choose another; port 0 picks a free one."
    )
