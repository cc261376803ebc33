"""A mix of nodes: each kind is laid out by itself."""

from dataclasses import replace

import pytest

from benchmarks import workloads
from dataservice.core.errors import PlanningError
from dataservice.planning.layout.search import LayoutTask, search_layout
from dataservice.planning.layout.search_groups import search_groups
from tests.planning.layout.small_models import MODEL, nodes

BATCHES = (workloads.step_samples(workloads.vlm_sft(64, 0)),)


def task(group):
    return LayoutTask(model=MODEL, group=group, batches=BATCHES)


@pytest.mark.long
def test_the_kind_of_nodes_with_the_shortest_step_comes_first_as_if_it_were_alone():
    one, two = nodes(80e9), nodes(80e9, count=2)
    told = []
    found = search_groups(task(one), (one, two), progress=lambda *now: told.append(now))
    assert [each.task.group for each in found] == [two, one]
    assert found[0].step_s == search_layout(task(two)).best.step_s < found[1].step_s
    assert {number for number, *_ in told} == {0, 1}


def test_a_kind_of_nodes_without_room_stands_last_with_the_reason():
    small, large = nodes(1e9), nodes(80e9)
    found = search_groups(task(small), (small, large))
    assert [each.task.group for each in found] == [large, small]
    assert found[1].layout is None
    assert "bytes a GPU" in found[1].refused


def test_where_none_has_room_each_says_why():
    groups = (nodes(1e9), replace(nodes(1e9), gpus_per_node=2))
    with pytest.raises(PlanningError, match=r"(?s)on no kind of nodes.*1 × 4 GPU: .*1 × 2 GPU: "):
        search_groups(task(groups[0]), groups)
