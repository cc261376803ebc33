"""A name without an algorithm neither runs nor is reported; names and tables say the same."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import get_args

import numpy as np
import pytest

from dataservice import planning
from dataservice.core import plan_options as options
from dataservice.core.cost import ContextCost
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.compose import compose_step
from dataservice.planning.context import units, wave
from dataservice.planning.loads import partition
from dataservice.planning.packs import limits
from dataservice.planning.pipeline_parallel import microbatch_order
from dataservice.planning.stages import assign, dispatch, group, order, pack
from dataservice.planning.standalone import node_rearrange
from tests.planning.step_samples import step_samples


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (options.Strategy, options.STRATEGIES),
        (options.Pack, pack.PACKS),
        (options.Pack, group.SEARCHES),
        (options.Context, group.CONTEXTS),
        (options.Assign, assign.ASSIGNMENTS),
        (options.Order, order.ORDERS),
        (options.Dispatch, dispatch.DISPATCHES),
        (options.Solver, wave.SOLVERS),
        (units.Degrees, units.POWER_OF_TWO),
        (partition.PartitionAlgorithm, partition.ALGORITHMS),
        (node_rearrange.RearrangeMethod, node_rearrange.METHODS),
        (limits.LimitMethod, limits.METHODS),
        (microbatch_order.OrderAlgorithm, microbatch_order.ALGORITHMS),
    ],
)
def test_each_name_that_type_checks_has_an_algorithm_and_no_other_has(
    names: object, table: Iterable[str]
) -> None:
    assert set(get_args(names)) == set(table)


@pytest.mark.parametrize("key", options.NAMES)
def test_options_refuse_a_name_without_an_algorithm(key):
    with pytest.raises(PlanningError, match=rf"plan\.{key} is 'magic'; choose one of \w+, \w+"):
        PlanOptions(memory_tokens=1024, **{key: "magic"})


@pytest.mark.parametrize("key", [key for key in options.NAMES if key != "strategy"])
def test_a_step_with_such_a_name_is_not_planned(key):
    """Options could be made around their check; the stages look the name up themselves."""
    made = PlanOptions(memory_tokens=2048, pack="joint")
    object.__setattr__(made, key, "magic")
    with pytest.raises(PlanningError, match=r"'magic'; choose one of"):
        compose_step(
            step_samples(40, 0, longest=1000),
            step=0,
            topology=Topology(world_size=4),
            options=made,
        )


def items_of_one_step() -> dispatch.EncoderItems:
    made = compose_step(
        step_samples(20, 0, longest=1000),
        step=0,
        topology=Topology(world_size=2),
        options=PlanOptions(memory_tokens=2048),
    )
    return dispatch.encoder_items(made, CostModel())


@pytest.mark.parametrize(
    "plan",
    [
        lambda name: dispatch.dispatch_items(
            items_of_one_step(), np.zeros(4), replicas=2, replicas_per_node=None, algorithm=name
        ),
        lambda name: order.order_waves((), algorithm=name, stages=1),
        lambda name: assign.assign_packs((), replicas=2, algorithm=name),
        lambda name: microbatch_order.order_microbatches(
            np.ones((2, 2)), np.ones((2, 2)), algorithm=name
        ),
        lambda name: partition.partition([1, 2], 2, algorithm=name),
        lambda name: node_rearrange.rearrange_nodewise(np.ones((2, 2)), 1, method=name),
        lambda name: limits.isf_limits([1], [1], method=name),
        lambda name: planning.plan_context_waves(
            [5], ranks=2, memory_tokens=9, cost=ContextCost.flexsp_7b(), solver=name
        ),
        lambda name: planning.plan_context_waves(
            [5], ranks=2, memory_tokens=9, cost=ContextCost.flexsp_7b(), degrees=name
        ),
    ],
)
def test_every_front_door_refuses_it_with_the_names_there_are(plan: Callable[[str], object]):
    with pytest.raises(PlanningError, match=r"is 'magic'; choose one of \w+, \w+"):
        plan("magic")


def test_options_and_costs_are_nouns_without_kernels():
    code = (
        "import sys, dataservice.core.plan_options, dataservice.core.cost\n"
        "from dataservice.planning import ContextCost, CostModel, PlanOptions\n"
        "print(sorted({'numba', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_names_exported_to_a_type_checker_are_those_at_run_time():
    checked = {
        (imported.module, name.name)
        for imported in ast.walk(ast.parse(inspect.getsource(planning)))
        if isinstance(imported, ast.ImportFrom)
        for name in imported.names
        if name.name == name.asname
    }
    assert checked == {(module, name) for name, module in planning.MODULE_OF.items()}
    for name in planning.__all__:
        assert getattr(planning, name).__name__ == name
    with pytest.raises(AttributeError, match="compose_stp"):
        planning.compose_stp  # noqa: B018
