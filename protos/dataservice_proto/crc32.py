"""CRC-32 of zlib, with which peers check a part's bytes.

Where the package `zlib-ng` is installed, the processor's own instructions compute it, in a fifth of
the time that zlib takes. The numbers are the same: either side may have it without the other.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache

# Numbers are polynomials over GF(2), the highest power in the lowest bit, modulo that of CRC-32.
_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23
_SIZES_KEPT = 1024


def fastest() -> Callable[..., int]:
    """The quickest that is installed."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib.crc32
    found: Callable[..., int] = zlib_ng.crc32
    return found


def fastest_combine() -> Callable[[int, int, int], int]:
    """The quickest that is installed."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return combine
    found: Callable[[int, int, int], int] = getattr(zlib_ng, "crc32_combine", combine)
    return found


def combine(first: int, second: int, second_bytes: int) -> int:
    """The first times x^(8 · `second_bytes`), plus the second: 4 µs in Python. From zlib's
    crc32_combine."""
    return _times(_power(second_bytes), first) ^ second


@lru_cache(_SIZES_KEPT)
def _power(size_bytes: int) -> int:
    """x^(8 · `size_bytes`)."""
    power, square = _ONE, _X8
    while size_bytes:
        if size_bytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        size_bytes >>= 1
    return power


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


crc32 = fastest()
"""`crc32(data, value=0)`, as `zlib.crc32`: of the bytes in `data`, behind those that gave `value`.
Does not hold the interpreter's lock while it reads."""

crc32_combine = fastest_combine()
"""`crc32_combine(first, second, second_bytes)`, as zlib's C function: of bytes whose CRC-32 is
`first` and, behind them, so many whose own is `second`."""
