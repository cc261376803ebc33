"""The calm wing: pure functions from lengths and costs to plans. The names others import."""

from dataservice.planning.context.groups import (
    ContextGroup,
    ContextPlan,
    ContextWaves,
    plan_context_groups,
    plan_context_waves,
    plan_static_context,
)
from dataservice.planning.cost import ContextCost, PhaseCost
from dataservice.planning.loads.conv import balance_conv
from dataservice.planning.loads.padded import balance_padded
from dataservice.planning.loads.partition import partition
from dataservice.planning.loads.problem import Partition
from dataservice.planning.loads.quadratic import balance_quadratic
from dataservice.planning.metrics import dist_ratio, pad_ratio
from dataservice.planning.nodes.balance import balance_nodewise
from dataservice.planning.nodes.exchange import Exchange, compose_exchange
from dataservice.planning.nodes.rearrange import rearrange_nodewise
from dataservice.planning.packs.bfd import pack_bfd
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.limits import IsfLimits, isf_limits
from dataservice.planning.packs.packing import Packing
from dataservice.planning.packs.waves import assign_packs_to_waves
from dataservice.planning.pipeline.order import order_microbatches
from dataservice.planning.pipeline.simulator import simulate_1f1b

__all__ = [
    "ContextCost",
    "ContextGroup",
    "ContextPlan",
    "ContextWaves",
    "Exchange",
    "IsfLimits",
    "Packing",
    "Partition",
    "PhaseCost",
    "assign_packs_to_waves",
    "balance_conv",
    "balance_nodewise",
    "balance_padded",
    "balance_quadratic",
    "compose_exchange",
    "dist_ratio",
    "isf_limits",
    "order_microbatches",
    "pack_bfd",
    "pack_isf",
    "pad_ratio",
    "partition",
    "plan_context_groups",
    "plan_context_waves",
    "plan_static_context",
    "rearrange_nodewise",
    "simulate_1f1b",
]
