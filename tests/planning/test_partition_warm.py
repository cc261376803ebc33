import numpy as np

from dataservice.planning.kernels.sort import group_stable, radix_argsort
from dataservice.planning.loads.conv import _improve
from dataservice.planning.loads.exact import _branch_and_bound
from dataservice.planning.loads.kk import _balanced_differencing, _karmarkar_karp
from dataservice.planning.loads.multifit import first_fit_decreasing
from dataservice.planning.loads.partition import partition
from dataservice.planning.loads.refine import refine_in_place
from dataservice.planning.nodes.rearrange import _swap_nodes
from dataservice.planning.packs.bfd import _best_fit
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.warm_kernels import warm_kernels

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
