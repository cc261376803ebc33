"""How every kernel of this room is compiled.

Kernels are cached on disk under a digest of their sources; see `dataservice/__init__.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}


def kernel(function: F) -> F:
    """Compile at the first call, or load from numba's cache on disk; runs without the GIL.

    Divisions are numpy's: kernels guard their divisors, and a check of each would cost time.
    """
    return cast(F, njit(**_OPTIONS)(function))


def leaf(function: F) -> F:
    """As `kernel`, for what other kernels call for each sample or group: it makes no array, returns
    none, and calls only others such.

    Arrays that a kernel hands on are counted as in use and as free again, at the price of a dozen
    operations each, where the work of a call is often less. A leaf only borrows those of its
    caller, so nothing is counted; numba refuses one that would have to count.
    """
    return cast(F, njit(**_OPTIONS | {"_nrt": False})(function))
