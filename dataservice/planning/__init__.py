"""The calm wing: pure functions from lengths and costs to plans. The names that others import.

A name's module is loaded when the name is first asked for: options and costs are nouns that
validate a job file, and load no kernel.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataservice.core.cost import ContextCost as ContextCost
    from dataservice.core.cost import PhaseCost as PhaseCost
    from dataservice.core.errors import PlanningError as PlanningError
    from dataservice.core.plan import StepPlan as StepPlan
    from dataservice.core.plan_options import CostModel as CostModel
    from dataservice.core.plan_options import IsfLimits as IsfLimits
    from dataservice.core.plan_options import PlanOptions as PlanOptions
    from dataservice.core.sample import LengthTable as LengthTable
    from dataservice.core.topology import Topology as Topology
    from dataservice.planning.compose import StepSamples as StepSamples
    from dataservice.planning.compose import compose_step as compose_step
    from dataservice.planning.context.groups import ContextGroup as ContextGroup
    from dataservice.planning.context.groups import ContextPlan as ContextPlan
    from dataservice.planning.context.groups import ContextWaves as ContextWaves
    from dataservice.planning.context.groups import plan_context_groups as plan_context_groups
    from dataservice.planning.context.groups import plan_context_waves as plan_context_waves
    from dataservice.planning.context.groups import plan_static_context as plan_static_context
    from dataservice.planning.layout.actions import Actions as Actions
    from dataservice.planning.layout.actions import format_actions as format_actions
    from dataservice.planning.layout.actions import parse_actions as parse_actions
    from dataservice.planning.layout.allocate import Allocation as Allocation
    from dataservice.planning.layout.allocate import ModuleAllocation as ModuleAllocation
    from dataservice.planning.layout.allocate import allocate_modules as allocate_modules
    from dataservice.planning.layout.bubble_inputs import BackboneTimes as BackboneTimes
    from dataservice.planning.layout.bubble_inputs import EncoderPlan as EncoderPlan
    from dataservice.planning.layout.bubble_inputs import EncoderTimes as EncoderTimes
    from dataservice.planning.layout.bubble_inputs import KernelTimes as KernelTimes
    from dataservice.planning.layout.bubbles import BubbleSchedule as BubbleSchedule
    from dataservice.planning.layout.bubbles import schedule_bubbles as schedule_bubbles
    from dataservice.planning.layout.module_load import ModuleLoad as ModuleLoad
    from dataservice.planning.layout.recompute import RecomputeChoice as RecomputeChoice
    from dataservice.planning.layout.recompute import choose_recompute as choose_recompute
    from dataservice.planning.layout.recompute_measure import (
        MeasuredRecompute as MeasuredRecompute,
    )
    from dataservice.planning.layout.recompute_measure import RecomputeTrial as RecomputeTrial
    from dataservice.planning.layout.recompute_measure import (
        measure_recompute as measure_recompute,
    )
    from dataservice.planning.layout.stages import StagePartition as StagePartition
    from dataservice.planning.layout.stages import StageSplit as StageSplit
    from dataservice.planning.layout.stages import partition_stages as partition_stages
    from dataservice.planning.layout.stages import time_stages as time_stages
    from dataservice.planning.loads.partition import partition as partition
    from dataservice.planning.loads.problem import Partition as Partition
    from dataservice.planning.loads.problem import dist_ratio as dist_ratio
    from dataservice.planning.loads.problem import pad_ratio as pad_ratio
    from dataservice.planning.packs.bfd import pack_bfd as pack_bfd
    from dataservice.planning.packs.isf import pack_isf as pack_isf
    from dataservice.planning.packs.limits import isf_limits as isf_limits
    from dataservice.planning.packs.packing import Packing as Packing
    from dataservice.planning.packs.wave_assignment import (
        assign_packs_to_waves as assign_packs_to_waves,
    )
    from dataservice.planning.pipeline_parallel.microbatch_order import (
        order_microbatches as order_microbatches,
    )
    from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b as simulate_1f1b
    from dataservice.planning.standalone.conv_loads import balance_conv as balance_conv
    from dataservice.planning.standalone.node_balance import balance_nodewise as balance_nodewise
    from dataservice.planning.standalone.node_exchange import Exchange as Exchange
    from dataservice.planning.standalone.node_exchange import compose_exchange as compose_exchange
    from dataservice.planning.standalone.node_rearrange import (
        rearrange_nodewise as rearrange_nodewise,
    )
    from dataservice.planning.standalone.padded_loads import balance_padded as balance_padded
    from dataservice.planning.standalone.quadratic_loads import (
        balance_quadratic as balance_quadratic,
    )

MODULES = {
    "dataservice.core.errors": ("PlanningError",),
    "dataservice.core.plan": ("StepPlan",),
    "dataservice.core.sample": ("LengthTable",),
    "dataservice.core.topology": ("Topology",),
    "dataservice.planning.compose": ("StepSamples", "compose_step"),
    "dataservice.planning.context.groups": (
        "ContextGroup",
        "ContextPlan",
        "ContextWaves",
        "plan_context_groups",
        "plan_context_waves",
        "plan_static_context",
    ),
    "dataservice.core.cost": ("ContextCost", "PhaseCost"),
    "dataservice.planning.layout.recompute": ("RecomputeChoice", "choose_recompute"),
    "dataservice.planning.layout.recompute_measure": (
        "MeasuredRecompute",
        "RecomputeTrial",
        "measure_recompute",
    ),
    "dataservice.planning.layout.stages": (
        "StagePartition",
        "StageSplit",
        "partition_stages",
        "time_stages",
    ),
    "dataservice.planning.standalone.conv_loads": ("balance_conv",),
    "dataservice.planning.standalone.padded_loads": ("balance_padded",),
    "dataservice.planning.layout.allocate": ("Allocation", "ModuleAllocation", "allocate_modules"),
    "dataservice.planning.layout.module_load": ("ModuleLoad",),
    "dataservice.planning.layout.actions": ("Actions", "format_actions", "parse_actions"),
    "dataservice.planning.layout.bubble_inputs": (
        "BackboneTimes",
        "EncoderPlan",
        "EncoderTimes",
        "KernelTimes",
    ),
    "dataservice.planning.layout.bubbles": ("BubbleSchedule", "schedule_bubbles"),
    "dataservice.planning.loads.partition": ("partition",),
    "dataservice.planning.standalone.quadratic_loads": ("balance_quadratic",),
    "dataservice.planning.loads.problem": ("Partition", "dist_ratio", "pad_ratio"),
    "dataservice.planning.standalone.node_balance": ("balance_nodewise",),
    "dataservice.planning.standalone.node_exchange": ("Exchange", "compose_exchange"),
    "dataservice.planning.standalone.node_rearrange": ("rearrange_nodewise",),
    "dataservice.core.plan_options": ("CostModel", "IsfLimits", "PlanOptions"),
    "dataservice.planning.packs.bfd": ("pack_bfd",),
    "dataservice.planning.packs.isf": ("pack_isf",),
    "dataservice.planning.packs.limits": ("isf_limits",),
    "dataservice.planning.packs.packing": ("Packing",),
    "dataservice.planning.packs.wave_assignment": ("assign_packs_to_waves",),
    "dataservice.planning.pipeline_parallel.microbatch_order": ("order_microbatches",),
    "dataservice.planning.pipeline_parallel.simulator": ("simulate_1f1b",),
}
"""Which module has which of the exported names."""
MODULE_OF = {name: module for module, names in MODULES.items() for name in names}

__all__ = sorted(MODULE_OF)


if not TYPE_CHECKING:  # a checker reads the imports above, and refuses any other name

    def __getattr__(name: str) -> object:
        if name not in MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(MODULE_OF[name]), name)
