"""How the kernels of this room are compiled."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(*signatures: tuple[Any, ...]) -> Callable[[Kernel], Kernel]:
    """Compiled for these types of arguments when its module is loaded, or read from numba's cache
    on disk: the first step does not wait for it. Runs without the GIL."""

    def compiled(function: Kernel) -> Kernel:
        return cast(Kernel, njit(list(signatures), cache=True, nogil=True)(function))

    return compiled


def read_only(number: Any) -> Any:
    """The type of a column of such numbers end to end, which may be of a mapped file."""
    return types.Array(number, 1, "C", readonly=True)
