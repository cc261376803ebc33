"""Refuses a loop that trains something else than the job says, where the loss does not show it.

Qwen-VL's models count time, height and width (M-RoPE): a loop that gives such a model
`position_ids`, which count tokens, trains another model. A job may weigh the loss of its samples: a
loop that reads `labels` without `loss_weights` trains them all alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trainer_client.errors import LossWeightsNotRead, MisuseError, PositionsNotRead
from trainer_client.shard import Microbatch, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """Of the microbatches that it `concerns`, a loop that reads `partial` must read `whole`.
    `refusal` gets the job, the rank and the step that was trained otherwise."""

    concerns: Callable[[Microbatch], bool]
    partial: str
    whole: str
    refusal: Callable[[str, int, int], MisuseError]


class ReadWatch:
    """Told of every shard and commit until the loop was seen to do its duty. For one thread."""

    def __init__(self, duty: Duty, *, job: str, rank: int) -> None:
        self._duty, self._job, self._rank = duty, job, rank
        self._reads: dict[int, list[set[str]]] = {}
        self._watching = True

    def hand(self, shard: Shard) -> None:
        """A shard goes to the loop."""
        if self._watching:
            concerned = filter(self._duty.concerns, shard.planned)
            self._reads[shard.step] = [mb.reads for mb in concerned]

    def trained(self, step: int) -> None:
        """The loop has trained `step`. Raises the duty's refusal where it read `partial`, and has
        never read `whole`."""
        if not self._watching:
            return
        steps = [handed for handed in self._reads if handed <= step]
        reads = [reads for handed in steps for reads in self._reads.pop(handed)]
        if any(self._duty.whole in names for names in reads):
            self._watching = False
            self._reads.clear()
        elif any(self._duty.partial in names for names in reads):
            raise self._duty.refusal(self._job, self._rank, step)


def _positions_refusal(job: str, rank: int, step: int) -> MisuseError:
    return PositionsNotRead(
        f"positions not read: the models of job {job!r} place images by time, height and width "
        f"(M-RoPE), and rank {rank} trained step {step} with mb.position_ids, which count tokens. "
        "Give the model mb.positions [3, local tokens]; or, for a model that counts tokens, set "
        "`positions: sequence` in the job file's pipeline."
    )


def _loss_weights_refusal(job: str, rank: int, step: int) -> MisuseError:
    return LossWeightsNotRead(
        f"loss weights not read: job {job!r} weighs the loss of its samples, and rank {rank} "
        f"trained step {step} with mb.labels alone, which trains them all alike. Multiply the loss "
        "of each token by mb.loss_weights, and divide by their sum over the labelled tokens of all "
        "ranks, as run_step of trainer_client.runtime does; or take loss_weight out of the job "
        "file."
    )


POSITIONS = Duty(
    concerns=lambda mb: mb.mrope is not None and mb.items is not None and bool(mb.items.grid.any()),
    partial="position_ids",
    whole="positions",
    refusal=_positions_refusal,
)
LOSS_WEIGHTS = Duty(
    concerns=lambda mb: mb.weights is not None and not mb.idle,
    partial="labels",
    whole="loss_weights",
    refusal=_loss_weights_refusal,
)
