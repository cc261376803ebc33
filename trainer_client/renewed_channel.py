"""The coordinator's channel, which is opened anew under the stubs that call along it.

gRPC reads certificates when a channel is made and never again. Training may outlive them, so a
channel along which the service is not reached is made once more, from the files as they are then.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import grpc

from trainer_client.errors import BadArgument


class RenewedChannel:
    """A channel of which each call goes along the newest. May be used by many threads.

    To renew it is to close the one before: its calls end, and one that begins in that very moment
    raises the ValueError of a closed channel.
    """

    def __init__(self, open_channel: Callable[[], grpc.Channel]) -> None:
        """Raises what opening raises."""
        self._open_channel = open_channel
        self._newest = open_channel()
        self._lock = threading.RLock()  # the collector may close in a thread that holds it
        self._closed = False

    @property
    def channel(self) -> grpc.Channel:
        """It, for stubs: it has of a channel what they need."""
        return cast(grpc.Channel, self)

    def renew(self) -> None:
        """Open another, unless it was closed. Where none can be opened, the one before stays."""
        before = None
        with self._lock, suppress(BadArgument):
            if not self._closed:
                before, self._newest = self._newest, self._open_channel()
        if before is not None:
            before.close()

    def close(self) -> None:
        """End every call, and open no other."""
        with self._lock:
            self._closed = True
        self._newest.close()

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """As grpc.Channel."""
        return self._along(lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """As grpc.Channel."""
        return self._along(lambda channel: channel.unary_stream(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """As grpc.Channel."""
        return self._along(lambda channel: channel.stream_stream(*method, **options))

    def _along(self, make: Callable[[grpc.Channel], Callable[..., Any]]) -> Callable[..., Any]:
        """What `make` gives of the newest channel, made once of each."""
        made: tuple[grpc.Channel, Callable[..., Any]] | None = None

        def call(*given: Any, **how: Any) -> Any:
            nonlocal made
            newest, along = self._newest, made
            if along is None or along[0] is not newest:
                made = along = newest, make(newest)
            return along[1](*given, **how)

        return call
