"""How the kernels of this room are compiled."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(*signatures: tuple[Any, ...]) -> Callable[[Kernel], Kernel]:
    """Compiled when its module is loaded, or read from numba's cache on disk: decoders are forked
    from a process that has loaded it, and never compile. Returns nothing, runs without the GIL."""
    every = [types.void(*signature) for signature in signatures]

    def compiled(function: Kernel) -> Kernel:
        return cast(Kernel, njit(every, cache=True, nogil=True)(function))

    return compiled


def given(dtype: Any, axes: int) -> Any:
    """The type of an array that may be read-only, as what C libraries lend out is."""
    return types.Array(dtype, axes, "C", readonly=True)
