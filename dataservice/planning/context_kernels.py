"""How the kernels of context planning are compiled.

`kernel` is called from Python; `inner` only from kernels, so no Python entry is compiled for it.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile at the first call, or load from numba's cache on disk."""
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(function))


def inner(function: F) -> F:
    """As `kernel`, without an entry from Python; numba's stub does not know how to ask for it."""
    compiled = njit(  # type: ignore[call-overload]
        cache=True,
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )
    return cast(F, compiled(function))
