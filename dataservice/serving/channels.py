"""gRPC options shared by both ends."""

from dataclasses import dataclass

from dataservice.core.descriptor_limit import UNLIMITED, descriptor_limit

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keepalive:
    """Pings that detect a peer which vanished without closing its connection (power, cable,
    firewall). It is noticed after `interval_s + timeout_s` at most."""

    interval_s: float = 10.0
    timeout_s: float = 10.0

    def options(self) -> Options:
        """The options of gRPC, the same at both ends."""
        return [
            ("grpc.keepalive_time_ms", round(self.interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.timeout_s * 1000)),
            # Newer releases of gRPC use this timeout, by default a minute, and not the one above.
            ("grpc.http2.ping_timeout_ms", round(self.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


DEFAULT_KEEPALIVE = Keepalive()

# Twice the largest world size: a rank that reconnects may still have its old connection open.
MOST_CONNECTIONS = 131_072
# Connections' share of the open files that a process may have; workers, state and logs need some.
SHARE_OF_FILES = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Limits on new connections and calls. A connection that does not complete its handshake within
    `handshake_s` is closed; gRPC's own clients give up after the same time. At most `connections`
    are open at once, by default the number that the process's limit of open files allows. A
    connection above it is closed immediately, and a rank that is turned away tries again.

    All ranks of a job call at the same moment. So `calls` may wait for the event loop, each for
    `call_s`: gRPC's own limits, 1,000 calls and 30 s, cancel those beyond."""

    handshake_s: float = 20.0
    connections: int | None = None
    calls: int = 65_536
    call_s: float = 300.0

    def options(self) -> Options:
        """The limits as gRPC's options."""
        return [
            ("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000)),
            ("grpc.max_allowed_incoming_connections", self.connections or _connections_by_files()),
            # Between the two, some calls are cancelled by chance; beyond the second all are.
            ("grpc.server.max_pending_requests", self.calls),
            ("grpc.server.max_pending_requests_hard_limit", 2 * self.calls),
            ("grpc.server_max_unrequested_time_in_server", round(self.call_s)),
        ]


DEFAULT_ADMISSION = Admission()


def _connections_by_files() -> int:
    files = descriptor_limit()
    if files == UNLIMITED:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(1, int(SHARE_OF_FILES * files)))


def server_options(
    message_limit_bytes: int, keepalive: Keepalive, admission: Admission = DEFAULT_ADMISSION
) -> Options:
    """For a server: bounded messages and connections, pings both ways, and one server a port."""
    half_ms = round(keepalive.interval_s * 500)
    return [
        *keepalive.options(),
        *admission.options(),
        # Clients ping at the interval of this service. By default gRPC disconnects them for it.
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
        # The caller decides what to try again.
        ("grpc.enable_retries", 0),
        # A new service at the same address does not inherit the reconnect delay of the old one.
        ("grpc.use_local_subchannel_pool", 1),
        # Services of one cluster talk directly, whatever http_proxy says.
        ("grpc.enable_http_proxy", 0),
    ]
