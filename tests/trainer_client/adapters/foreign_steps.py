"""Random plans for samples of foreign models, as the shards that a service would send."""

from dataclasses import replace

import numpy as np
import torch

from tests.trainer_client.adapters.foreign_models import FAMILIES
from tests.trainer_client.runtime.random_steps import local_layout, make_shard, random_plan
from trainer_client.shard import ItemNotes


def samples_of(name, model, seed, count=7):
    rng = np.random.default_rng(seed)
    return [FAMILIES[name].sample(rng, model) for _ in range(count)]


def shard_of(samples, replicas, rank, seed, degrees):
    waves = random_plan(samples, replicas, degrees, seed)
    shard = make_shard(samples, waves, replicas, rank, seed)
    placed = tuple(complete(samples, mb, rank) for mb in shard.microbatches)
    return replace(shard, microbatches=placed)


def complete(samples, microbatch, rank):
    batches = {
        name: None if batch is None else with_grids(batch)
        for name in ("vision", "audio")
        for batch in (getattr(microbatch, name),)
    }
    microbatch = replace(microbatch, **batches)
    if samples[0].positions is None:
        return microbatch
    rows, _ = local_layout(microbatch.sample_ids.tolist(), samples, microbatch.cp_group, rank)
    columns = [samples[s].positions[:, p] if real else torch.full((3,), p) for s, p, real in rows]
    mrope = torch.stack(columns, dim=1) if columns else torch.empty(3, 0, dtype=torch.int64)
    return replace(microbatch, mrope=mrope)


def with_grids(batch):
    notes = ItemNotes(
        kind=np.zeros(len(batch.items), dtype=np.int8),
        grid=np.array([item.grid for item in batch.items], dtype=np.int64).reshape(-1, 4),
        seconds_per_patch=np.full(len(batch.items), np.nan),
    )
    return replace(batch, items=[item.values for item in batch.items], notes=notes)
