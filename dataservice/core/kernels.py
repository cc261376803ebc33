"""Kernels of numba outside the planner: the types of their arguments are stated, so that none is
compiled for others while a step or a sample waits.

They are compiled, or read from numba's cache on disk, when one is first called, or all at once by
whoever must not wait then: a service as it starts, and decoders before the first is forked. Most
commands and processes import many and call none, and do not load numba, which takes a quarter of a
second. Therefore types are stated in numpy's terms:

    @kernel((read_only(np.uint8), array(np.int64, 2), np.int64))     bytes, a matrix, a number
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
Number = type[np.generic]
_stated: "list[_Stated]" = []
_helpers: list[tuple[Callable[..., Any], str]] = []  # that numba does not know yet, and "inline"
_telling = Lock()


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array of such numbers of so many axes; end to end, unless it is `spaced`."""

    number: Number
    axes: int
    spaced: bool = False
    read_only: bool = False


Argument = Number | ArrayType | tuple["Number | ArrayType", ...]
"""The type of an argument; a tuple's is a tuple of them."""


def array(number: Number, axes: int = 1, *, spaced: bool = False) -> ArrayType:
    """An array that may be written; `spaced` where there may be room between its numbers."""
    return ArrayType(number, axes, spaced=spaced)


def read_only(number: Number, axes: int = 1) -> ArrayType:
    """An array end to end that may be read-only, as what C libraries and mapped files lend out
    is."""
    return ArrayType(number, axes, read_only=True)


def kernel(*signatures: tuple[Argument, ...]) -> Callable[[F], F]:
    """Compiled for each of these tuples of types of arguments. Runs without the GIL."""

    def stated(function: F) -> F:
        _stated.append(_Stated(function, signatures))
        return cast(F, _stated[-1])

    return stated


def helper(function: F) -> F:
    """A function that kernels call, compiled with each of them."""
    _helpers.append((function, "never"))
    return function


def inlined(function: F) -> F:
    """The same, written out where kernels call it."""
    _helpers.append((function, "always"))
    return function


def load_kernels() -> None:
    """Compile or read all that were imported so far."""
    for each in _stated:
        _ = each.compiled


class _Stated:
    def __init__(
        self, function: Callable[..., Any], signatures: tuple[tuple[Argument, ...], ...]
    ) -> None:
        update_wrapper(self, function)
        self._function = function
        self._signatures = signatures

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        from numba import njit

        _tell_helpers()
        signatures = [tuple(map(_numba_type, each)) for each in self._signatures]
        made = njit(signatures, cache=True, nogil=True)(self._function)
        return cast(Callable[..., Any], made)

    def __call__(self, *given: Any) -> Any:
        return self.compiled(*given)


def _tell_helpers() -> None:
    """Have numba know all helpers that were imported so far."""
    from numba.extending import register_jitable

    with _telling:
        while _helpers:
            function, inline = _helpers.pop()
            register_jitable(inline=inline)(function)


def _numba_type(of: Argument) -> Any:
    from numba import from_dtype, types

    if isinstance(of, tuple):
        return types.Tuple([_numba_type(each) for each in of])  # type: ignore[no-untyped-call]
    if isinstance(of, ArrayType):
        number: types.Type = _numba_type(of.number)
        return types.Array(number, of.axes, "A" if of.spaced else "C", readonly=of.read_only)
    return from_dtype(np.dtype(of))
