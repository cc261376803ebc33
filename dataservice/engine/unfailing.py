"""Whoever watches may fail; training goes on."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from dataservice.core.ports import Metrics

log = logging.getLogger(__name__)


def unfailing(metrics: Metrics) -> Metrics:
    """The same, but what an event raises is logged with its traceback and goes no further."""
    return cast(Metrics, _Unfailing(metrics))


class _Unfailing:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __getattr__(self, name: str) -> Callable[..., None]:
        tell = getattr(self._metrics, name)

        @wraps(tell)
        def told(*args: Any, **values: Any) -> None:
            try:
                tell(*args, **values)
            except Exception:
                log.exception("the event %s could not be shown; training goes on", name)

        setattr(self, name, told)
        return told
