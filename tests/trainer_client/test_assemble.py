"""Plans and bytes that contradict each other are refused, never trained."""

import pickle

import pytest
import torch
from dataservice_proto.columns import packed

from trainer_client import MalformedShard
from trainer_client.assemble import assemble_shard
from trainer_client.fetch import Part, PartId


def parts_of_rank_0(service):
    def part(part_id, arrays):
        tensors = tuple((name, torch.from_numpy(array)) for name, array in arrays)
        return part_id, Part(part_id, tensors, 1)

    return dict(
        [
            part(PartId(0, 0, ()), service.sequence_of(0, 0, 0).items()),
            part(PartId(1, 0, ()), service.sequence_of(0, 1, 0).items()),
            part(PartId(0, -1, (0,)), [("item", service.item_of(0, 0, 0))]),
        ]
    )


def test_a_consistent_shard_is_assembled(service):
    shard = assemble_shard(service.rank_shard(0, 0).message(), parts_of_rank_0(service))
    assert shard.size_bytes == 3
    assert shard.cursor_after == "cursor-1"


def weigh(shard, *weights):
    shard.head.weighted_loss_tokens = 12.5
    for mb, own in zip(shard.microbatches, weights, strict=True):
        mb.loss_weights = own


def test_each_token_has_the_weight_of_its_sample(service):
    message = service.rank_shard(0, 0)
    weigh(message, [0.25, 3], [0.5])
    shard = assemble_shard(message.message(), parts_of_rank_0(service))
    assert shard.plan.weighted_loss_tokens == 12.5
    first, second = shard.microbatches
    assert first.loss_weights.tolist() == [0.25] * 4 + [3.0] * 4  # two chunks of each sample
    assert second.loss_weights.tolist() == [0.5] * 5
    assert first.loss_weights.dtype is torch.float64


def test_a_step_without_weights_weighs_every_token_1(service):
    shard = assemble_shard(service.rank_shard(0, 0).message(), parts_of_rank_0(service))
    assert shard.plan.weighted_loss_tokens is None
    assert [mb.loss_weights.tolist() for mb in shard.microbatches] == [[1.0] * 8, [1.0] * 5]


@pytest.mark.parametrize("own", [[0.25], [0.25, float("nan")], [0.25, -1]])
def test_weights_of_other_samples_than_the_plans_are_refused(service, own):
    message = service.rank_shard(0, 0)
    weigh(message, own, [0.5])
    with pytest.raises(
        MalformedShard,
        match=r"3 loss weights came; the plan says 3 numbers|sample_weight has 16 bytes",
    ):
        assemble_shard(message.message(), parts_of_rank_0(service))


def another_group(shard):
    shard.microbatches[0].cp_group = [1, 0]


def encode_more(shard):
    shard.microbatches[0].phases[0].encodes[0][1].append(7)


def lengthen(shard):
    shard.microbatches[0].cu_seqlens[-1] = 18


def drop_a_sample(shard):
    shard.spoil["sample_id"] = b"\x01\x02"


def turn_around(shard):
    shard.spoil["send_target"] = b"\x01\x00"


def send_to_nobody(shard):
    shard.spoil["send_target"] = b"\x00\x02"


def point_outside(shard):
    shard.microbatches[0].phases[0].recv_positions[0] = 8


def busy_twice(shard):
    shard.summary["pack_wave"][1] = 0


def no_such_wave(shard):
    shard.summary["pack_wave"][1] = 2


def short_column(shard):
    shard.summary["pack_tokens"].pop()


def ring_of_others(shard):
    shard.spoil["wave_ring"] = packed([1, -1])


def ring_alone(shard):
    shard.spoil["wave_ring"] = packed([0, 0])


def ring_unknown(shard):
    shard.spoil["wave_ring"] = b""


def other_columns(shard):
    shard.version = 4


def other_summary(shard):
    shard.with_summary = False
    shard.head.summary.plan_digest = "stray"


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (another_group, r"replica 0 is to be member 0 of the group \[1, 0\]"),
        (encode_more, "no ticket brought item 7 of pack 0"),
        (lengthen, "the plan says input_ids, labels, position_ids of 9 tokens"),
        (drop_a_sample, "column sample_id has 2 bytes for 3 rows"),
        (turn_around, r"names the replicas \[1, 0\] out of order"),
        (send_to_nobody, "names targets from 0 to 2; there are 2 replicas"),
        (point_outside, "from 5 to 8; there are 2 replicas and 8 local tokens"),
        (busy_twice, r"wave 0 names the replicas \[0, 0, 1\]"),
        (no_such_wave, "pack 1 is in wave 2"),
        (short_column, "column pack_tokens has 1 bytes for 2 rows"),
        (ring_of_others, r"have the numbers \[1, -1\], of 1 in the step"),
        (ring_alone, r"have the numbers \[0, 0\], of 1 in the step"),
        (ring_unknown, r"have the numbers \[-1, -1\], of 1 in the step"),
        (other_columns, "columns are of version 4, and version 2 is read here. Install the client"),
        (other_summary, "the groups of plan 'stray', version 0, came for plan 'digest-0'"),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused(service, spoil, complaint):
    shard = service.rank_shard(0, 0)
    spoil(shard)
    with pytest.raises(MalformedShard, match=complaint):
        assemble_shard(shard.message(), parts_of_rank_0(service))


def test_groups_that_did_not_come_along_are_asked_for_once_and_when_they_are_read(service):
    scripted, asked = service.rank_shard(0, 0), []
    scripted.with_summary = False

    def ask():
        asked.append(True)
        return scripted.summary_message()

    shard = assemble_shard(scripted.message(), parts_of_rank_0(service), summary_of=ask)
    plan = shard.plan
    assert (plan.wave_count, plan.ring_count, plan.rings, plan.predicted_s) == (2, 1, {0: 0}, 0.75)
    assert asked == []
    assert shard.plan.degrees == (2, 1)
    assert [stage.stage for stage in shard.plan.stages] == ["pack"]
    assert asked == [True]
    copied = pickle.loads(pickle.dumps(shard.plan))
    assert copied == shard.plan
    assert (copied.wave_count, copied.ring_packs, copied.rings) == (2, (0,), {0: 0})


def test_items_that_are_fewer_than_the_ticket_names_are_refused(service):
    parts = parts_of_rank_0(service)
    parts[PartId(0, -1, (0,))] = Part(PartId(0, -1, (0, 1)), (), 0)
    parts[PartId(0, -1, (0, 1))] = parts.pop(PartId(0, -1, (0,)))
    with pytest.raises(MalformedShard, match="0 tensors came for 2 items"):
        assemble_shard(service.rank_shard(0, 0), parts)
