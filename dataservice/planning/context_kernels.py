"""How the kernels of context planning are compiled.

`kernel` is called from Python; `inner` only from kernels, so no Python entry is compiled for it,
which halves the time the family takes to compile.
"""

from numba import njit

kernel = njit(cache=True, nogil=True, error_model="numpy")
inner = njit(
    cache=True,
    nogil=True,
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)
