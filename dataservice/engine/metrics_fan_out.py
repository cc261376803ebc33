"""Every listener is told each event; whichever fails, the others are told and training goes on."""

import logging
from collections.abc import Callable
from typing import Any, cast

from dataservice.core.ports import Metrics

log = logging.getLogger(__name__)


def fan_out(*listeners: Metrics) -> Metrics:
    """Metrics that tells each event to all listeners, in this order. What one raises is logged
    with its traceback and goes no further."""
    return cast(Metrics, _FanOut(listeners))


class _FanOut:
    def __init__(self, listeners: tuple[Metrics, ...]) -> None:
        self._listeners = listeners

    def __getattr__(self, event: str) -> Callable[..., None]:
        takers = [getattr(listener, event) for listener in self._listeners]

        def tell(*args: Any, **values: Any) -> None:
            for take in takers:
                try:
                    take(*args, **values)
                except Exception:
                    log.exception("the event %s could not be shown; training goes on", event)

        setattr(self, event, tell)
        return tell
