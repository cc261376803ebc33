"""host:port, as peers write, print, bind and call it. Service and trainers' client read it alike.

An IPv6 host of an address stands in brackets, `[::1]:50051`: without them nobody can tell where
it ends. By itself, as in `worker_host: "::1"`, it stands without.
"""

from ipaddress import IPv6Address, ip_address

EVERY_HOST = frozenset({"", "*", "0.0.0.0", "::"})
"""Hosts that are every address of this machine, of either family."""

_URLS = ("http://", "https://", "grpc://", "grpcs://", "tcp://")  # none is a scheme of gRPC's


def split_address(address: str) -> tuple[str, str]:
    """(host without brackets, text behind the last colon). Raises ValueError where there is no
    colon, or an IPv6 host without brackets, or it is a URL."""
    if address.startswith(_URLS):
        raise ValueError(
            f"address {address!r} is a URL. Write host:port alone, such as 10.0.0.5:50051."
        )
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return host[1:-1], port
    if _is_ipv6(host):
        raise _unbracketed(address, join_address(host, port))
    if _is_ipv6(address):
        raise _unbracketed(address, join_address(address, "50051"))
    if not colon or "[" in host[:1]:
        raise ValueError(f"address {address!r} is not host:port, such as 10.0.0.5:50051.")
    return host, port


def join_address(host: str, port: int | str) -> str:
    """host:port, with brackets where the host is IPv6. The host may have them already."""
    return f"[{bare_host(host)}]:{port}" if _is_ipv6(bare_host(host)) else f"{host}:{port}"


def bare_host(host: str) -> str:
    """The host without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine."""
    try:
        return ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ip_address(host), IPv6Address)
    except ValueError:
        return False


def _unbracketed(address: str, meant: str) -> ValueError:
    return ValueError(
        f"address {address!r} has an IPv6 host and no brackets, so that its port cannot be told "
        f"apart. Write {meant}."
    )
