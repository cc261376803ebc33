"""How every kernel of this room is compiled.

Kernels are cached on disk under a digest of all planning sources; see `dataservice/__init__.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile at the first call, or load from numba's cache on disk; runs without the GIL.

    Divisions are numpy's: kernels guard their divisors, and a check of each would cost time.
    """
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(function))
