"""Functions that only the processes load that a worker starts.

A worker itself decodes and measures nothing. The libraries that do take a second of a processor to
load and 150 MB to hold, so it names what its processes run, and each loads that where it unpickles
it: before it forks its first child.
"""

import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any


class LoadedThere:
    """functools.partial of a function that is named, as "package.module:function". A copy that was
    pickled is that partial."""

    def __init__(self, name: str, *args: Any, **given: Any) -> None:
        self._said = name, args, given

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Load the module here after all."""
        return _loaded(*self._said)(*args, **more)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _loaded, self._said


def _loaded(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Callable[..., Any]:
    return partial(pkgutil.resolve_name(name), *args, **given)
