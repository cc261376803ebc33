"""The trainer's ranks, seen as replicas on nodes."""

from dataclasses import dataclass

from dataservice.core.errors import WorldSizeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """`world_size` ranks in replicas of `ranks_per_replica` (tensor × pipeline parallel), each
    replica cut into `pipeline_stages`.

    Ranks of one replica are neighbours: replica = rank // ranks_per_replica.
    """

    world_size: int
    ranks_per_replica: int = 1
    pipeline_stages: int = 1
    replicas_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise WorldSizeError(
                f"world size is {self.world_size}; it must be at least 1. Pass the number of "
                "trainer ranks, as torchrun sets it in WORLD_SIZE."
            )
        if self.world_size % self.ranks_per_replica:
            raise WorldSizeError(
                f"world size {self.world_size} is not a multiple of {self.ranks_per_replica}, "
                "the ranks of one replica (tensor × pipeline parallel in the job's topology). "
                "Start a multiple, or change the job's topology."
            )

    @property
    def replicas(self) -> int:
        """N, the number of model replicas."""
        return self.world_size // self.ranks_per_replica

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        if not 0 <= rank < self.world_size:
            raise WorldSizeError(
                f"rank {rank} is outside 0..{self.world_size - 1}; the world size is "
                f"{self.world_size}. Pass the rank that torchrun sets in RANK."
            )
        return rank // self.ranks_per_replica
