"""What Megatron-Energon notes of a WebDataset in `.nv-meta/split.yaml`: the shards of each split.

Source: `flavors/webdataset/metadata.py` and `structs.py` of megatron-energon 7.4.
"""

import posixpath
from collections.abc import Mapping, Sequence
from typing import cast

from dataservice.core.errors import SourceError
from dataservice.core.quoting import quoted
from dataservice.sources.patterns import expand

SPLIT = "train"
_MOST_SHARDS = 1_000_000


def train_shards(split: Mapping[str, object]) -> list[str]:
    """The shards of the split train, without those that are excluded. Raises SourceError where
    single samples are excluded, which no reader of whole shards can do."""
    parts = cast(Mapping[str, Sequence[object]], split["split_parts"])
    shards = _expanded(parts[SPLIT])
    excluded = set(_expanded(cast(Sequence[object], split.get("exclude") or ())))
    whole = set(shards)
    samples = sorted(name for name in excluded if posixpath.dirname(name) in whole)
    if samples:
        raise SourceError(
            f"the split.yaml of Energon excludes single samples, such as {quoted(samples[0])}, "
            "which is not done here. Take them out of their tar, and out of `exclude`."
        )
    return [name for name in shards if name not in excluded]


def _expanded(patterns: Sequence[object]) -> list[str]:
    names: list[str] = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{quoted(pattern, 80)} instead of a shard's name")
        names += expand(pattern)
        if len(names) > _MOST_SHARDS:
            raise ValueError(f"it names more than {_MOST_SHARDS:,} shards")
    return names
