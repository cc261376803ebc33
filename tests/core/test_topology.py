import numpy as np
import pytest

from dataservice.core.errors import WorldSizeError
from dataservice.core.topology import Topology

TOPOLOGY = Topology(world_size=24, ranks_per_replica=6, pipeline_stages=3)


def test_ranks_lie_as_in_a_mesh_of_replicas_stages_and_tensor_ranks():
    mesh = np.arange(24).reshape(TOPOLOGY.replicas, 3, TOPOLOGY.tensor_ranks)
    for (replica, stage, tensor_rank), rank in np.ndenumerate(mesh):
        assert TOPOLOGY.replica_of(int(rank)) == replica
        assert TOPOLOGY.stage_of(int(rank)) == stage
        assert TOPOLOGY.tensor_rank_of(int(rank)) == tensor_rank


def test_a_rank_that_does_not_exist_has_no_stage():
    for place in (TOPOLOGY.replica_of, TOPOLOGY.stage_of, TOPOLOGY.tensor_rank_of):
        with pytest.raises(WorldSizeError, match=r"rank 24 is outside 0\.\.23"):
            place(24)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"world_size": 0}, "world size is 0"),
        ({"world_size": 6, "ranks_per_replica": 4}, "6 is not a multiple of 4"),
        (
            {"world_size": 6, "ranks_per_replica": 3, "pipeline_stages": 2},
            "3 ranks of a replica cannot be cut into 2 pipeline stages",
        ),
        ({"world_size": 6, "ranks_per_replica": 0}, "ranks_per_replica is 0; it must be at least"),
        ({"world_size": 6, "virtual_stages": -1}, "virtual_stages is -1"),
        ({"world_size": 6, "replicas_per_node": 0}, "replicas_per_node is 0"),
        ({"world_size": 6, "encoder_stage": "last"}, "'last'; it is one of first, spread, own,"),
        ({"world_size": 6, "replicas_meet": "never"}, "'never'; it is one of wave, step"),
    ],
)
def test_what_is_no_topology_is_refused(numbers, message):
    with pytest.raises(WorldSizeError, match=message):
        Topology(**numbers)
