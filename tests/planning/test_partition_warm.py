import numpy as np

from dataservice.planning.balance_conv import _improve
from dataservice.planning.kernel_sort import group_stable, radix_argsort
from dataservice.planning.kernels import warm_kernels
from dataservice.planning.nodewise import _swap_nodes
from dataservice.planning.packing_bfd import _best_fit
from dataservice.planning.packing_isf import pack_isf
from dataservice.planning.partition import partition
from dataservice.planning.partition_exact import _branch_and_bound
from dataservice.planning.partition_kk import _balanced_differencing, _karmarkar_karp
from dataservice.planning.partition_multifit import first_fit_decreasing
from dataservice.planning.partition_refine import refine_in_place

KERNELS = (
    _balanced_differencing,
    _best_fit,
    _branch_and_bound,
    _improve,
    _karmarkar_karp,
    radix_argsort,
    _swap_nodes,
    first_fit_decreasing,
    group_stable,
    refine_in_place,
)


def test_warming_compiles_every_kernel_and_no_step_compiles_another():
    warm_kernels()
    compiled = [len(kernel.signatures) for kernel in KERNELS]
    assert min(compiled) >= 1
    lengths = np.arange(1, 400, dtype=np.int32)
    lengths.setflags(write=False)
    partition(lengths, np.int32(7), capacity=30_000, equal_count=True)
    pack_isf(lengths, lengths % 3, max_text=np.int32(900), max_vision=np.int64(9))
    assert [len(kernel.signatures) for kernel in KERNELS] == compiled
