"""Where items are listed, encoded and sent, against the same read off the plan one by one."""

from collections import defaultdict

import numpy as np
import pytest

from dataservice.core.layout import locate, sample_starts
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.compose import compose_step
from dataservice.planning.routes import (
    ByPhase,
    encode_order,
    encoded_parts,
    feature_runs,
    listed_items,
)
from tests.planning.step_samples import MEMORY, step_samples


@pytest.fixture(params=[(1, 30), (5, 40), (8, 9), (13, 200)], ids=str)
def plan(request: pytest.FixtureRequest) -> StepPlan:
    ranks, samples = request.param
    longest = MEMORY // 2 if ranks == 1 else 3 * MEMORY
    options, topology = PlanOptions(memory_tokens=MEMORY), Topology(world_size=ranks)
    made = compose_step(
        step_samples(samples, ranks, longest), step=0, topology=topology, options=options
    )
    assert ranks == 1 or (made.pack_degree > 1).any(), "some sequences are shared"
    return made


def listed_by_hand(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(item, pack, place, first token in the padded pack) of each item, by pack."""
    rows = []
    padded = plan.padded_sample_tokens
    for pack in range(plan.packs):
        own = slice(plan.pack_offsets[pack], plan.pack_offsets[pack + 1])
        starts = sample_starts(padded[own]).tolist()
        of_pack = [
            (item, pack, start + int(plan.item_position[item]))
            for sample, start in zip(plan.samples_of(pack).tolist(), starts, strict=False)
            for item in np.flatnonzero(plan.item_sample == sample).tolist()
        ]
        rows += [(item, at, place, start) for place, (item, at, start) in enumerate(of_pack)]
    return rows


def phase(plan: StepPlan, replica: int, pack: int, item: int) -> int:
    of_replica = replica * plan.waves + int(plan.pack_wave[pack])
    return 2 * of_replica + int(plan.item_modality[item])


def by_phase(of: ByPhase) -> list[list[int]]:
    return [of.order[a:b].tolist() for a, b in zip(of.begins[:-1], of.begins[1:], strict=True)]


def test_items_are_listed_by_pack_with_what_the_plan_says_of_them(plan: StepPlan) -> None:
    listed, expected = listed_items(plan), listed_by_hand(plan)
    columns = listed.item, listed.pack, listed.place, listed.start
    assert [*zip(*(column.tolist() for column in columns), strict=True)] == expected
    assert (listed.llm_tokens == plan.item_llm_tokens[listed.item]).all()
    assert (listed.modality == plan.item_modality[listed.item]).all()
    assert (listed.replica == plan.item_replica[listed.item]).all()
    counts = np.bincount([pack for _, pack, _, _ in expected], minlength=plan.packs)
    assert listed.begins.tolist() == sample_starts(counts).tolist()


def test_each_phase_encodes_its_items_by_pack_and_place(plan: StepPlan) -> None:
    listed, rows = listed_items(plan), listed_by_hand(plan)
    encoded = encode_order(plan, listed)
    expected: list[list[int]] = [[] for _ in range(2 * plan.waves * plan.replicas)]
    for row, (item, pack, _, _) in enumerate(rows):
        expected[phase(plan, int(plan.item_replica[item]), pack, item)].append(row)
    assert by_phase(encoded) == expected
    parts = encoded_parts(listed, encoded)
    packs = [[rows[row][1] for row in of_phase] for of_phase in expected]
    assert parts.counts.tolist() == [len(set(of_phase)) for of_phase in packs]
    pairs = [(pack, each.count(pack)) for each in packs for pack in dict.fromkeys(each)]
    assert [*zip(parts.pack.tolist(), parts.items.tolist(), strict=True)] == pairs


def test_runs_take_every_row_to_the_member_that_holds_its_token(plan: StepPlan) -> None:
    listed = listed_items(plan)
    encoded = encode_order(plan, listed)
    runs = feature_runs(plan, listed, encoded)
    rows, padded = listed_by_hand(plan), np.zeros(len(plan.sample_ids), np.int64)
    padded[plan.pack_samples] = plan.padded_sample_tokens
    sent, received = defaultdict(list), defaultdict(list)  # by phase
    for of_phase in by_phase(encoded):
        first = 0
        for item, pack, _, start in (rows[row] for row in of_phase):
            count, sample = int(plan.item_llm_tokens[item]), plan.item_sample[item]
            position = plan.item_position[item] + np.arange(count)
            degree = np.full(count, plan.pack_degree[pack])
            of_sample = np.full(count, start - plan.item_position[item])
            member, to_row = locate(position, np.full(count, padded[sample]), degree, of_sample)
            source = int(plan.item_replica[item])
            for k in range(count):
                target = plan.replicas_of(pack)[member[k]]
                row = (source, first + k, target, int(to_row[k]))
                sent[phase(plan, source, pack, item)].append(row)
                received[phase(plan, target, pack, item)].append(row)
            first += count
    for ends, other, expected in ((runs.sent, 2, sent), (runs.received, 0, received)):
        for of_phase, found in enumerate(by_phase(ends)):
            single = [
                (
                    int(runs.source[run]),
                    int(runs.source_row[run]) + k,
                    int(runs.target[run]),
                    int(runs.target_row[run]) + k,
                )
                for run in found
                for k in range(runs.rows[run])
            ]
            # By the replica at the other end, then by the row at the source.
            assert single == sorted(expected[of_phase], key=lambda row, at=other: (row[at], row[1]))
    assert (
        np.bincount(runs.item, weights=runs.rows, minlength=len(plan.item_sample))
        == plan.item_llm_tokens
    ).all()
