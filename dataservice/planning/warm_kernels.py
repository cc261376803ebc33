"""Compile every packing, partition and exchange kernel before the first step needs it.

Compiled code is cached on disk under a digest of all planning sources, so an edit of any of them
compiles all kernels anew and no stale helper is ever used.
"""

import numpy as np

from dataservice.core.cost import ContextCost
from dataservice.planning.context.degrees_dp import degrees_by_dp
from dataservice.planning.context.degrees_threshold import degrees_by_threshold
from dataservice.planning.context.groups import plan_context_waves
from dataservice.planning.context.many import find_many_waves
from dataservice.planning.layout.bubble_inputs import BackboneTimes, EncoderTimes, KernelTimes
from dataservice.planning.layout.bubbles import schedule_bubbles
from dataservice.planning.loads.partition import ALGORITHMS, partition
from dataservice.planning.packs.bfd import pack_bfd
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.wave_assignment import assign_packs_to_waves
from dataservice.planning.pipeline_parallel.microbatch_order import order_microbatches
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b
from dataservice.planning.standalone.conv_loads import balance_conv
from dataservice.planning.standalone.node_balance import balance_nodewise
from dataservice.planning.standalone.node_exchange import compose_exchange
from dataservice.planning.standalone.node_rearrange import rearrange_nodewise
from dataservice.planning.standalone.padded_loads import balance_padded


def warm_kernels() -> None:
    """Plan a few made-up lengths by every algorithm. Seconds at first, then milliseconds."""
    lengths = (np.arange(97, dtype=np.int64) * 7919) % 89 + 1
    small = np.array([50, 33, 33, 33, 21, 21, 11])  # no split meets the bound: all is tried
    for algorithm in ALGORITHMS:
        for equal_count in (False, True):
            partition(lengths, 8, algorithm=algorithm, equal_count=equal_count)
            partition(small, 3, algorithm=algorithm, equal_count=equal_count)
            partition(
                lengths,
                8,
                algorithm=algorithm,
                equal_count=equal_count,
                sizes=lengths,
                capacity=600,
            )
    balance_padded(lengths, 8, beta=0.1)
    balance_conv(lengths, 8, alpha=1.0, lam=0.01)
    tiles = lengths % 3 + 1
    pack_isf(lengths, tiles, max_text=400, max_vision=9, min_text=380)
    pack_bfd(lengths, tiles, max_text=400, max_vision=9)
    assign_packs_to_waves(np.stack((lengths, lengths[::-1]), axis=1), replicas=8)
    home = np.arange(97, dtype=np.int64) % 8
    balance_nodewise(lengths, home, lengths, 8, 4, tolerance=0.0)
    volume = (np.arange(64, dtype=np.int64) * 7919 % 83).reshape(8, 8)
    rearrange_nodewise(volume, 4, method="search")
    compose_exchange(home, home[::-1], lengths)
    times = np.linspace(1.0, 2.0, 12 * 3).reshape(12, 3)
    for count in (6, 12):  # every order, and the search
        order_microbatches(times[:count], times[:count], virtual_stages=1)
    order_microbatches(times, times, algorithm="mmscale")
    simulate_1f1b(times, times)
    layers = KernelTimes(seconds=np.ones((4, 2)), communicates=np.array([False, True]))
    encoder = EncoderTimes(name="any", forward={1: layers}, backward={1: layers})
    backbone = BackboneTimes(
        forward=layers, backward=layers, microbatches=4, pipeline_parallel=2, virtual_stages=2
    )
    schedule_bubbles(backbone, [encoder])
    table = np.linspace(8.0, 1.0, 24).reshape(4, 6)
    degrees_by_threshold(table, ranks=6)
    degrees_by_dp(table, ranks=6)
    cost = ContextCost.flexsp_7b()
    # Few enough to try all; and more, where a ring across nodes is the slowest and a cut is mended.
    # And what fills groups by time alone finds no room; and groups of whole nodes are tried.
    crossing = [1313, 1137, 1441, 1611, 2240, 2701, 496, 2821, 1734, 1266]
    for few in (crossing[:5], crossing):
        plan_context_waves(few, ranks=6, memory_tokens=4096, cost=cost, ranks_per_node=3)
    find_many_waves([500, 400, 300, 300, 300], ranks=1, memory_tokens=900, cost=cost)
    find_many_waves([1500] * 8, ranks=6, memory_tokens=1000, cost=cost, ranks_per_node=3)
