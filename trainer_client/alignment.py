"""Rows of a rank as a multiple of a number, where tensor parallelism or a number format wants it.

Sequence parallelism cuts a rank's rows among its T tensor ranks, and FP8 multiplies rows by
sixteens. The rows that are missing are one more sample of the pack: tokens 0 without labels, which
attend to one another alone. So loss and gradients are those of the pack without them.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer_client.errors import BadArgument
from trainer_client.positions import held_rows
from trainer_client.shard import IGNORED_LABEL, Microbatch, Shard

ADDED_SAMPLE = -1  # in `sample_ids`


def aligned(shard: Shard, rows_multiple: int) -> Shard:
    """The shard with a multiple of `rows_multiple` rows in each microbatch, those of a CP group
    alike.

    Call it on the host, before the copy to a device: `ShardDataset(rows_multiple=...)` does. The
    added rows are a sample whose id is -1. Microbatches that this replica is idle in stay empty;
    `run_step` gives their decoder `rows_multiple` rows, and two at least.

    Raises BadArgument where `rows_multiple` is below 1.
    """
    check_multiple(rows_multiple)
    if rows_multiple == 1:
        return shard
    made = tuple(_aligned(microbatch, rows_multiple) for microbatch in shard.microbatches)
    return replace(shard, microbatches=made)


def check_multiple(rows_multiple: int) -> None:
    """Raises BadArgument where it is below 1."""
    if rows_multiple < 1:
        raise BadArgument(f"rows_multiple is {rows_multiple}; give 1 or more.")


def missing_rows(rows: int, *, multiple: int, degree: int) -> int:
    """Rows to add to those of one member of a group of `degree`: at least one where there are none,
    and two chunks of equal size where the pack is shared. Raises BadArgument where `multiple` is
    below 1."""
    check_multiple(multiple)
    missing = -rows % multiple if rows else multiple
    return missing + multiple if degree > 1 and missing % 2 else missing


def extended(microbatch: Microbatch, rows: int, *, degree: int, cp_rank: int) -> Microbatch:
    """The microbatch with so many rows more of an added sample, on each of `degree` members."""
    if not rows:
        return microbatch
    of = microbatch.__dict__  # to look at a field is not to read it
    bounds = np.array([0, rows * degree])
    added = torch.from_numpy(held_rows(bounds, degree, cp_rank))
    tokens, labels, mrope, weights = (
        of[name] for name in ("input_ids", "labels", "mrope", "weights")
    )
    changed: dict[str, object] = {
        "input_ids": None if tokens is None else pad(tokens, (0, rows)),
        "labels": None if labels is None else pad(labels, (0, rows), value=IGNORED_LABEL),
        "position_ids": _behind(of["position_ids"], added),
        "mrope": None if mrope is None else _behind(mrope, added),
        "weights": None if weights is None else pad(weights, (0, rows)),
        "cu_seqlens": pad(microbatch.cu_seqlens, (0, 1), value=_end(microbatch) + rows * degree),
        "lengths": pad(microbatch.lengths, (0, 1), value=rows * degree),
        "sample_ids": pad(microbatch.sample_ids, (0, 1), value=ADDED_SAMPLE),
        "layouts": {},  # they were of the pack as it was
    }
    return Microbatch(**{**of, **changed})


def _aligned(microbatch: Microbatch, multiple: int) -> Microbatch:
    made = Microbatch(**{**microbatch.__dict__, "rows_multiple": multiple})
    if made.idle:
        return made
    degree = len(made.cp_group)
    rows = missing_rows(made.local_tokens, multiple=multiple, degree=degree)
    return extended(made, rows, degree=degree, cp_rank=made.cp_rank)


def _end(microbatch: Microbatch) -> int:
    return int(microbatch.cu_seqlens[-1])


def _behind(positions: Tensor, added: Tensor) -> Tensor:
    """Positions [..., rows] with those of the added sample behind them."""
    shape = *positions.shape[:-1], len(added)
    # The runtime does it on a device too, whose work must not be waited for.
    there = added.to(positions.device, non_blocking=True)
    return torch.cat([positions, there.expand(shape)], dim=-1)
