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
    host, ports = _asked(listen)
    for port in ports:
        with contextlib.suppress(RuntimeError):
            if credentials is None:
                return server.add_insecure_port(join_address(host, port))
            return server.add_secure_port(join_address(host, port), credentials)
    raise _taken(listen)


def require_free(listen: str) -> None:
    """Raises SpecError where `bind` would, now: so that it is told before what takes long. The port
    is not kept."""
    host, ports = _asked(listen)
    for port in ports:
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                with contextlib.suppress(OSError), socket.socket(family, kind) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                    trial.bind(address)
                    return
    raise _taken(listen)


def _asked(listen: str) -> tuple[str, range]:
    """The host and the ports of `listen`. Raises SpecError where it is of another form."""
    host, ports = split_address(listen)
    first, _, last = ports.partition("-")
    last = last or first
    if not first.isdecimal() or not last.isdecimal() or int(last) > 65535:
        raise SpecError(f"listen address {listen!r} is not host:port, such as 0.0.0.0:50051.")
    # For 0.0.0.0 gRPC listens on all IPv4 and IPv6 addresses; it does not know the other forms.
    host = "0.0.0.0" if host in EVERY_HOST else host
    return host, range(int(first), int(last) + 1)


def _taken(listen: str) -> SpecError:
    return SpecError(f"cannot listen on {listen}: {_refusal()}")


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
