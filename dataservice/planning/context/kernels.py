"""How the kernels of context planning are compiled."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile at the first call, or load from numba's cache on disk; runs without the GIL."""
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(function))
