"""Random plans for samples of foreign models, as the shards that a service would send."""

from dataclasses import replace

import numpy as np
import torch

from tests.trainer_client.adapters.foreign_models import FAMILIES
from tests.trainer_client.runtime.random_steps import make_shard, random_plan
from trainer_client.positions import held_rows, in_sample, sample_of


def samples_of(name, model, seed, count=7):
    rng = np.random.default_rng(seed)
    return [FAMILIES[name].sample(rng, model) for _ in range(count)]


def shard_of(samples, replicas, rank, seed, degrees):
    waves = random_plan(samples, replicas, degrees, seed)
    return placed(samples, make_shard(samples, waves, replicas, rank, seed))


def placed(samples, shard):
    """The shard with the samples' own positions, where they are of M-RoPE."""
    if samples[0].positions is None:
        return shard
    microbatches = (replace(mb, mrope=mrope_of(samples, mb)) for mb in shard.microbatches)
    return replace(shard, microbatches=tuple(microbatches))


def mrope_of(samples, microbatch):
    """The samples' own positions, cut as the microbatch's tokens are; padding counts on."""
    bounds = microbatch.cu_seqlens.numpy().astype(np.int64)
    rows = held_rows(bounds, len(microbatch.cp_group), microbatch.cp_rank)
    held = [samples[int(number)].positions for number in microbatch.sample_ids]
    columns = [
        held[s][:, p] if p < held[s].shape[1] else torch.full((3,), int(p))
        for s, p in zip(sample_of(bounds, rows), in_sample(bounds, rows), strict=True)
    ]
    return torch.stack(columns, dim=1) if columns else torch.empty(3, 0, dtype=torch.int64)
