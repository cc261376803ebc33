"""Refuses a loop that trains with other positions than the job's model has.

Qwen-VL's models count time, height and width (M-RoPE). A loop that gives such a model
`position_ids`, which count tokens, trains another model, and the loss does not show it.
"""

from trainer_client.errors import PositionsNotRead
from trainer_client.shard import Shard


class PositionWatch:
    """Told of every shard and commit until positions were read. For one thread."""

    def __init__(self, *, job: str, rank: int) -> None:
        self._job, self._rank = job, rank
        self._reads: dict[int, list[set[str]]] = {}
        self._watching = True

    def hand(self, shard: Shard) -> None:
        """A shard goes to the loop."""
        if self._watching:
            self._reads[shard.step] = [
                mb.reads
                for mb in shard.microbatches
                if mb.mrope is not None and mb.items is not None and mb.items.grid.any()
            ]

    def trained(self, step: int) -> None:
        """The loop has trained `step`. Raises PositionsNotRead where it used `position_ids` for
        tokens of images or clips, and has never read `positions`."""
        if not self._watching:
            return
        steps = [handed for handed in self._reads if handed <= step]
        reads = [reads for handed in steps for reads in self._reads.pop(handed)]
        if any("positions" in names for names in reads):
            self._watching = False
            self._reads.clear()
        elif any("position_ids" in names for names in reads):
            raise PositionsNotRead(
                f"positions not read: the models of job {self._job!r} place images by time, height "
                f"and width (M-RoPE), and rank {self._rank} trained step {step} with "
                "mb.position_ids, which count tokens. Give the model mb.positions [3, local "
                "tokens]; or, for a model that counts tokens, set `positions: sequence` in the job "
                "file's pipeline."
            )
