"""Steps of a synthetic job as the real engine draws, plans and cuts them, without its workers.

A sample's contents follow from its id alone, so every world size sees the same samples.
"""

import types

import numpy as np
import torch

from dataservice.core.cursor import Cursor
from dataservice.core.layout import member_rows
from dataservice.core.topology import Topology
from dataservice.engine.planner import plan_step
from dataservice.engine.shards import cut_step, microbatches_of
from tests.engine.support import make_setup
from tests.trainer_client.runtime.random_steps import ITEM_WIDTH, VOCABULARY
from trainer_client.shard import (
    FeatureExchange,
    Group,
    Microbatch,
    ModalityBatch,
    PlanSummary,
    Shard,
    Wave,
)


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
    return types.SimpleNamespace(
        id=sample_id, ids=torch.from_numpy(ids), labels=torch.from_numpy(labels), items=items
    )


def shard_of(parts, samples, replica):
    plan = parts.plan
    return Shard(
        job="planned", attempt=1, step=plan.step, rank=replica, replica=replica, cursor_after="",
        plan=PlanSummary(
            digest=plan.digest, replicas=plan.replicas, samples=len(samples), loss_tokens=0,
            predicted_s=plan.predicted_s, stages=(),
            waves=tuple(wave_of(plan, wave) for wave in range(plan.waves)),
        ),
        microbatches=tuple(
            microbatch_of(cut, plan, samples) for cut in microbatches_of(parts, replica)
        ),
        size_bytes=0,
    )  # fmt: skip


def wave_of(plan, wave):
    groups = tuple(
        Group(pack=g.pack, replicas=g.replicas, tokens=g.tokens, predicted_s=g.seconds)
        for g in plan.groups(wave)
        if g.pack >= 0
    )
    return Wave(index=wave, groups=groups, idle=())


def microbatch_of(cut, plan, samples):
    held = [samples[k] for k in plan.samples_of(cut.pack)] if cut.pack >= 0 else []
    padded = np.diff(cut.cu_seqlens)
    rows = member_rows(padded, len(cut.cp_group), cut.cp_rank)
    columns = {
        "input_ids": [padded_to(s.ids, room, 0) for s, room in zip(held, padded, strict=True)],
        "labels": [padded_to(s.labels, room, -100) for s, room in zip(held, padded, strict=True)],
        "position_ids": [torch.arange(room) for room in padded],
    }
    empty = torch.empty(0, dtype=torch.int64)
    batches = {
        modality.name.lower(): ModalityBatch(
            items=[
                rows
                for of in cut.encodes[modality]
                for rows in encoded(of, items_of(of.pack, plan, samples))
            ],
            exchange=FeatureExchange(
                send_rows=torch.from_numpy(routes.send_rows).long(),
                send_splits=routes.send_splits.tolist(),
                recv_splits=routes.recv_splits.tolist(),
                recv_positions=torch.from_numpy(routes.recv_positions).long(),
            ),
        )
        for modality, routes in cut.routes.items()
    }
    return Microbatch(
        wave=cut.wave,
        pack=cut.pack,
        cp_group=cut.cp_group,
        cp_rank=cut.cp_rank,
        predicted_s=cut.seconds,
        cu_seqlens=torch.from_numpy(cut.cu_seqlens),
        lengths=torch.from_numpy(cut.lengths),
        sample_ids=torch.from_numpy(cut.sample_ids),
        **{name: torch.cat([empty, *pieces])[rows] for name, pieces in columns.items()},
        **batches,
    )


def padded_to(values, room, filler):
    return torch.cat([values, values.new_full((int(room) - len(values),), filler)])


def encoded(of, items):
    """The rows of the units that are encoded of a pack's `items`."""
    chosen = [items[place] for place in of.items]
    if not of.ranges:
        return chosen
    return [
        rows[first * len(rows) // units : stop * len(rows) // units]
        for rows, (first, stop, units) in zip(chosen, of.ranges, strict=True)
    ]


def items_of(pack, plan, samples):
    return [rows for k in plan.samples_of(pack) for _, rows, _ in samples[k].items]
