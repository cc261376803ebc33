"""The exchange, carried out in numpy: every feature row arrives at its own token."""

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.layout import member_rows, sample_starts
from dataservice.core.orders import Microbatch
from dataservice.core.plan import StepPlan
from dataservice.core.sample import Modality
from dataservice.core.topology import Topology
from dataservice.engine.planner import plan_step
from dataservice.engine.shards import cut_step, microbatches_of
from tests.engine.support import make_setup


def made(ranks: int, step: int) -> tuple[StepPlan, list[tuple[Microbatch, ...]]]:
    setup, cursor = make_setup(samples=300, batch=24), Cursor()
    for _ in range(step + 1):
        planned = plan_step(setup, cursor, Topology(world_size=ranks))
        assert planned is not None
        cursor = planned.next_cursor
    parts = cut_step(planned.plan)
    return planned.plan, [microbatches_of(parts, replica) for replica in range(ranks)]


def row_names(plan: StepPlan, pack: int) -> dict[tuple[int, int], tuple[int, int]]:
    """For each (pack position of a feature): the item and its row that belong there."""
    padded = plan.padded_sample_tokens[plan.pack_offsets[pack] : plan.pack_offsets[pack + 1]]
    starts = sample_starts(padded)
    wanted = {}
    for place, sample in enumerate(plan.samples_of(pack).tolist()):
        for item in np.flatnonzero(plan.item_sample == sample).tolist():
            for row in range(plan.item_llm_tokens[item]):
                wanted[int(starts[place] + plan.item_position[item] + row)] = (item, row)
    return wanted


def items_of_pack(plan: StepPlan, pack: int) -> list[int]:
    return [
        item
        for sample in plan.samples_of(pack).tolist()
        for item in np.flatnonzero(plan.item_sample == sample).tolist()
    ]


@pytest.mark.parametrize(("ranks", "step"), [(3, 0), (4, 2), (5, 1), (6, 3)])
def test_every_feature_row_arrives_where_its_text_is(ranks, step):
    plan, shards = made(ranks, step)
    for wave in range(plan.waves):
        for modality in Modality:
            sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for source, shard in enumerate(shards):
                microbatch = shard[wave]
                if modality not in microbatch.routes:
                    continue
                features = [
                    (items_of_pack(plan, chosen.pack)[place], row)
                    for chosen in microbatch.encodes[modality]
                    for place in chosen.items
                    for row in range(plan.item_llm_tokens[items_of_pack(plan, chosen.pack)[place]])
                ]
                route = microbatch.routes[modality]
                rows = iter([features[i] for i in route.send_rows])
                for target, count in enumerate(route.send_splits):
                    sent[source, target] = [next(rows) for _ in range(count)]
            for target, shard in enumerate(shards):
                microbatch = shard[wave]
                if modality not in microbatch.routes:
                    continue
                route = microbatch.routes[modality]
                got = [row for source in range(ranks) for row in sent[source, target]]
                assert [len(sent[s, target]) for s in range(ranks)] == list(route.recv_splits)
                check_arrivals(plan, microbatch, modality, got, route.recv_positions)


def check_arrivals(plan, microbatch, modality, got, positions):
    if microbatch.pack < 0:
        assert not got
        return
    degree = len(microbatch.cp_group)
    held = member_rows(np.diff(microbatch.cu_seqlens), degree, microbatch.cp_rank)
    wanted = row_names(plan, microbatch.pack)
    here = {int(p): wanted[int(p)] for p in held if int(p) in wanted}
    here = {p: (i, r) for p, (i, r) in here.items() if plan.item_modality[i] == modality}
    arrived = {int(held[p]): row for p, row in zip(positions.tolist(), got, strict=True)}
    assert arrived == here


def test_every_replica_has_one_microbatch_in_every_wave():
    plan, shards = made(6, 0)
    for shard in shards:
        assert [microbatch.wave for microbatch in shard] == list(range(plan.waves))
    for wave in range(plan.waves):
        groups = {shard[wave].cp_group for shard in shards}
        members = [replica for group in groups for replica in group]
        assert sorted(members) == list(range(6))
