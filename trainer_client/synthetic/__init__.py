"""Shards without a service: to try a trainer, to profile it, and to test what trains by shards."""

from trainer_client.synthetic.dataset import SyntheticDataset
from trainer_client.synthetic.job import SyntheticJob, SyntheticMedia, synthetic_shards
from trainer_client.synthetic.sample import SyntheticItem, SyntheticSample
from trainer_client.synthetic.step import SyntheticStep

__all__ = [
    "SyntheticDataset",
    "SyntheticItem",
    "SyntheticJob",
    "SyntheticMedia",
    "SyntheticSample",
    "SyntheticStep",
    "synthetic_shards",
]
