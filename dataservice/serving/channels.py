"""gRPC options shared by both ends."""

from dataclasses import dataclass

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keepalive:
    """A peer that vanishes without closing its connection (power, cable, firewall) is noticed
    by a ping that stays unanswered: after `interval_s + timeout_s` at most."""

    interval_s: float = 10.0
    timeout_s: float = 10.0

    def options(self) -> Options:
        """As gRPC takes them, at either end."""
        return [
            ("grpc.keepalive_time_ms", round(self.interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.timeout_s * 1000)),
            # Newer gRPC waits for this one, a minute if left alone, and not for the other.
            ("grpc.http2.ping_timeout_ms", round(self.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


DEFAULT_KEEPALIVE = Keepalive()


def server_options(message_limit_bytes: int, keepalive: Keepalive) -> Options:
    """For a server: bounded messages, pings both ways, and one server a port."""
    half_ms = round(keepalive.interval_s * 500)
    return [
        *keepalive.options(),
        # Clients ping as often as this service does; without these they are cut off for it.
        ("grpc.http2.min_ping_interval_without_data_ms", half_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", half_ms),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", message_limit_bytes),
        # Linux would let a second service share the port and take half of the connections.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(message_limit_bytes: int, keepalive: Keepalive = DEFAULT_KEEPALIVE) -> Options:
    """For a client of this service."""
    return [
        *keepalive.options(),
        ("grpc.max_receive_message_length", message_limit_bytes),
        # Whoever calls decides what to try again.
        ("grpc.enable_retries", 0),
        # A successor at the same address does not inherit the reconnect delay of the dead.
        ("grpc.use_local_subchannel_pool", 1),
        # Services of one cluster talk directly, whatever http_proxy says.
        ("grpc.enable_http_proxy", 0),
    ]
