"""The exchange, carried out in numpy: every feature row arrives at its own token."""

import itertools

import numpy as np
import pytest
from dataservice_proto.columns import SHARD, read_all

from benchmarks.cut_microbatches import Microbatch, PackItems, microbatches_of
from dataservice.core.cursor import Cursor
from dataservice.core.layout import member_rows, sample_starts
from dataservice.core.plan import StepPlan
from dataservice.core.sample import Modality
from dataservice.core.topology import Topology
from dataservice.engine.planner import plan_step
from dataservice.engine.shards import columns_of, cut_step
from tests.engine.support import make_setup


def made(ranks: int, step: int, **setup: object) -> tuple[StepPlan, list[tuple[Microbatch, ...]]]:
    setup, cursor = make_setup(samples=300, batch=24, **setup), Cursor()
    for _ in range(step + 1):
        planned = plan_step(setup, cursor, Topology(world_size=ranks))
        assert planned is not None
        cursor = planned.next_cursor
    parts = cut_step(planned.plan, setup.catalog.item_details(planned.plan.sample_ids).notes)
    return planned.plan, [microbatches_of(parts, replica) for replica in range(ranks)]


def row_names(plan: StepPlan, pack: int) -> dict[int, tuple[tuple[int, int], int]]:
    """For each place of a feature in a pack: (pack, place), and the modality."""
    padded = plan.padded_sample_tokens[plan.pack_offsets[pack] : plan.pack_offsets[pack + 1]]
    starts = sample_starts(padded)
    wanted = {}
    for place, sample in enumerate(plan.samples_of(pack).tolist()):
        for item in np.flatnonzero(plan.item_sample == sample).tolist():
            for row in range(plan.item_llm_tokens[item]):
                token = int(starts[place] + plan.item_position[item] + row)
                wanted[token] = ((pack, token), int(plan.item_modality[item]))
    return wanted


def encoded(shards, microbatch: Microbatch, modality: Modality):
    """The tokens whose features a rank encodes in a wave: (pack, place in it)."""
    tokens = []
    for chosen in microbatch.encodes[modality]:
        items = items_of_pack(shards, microbatch.wave, chosen.pack)
        for place, units in itertools.zip_longest(chosen.items, chosen.ranges):
            first, stop, of = units or (0, 1, 1)
            start, each = int(items.start[place]), int(items.tokens[place]) // of
            rows = range(start + first * each, start + stop * each)
            tokens += [(chosen.pack, row) for row in rows]
    return tokens


def items_of_pack(shards, wave: int, pack: int) -> PackItems:
    return next(shard[wave].items for shard in shards if shard[wave].pack == pack)


@pytest.mark.parametrize("clips", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize(("ranks", "step"), [(3, 0), (4, 2), (5, 1), (6, 3)])
def test_every_feature_row_arrives_where_its_text_is(ranks, step, clips):
    plan, shards = made(ranks, step, clips=clips)
    for wave in range(plan.waves):
        for modality in Modality:
            sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for source, shard in enumerate(shards):
                microbatch = shard[wave]
                if modality not in microbatch.routes:
                    continue
                features = encoded(shards, microbatch, modality)
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
    assert (plan.item_first_unit is not None) == clips


@pytest.mark.parametrize("ranks", [3, 6])
def test_what_is_known_of_a_piece_is_that_of_its_item_in_a_grid_as_long_as_the_piece(ranks):
    _, shards = made(ranks, 0, clips=True)
    pieces = 0
    for microbatch in itertools.chain(*shards):
        for modality, of_packs in microbatch.encodes.items():
            notes = iter(microbatch.encode_notes[modality].grid.tolist())
            for chosen in of_packs:
                whole = items_of_pack(shards, microbatch.wave, chosen.pack).notes.grid
                for place, units in itertools.zip_longest(chosen.items, chosen.ranges):
                    first, stop, of = units or (0, 1, 1)
                    t, *rest = whole[place].tolist()
                    assert next(notes) == [t // of * (stop - first), *rest]
                    pieces += stop - first < of
    assert pieces > 0


def check_arrivals(plan, microbatch, modality, got, positions):
    if microbatch.pack < 0:
        assert not got
        return
    degree = len(microbatch.cp_group)
    held = member_rows(np.diff(microbatch.cu_seqlens), degree, microbatch.cp_rank)
    wanted = row_names(plan, microbatch.pack)
    here = {int(p): wanted[int(p)] for p in held if int(p) in wanted}
    here = {p: token for p, (token, kind) in here.items() if kind == modality}
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


def test_what_a_rank_is_told_does_not_grow_with_the_ranks_of_a_step_of_rings():
    told = {}
    for ranks in (16, 64, 128):
        setup = make_setup(samples=4000, batch=12 * ranks, memory_tokens=110)
        plan = plan_step(setup, Cursor(), Topology(world_size=ranks)).plan
        assert (plan.pack_degree > 1).sum() > ranks
        parts = cut_step(plan)
        shards = [columns_of(parts, replica) for replica in range(ranks)]
        told[ranks] = np.mean([len(b"".join(shard.written)) for shard in shards])
    assert told[128] < 1.5 * told[16]


def test_packs_that_several_share_have_the_same_number_on_each_and_no_two_have_one():
    setup = make_setup(samples=600, batch=96, memory_tokens=110)
    plan = plan_step(setup, Cursor(), Topology(world_size=8)).plan
    parts = cut_step(plan)
    number_of: dict[int, int] = {}
    for replica in range(8):
        shard = columns_of(parts, replica)
        given = {"waves": plan.waves, "phases": 2 * plan.waves}
        rows = read_all(SHARD, shard.columns, given)
        assert shard.rings == (plan.pack_degree > 1).sum()
        for pack, degree, ring in zip(
            rows["wave_pack"], rows["wave_degree"], rows["wave_ring"], strict=True
        ):
            assert (ring >= 0) == (degree > 1)
            if ring >= 0:
                assert number_of.setdefault(int(pack), int(ring)) == ring
    assert sorted(number_of.values()) == list(range(int((plan.pack_degree > 1).sum())))
    assert sorted(number_of, key=number_of.__getitem__) == sorted(number_of)
