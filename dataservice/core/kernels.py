"""Kernels of numba outside the planner: the types of their arguments are stated, so that none is
compiled for others while a step or a sample waits.

They are compiled, or read from numba's cache on disk, when one is first called, or all at once by
whoever must not wait then: a service as it starts, and decoders before the first is forked. Most
commands and processes import many and call none.
"""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_stated: "list[_Stated]" = []


def kernel(*signatures: tuple[Any, ...]) -> Callable[[F], F]:
    """Compiled for each of these tuples of types of arguments. Runs without the GIL."""

    def stated(function: F) -> F:
        _stated.append(_Stated(function, signatures))
        return cast(F, _stated[-1])

    return stated


def load_kernels() -> None:
    """Compile or read all that were imported so far."""
    for each in _stated:
        _ = each.compiled


class _Stated:
    def __init__(self, function: Callable[..., Any], signatures: tuple[Any, ...]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._signatures = signatures

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        from numba import njit

        made = njit([*self._signatures], cache=True, nogil=True)(self._function)
        return cast(Callable[..., Any], made)

    def __call__(self, *given: Any) -> Any:
        return self.compiled(*given)


def read_only(number: Any, axes: int = 1) -> Any:
    """The type of an array of such numbers end to end that may be read-only, as what C libraries
    and mapped files lend out is."""
    from numba import types

    return types.Array(number, axes, "C", readonly=True)
