"""Steps of a synthetic job as the real engine draws, plans and cuts them, without its workers.

A sample's contents follow from its id alone, so every world size sees the same samples.
"""

import numpy as np
import torch

from benchmarks.planned_shards import Contents, shard_of
from dataservice.core.cursor import Cursor
from dataservice.core.topology import Topology
from dataservice.engine.planner import plan_step
from dataservice.engine.shards import cut_step
from tests.engine.support import make_setup
from tests.trainer_client.runtime.random_steps import ITEM_WIDTH, VOCABULARY


def planned_steps(replicas, steps, *, batch=8, **plan):
    """Each step's samples as `random_steps` has them, and its shards by replica."""
    setup, cursor = make_setup(batch=batch, **plan), Cursor()
    samples, shards = [], []
    for _ in range(steps):
        planned = plan_step(setup, cursor, Topology(world_size=replicas))
        cursor = planned.next_cursor
        details = setup.catalog.details(planned.plan.sample_ids)
        held = [contents(ref.sample_id, lengths) for ref, lengths in details]
        samples.append(held)
        parts = cut_step(planned.plan)
        shards.append([shard_of(parts, held, replica) for replica in range(replicas)])
    return samples, shards


def contents(sample_id, lengths):
    rng = np.random.default_rng(sample_id)
    ids, labels = rng.integers(0, VOCABULARY, (2, lengths.llm_tokens))
    labels[rng.random(lengths.llm_tokens) < 0.3] = -100
    items = []
    for item in lengths.items:
        modality = item.modality.name.lower()
        values = rng.standard_normal((item.llm_tokens, ITEM_WIDTH[modality]))
        items.append((modality, torch.from_numpy(values), item.position))
    return Contents(
        id=sample_id, ids=torch.from_numpy(ids), labels=torch.from_numpy(labels), items=items
    )
