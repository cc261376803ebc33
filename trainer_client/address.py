"""The address that a trainer is given, whose mistakes are told as those of an argument are."""

import dataservice_proto.address as peers

from trainer_client.errors import BadArgument


def split_address(address: str) -> tuple[str, str]:
    """(host without brackets, port). Raises BadArgument where the address is not host:port, or an
    IPv6 host has no brackets."""
    try:
        host, port = peers.split_address(address)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    if not host or not port.isdecimal():
        raise BadArgument(f"address {address!r} is not host:port, such as 10.0.0.5:50051.")
    return host, port


def is_loopback(address: str) -> bool:
    """Whether data sent to this host:port stays on this machine."""
    return peers.is_loopback(split_address(address)[0])
