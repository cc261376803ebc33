"""What some work costs, counted: no clock is asked."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType


def calls_of(work: Callable[[], object]) -> int:
    """The calls of Python functions that some work makes."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event == "call"

    gc.collect()
    gc.disable()  # what others left would be called back meanwhile
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return made


@contextmanager
def searches() -> Iterator[dict[int, list[object]]]:
    """What is taken out of the lists and deques of waiters and of futures' callbacks, each of which
    is a search, by the list; and the list each time, so that its id is not another's."""
    found: dict[int, list[object]] = {}

    def note(_frame: object, event: str, call: object) -> None:
        called = call.__name__ if isinstance(call, BuiltinFunctionType) else ""
        if event == "c_call" and called in ("remove", "remove_done_callback"):
            found.setdefault(id(call.__self__), []).append(call.__self__)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
