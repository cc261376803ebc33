"""Detects loaders around a dataset that would repeat or leave out steps, or make batches of shards.

The dataset can only find the former when the loader asks for the first shard: it is then on the
call stack. The latter show when torch's `default_collate` is given shards: it looks types up in
`default_collate_fn_map`, which its documentation invites to extend.
"""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from trainer_client.errors import MisuseError
from trainer_client.shard import Shard

ACCELERATE = "accelerate.data_loader"


def check_loader(start_step: int) -> None:
    """Check for a loader that repeats or leaves out steps of a pass that begins at `start_step`.

    Raises MisuseError where there is one.
    """
    if get_worker_info() is not None:
        raise MisuseError(
            "ShardDataset is iterated in a DataLoader worker process. It prefetches by "
            "itself, and one rank may claim its shards only once: use "
            "DataLoader(dataset, batch_size=None, num_workers=0)."
        )
    for loader in _loaders_of_accelerate(sys._getframe(1)):
        kind = type(loader).__name__
        if kind in ("IterableDatasetShard", "DataLoaderDispatcher") and _processes(loader) > 1:
            raise MisuseError(
                f"accelerate's {kind} divides one process's data among {_processes(loader)}, but "
                "every rank has its own shard of each step. Do not prepare the loader: with "
                "transformers, override Trainer.get_train_dataloader to return "
                "DataLoader(dataset, batch_size=None)."
            )
        skipped = int(getattr(loader, "skip_batches", 0) or 0)
        if skipped and start_step:
            raise MisuseError(
                f"accelerate would throw away the next {skipped} steps (skip_first_batches), but "
                f"the dataset stands before step {start_step} already. Resume by the dataset's "
                "state alone: leave skip_first_batches out, or give TrainingArguments("
                "ignore_data_skip=True)."
            )


def _refuse_collating(shards: Sequence[Shard], *, collate_fn_map: object = None) -> NoReturn:
    raise MisuseError(
        f"a DataLoader would make a batch of {len(shards)} shards, but a shard is this rank's "
        "whole batch of a step: use DataLoader(dataset, batch_size=None)."
    )


default_collate_fn_map[Shard] = _refuse_collating


def _loaders_of_accelerate(frame: FrameType | None) -> list[object]:
    """Accelerate's loaders that are waiting for this shard, innermost first."""
    found: list[object] = []
    while frame is not None:
        if frame.f_globals.get("__name__") == ACCELERATE:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


def _processes(loader: object) -> int:
    state = getattr(loader, "state", loader)
    return int(getattr(state, "num_processes", 1))
