"""Addresses in what people write, whose mistakes are told as those of a spec are."""

import dataservice_proto.address as peers
from dataservice_proto.address import EVERY_HOST, bare_host, is_loopback, join_address

from dataservice.core.errors import SpecError

__all__ = ["EVERY_HOST", "bare_host", "is_loopback", "join_address", "split_address"]


def split_address(address: str) -> tuple[str, str]:
    """(host without brackets, text behind the last colon). Raises SpecError where there is no
    colon, or an IPv6 host without brackets."""
    try:
        return peers.split_address(address)
    except ValueError as error:
        raise SpecError(str(error)) from None
