"""The service's plans in Megatron's ranks, names, layout and groups.

Against its documented rules; `test_megatron_core.py` holds the same against megatron-core itself.
"""

import types
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainer_client.runtime.planned_steps import planned_steps
from trainer_client import BadArgument
from trainer_client.adapters.megatron import ContextGroups, megatron_batch, megatron_ranks

SHARED = {"strategy": "full"}


def test_a_rank_is_the_replica_stage_and_tensor_rank_of_megatrons_formula():
    tp, cp, dp, pp = 2, 2, 3, 2
    for tensor, context, data, stage in product(range(tp), range(cp), range(dp), range(pp)):
        rank = tensor + context * tp + data * tp * cp + stage * tp * cp * dp
        place = megatron_ranks(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)[rank]
        assert (place.replica, place.stage, place.tensor_rank) == (
            data * cp + context,
            stage,
            tensor,
        )
        assert place.service_rank == (place.replica * pp + stage) * tp + tensor


def test_an_order_with_stages_before_data_is_the_services_own():
    ranks = megatron_ranks(24, tp=2, cp=1, pp=3, order="tp-cp-ep-pp-dp")
    assert [place.service_rank for place in ranks] == list(range(24))


def test_every_rank_of_the_service_is_taken_once_and_a_replica_reads_each_part_on_one_stage():
    ranks = megatron_ranks(48, tp=2, cp=2, pp=4)
    assert sorted(place.service_rank for place in ranks) == list(range(48))
    readers = [place for place in ranks if place.replica == 3 and place.tensor_rank == 1]
    assert [place.parts for place in readers] == [("inputs",), (), (), ("labels",)]
    assert megatron_ranks(2)[0].parts == ("inputs", "labels")


@pytest.mark.parametrize(
    ("world_size", "sizes", "said"),
    [
        (6, {"tp": 4}, "multiple of their product"),
        (8, {"tp": 2, "order": "tp-dp"}, "none of Megatron's"),
        (8, {"tp": 2, "order": "tp-xp-dp-pp"}, "none of Megatron's"),
        (8, {"cp": 2, "order": "tp-dp-pp"}, "leaves it out"),
    ],
)
def test_sizes_and_orders_that_megatron_would_refuse_are_refused(world_size, sizes, said):
    with pytest.raises(BadArgument, match=said):
        megatron_ranks(world_size, **sizes)


@pytest.fixture(scope="module")
def shards():
    """Two steps of four replicas, with packs of several degrees; by step and replica."""
    _, steps = planned_steps(4, 2, **SHARED)
    return steps


def test_loss_weights_are_refused(shards):
    mb = shards[0][0].microbatches[0]
    weighed = replace(mb, weights=torch.ones(mb.local_tokens, dtype=torch.float64))
    with pytest.raises(BadArgument, match=r"loss weights.* whole number of tokens.*run_step"):
        megatron_batch(weighed, groups=Groups())


class Groups:
    """Stands for `ContextGroups` where no group is used to talk."""

    def of(self, microbatch):
        return microbatch.cp_group if len(microbatch.cp_group) > 1 else None


def batches(shards, multiple):
    """Pack → (microbatch, batch) of its members, in ring order, and the batches of idle ranks."""
    packs, idle = {}, []
    for step, by_replica in enumerate(shards):
        for shard in by_replica:
            for mb in shard.microbatches:
                batch = megatron_batch(mb, rows_multiple=multiple, groups=Groups())
                if mb.idle:
                    idle.append(batch)
                else:
                    packs.setdefault((step, mb.pack), {})[mb.cp_rank] = (mb, batch)
    return [[members[rank] for rank in range(len(members))] for members in packs.values()], idle


def thd_rows(cu_seqlens_padded, degree, rank):
    """Transformer Engine's cut of a packed sequence: chunks r and 2·d-1-r of each sample."""
    rows = []
    for start, end in pairwise(cu_seqlens_padded):
        chunks = np.split(np.arange(start, end), 1 if degree == 1 else 2 * degree)
        rows += [chunks[0]] if degree == 1 else [chunks[rank], chunks[2 * degree - 1 - rank]]
    return np.concatenate(rows)


@pytest.mark.parametrize("multiple", [1, 3, 4, 64])
def test_rows_are_aligned_and_cut_as_transformer_engine_cuts_them(shards, multiple):
    packs, idle = batches(shards, multiple)
    assert {1, 2} <= {len(members) for members in packs}
    for members in packs:
        degree = len(members)
        packed = members[0][1].packed
        bounds = packed["cu_seqlens_q_padded"].numpy()
        true = packed["cu_seqlens_q"].diff().numpy()
        padded = np.diff(bounds)
        assert (true <= padded).all()
        assert degree == 1 or (padded % (2 * degree) == 0).all()
        assert packed["max_seqlen_q"] == padded.max()
        places = np.concatenate([np.arange(length) for length in padded])
        labelled = np.concatenate([np.arange(n) < t for n, t in zip(padded, true, strict=True)])
        for rank, (mb, batch) in enumerate(members):
            rows = thd_rows(bounds, degree, rank)
            assert batch.tokens.shape == (1, len(rows))
            assert len(rows) % multiple == 0
            assert batch.position_ids[0].tolist() == places[rows].tolist()
            assert batch.tokens[0, : mb.local_tokens].equal(mb.input_ids)
            assert batch.loss_mask.sum() == (mb.labels != -100).sum()
            assert not batch.loss_mask[0, ~torch.from_numpy(labelled[rows])].any()
            kept = batch.loss_mask[0, : mb.local_tokens] > 0
            assert batch.labels[0, : mb.local_tokens][kept].equal(mb.labels[mb.labels != -100])
            assert batch.labels.min() >= 0
            same = {name: value for name, value in batch.packed.items() if name != "cp_group"}
            assert repr(same) == repr({k: v for k, v in packed.items() if k != "cp_group"})
    for batch in idle:
        assert batch.tokens.shape == (1, multiple)
        assert not batch.loss_mask.any()
        assert batch.packed["cu_seqlens_q"].tolist() == [0, multiple]


def test_few_tokens_are_added_for_alignment(shards):
    """Aligning each sample would add half a multiple for every one of them."""
    for members in batches(shards, 32)[0]:
        for mb, batch in members:
            assert batch.tokens.shape[1] - mb.local_tokens < 32


def test_context_parallelism_is_turned_off_by_a_size_of_one_without_a_group(shards):
    for members in batches(shards, 1)[0]:
        packed = members[0][1].packed
        assert packed["local_cp_size"] == len(members)
        assert (packed["cp_group"] is None) == (len(members) == 1)


def test_a_pack_of_another_degree_than_megatrons_own_is_refused(shards):
    microbatches = [mb for shard in shards[0] for mb in shard.microbatches]
    shared = next(mb for mb in microbatches if len(mb.cp_group) > 1)
    with pytest.raises(BadArgument, match="static_degree: 1"):
        megatron_batch(shared)


def test_static_groups_are_those_of_megatrons_own_context_parallelism():
    _, steps = planned_steps(4, 1, strategy="packing", static_degree=2)
    ranks = megatron_ranks(8, tp=2, cp=2)
    for shard in steps[0]:
        for mb in shard.microbatches:
            batch = megatron_batch(mb, cp=2)
            assert "cp_group" not in batch.packed
            assert int(batch.packed["cu_seqlens_q_padded"][-1]) == 2 * batch.tokens.shape[1]
            if not mb.idle:
                context = [r for r, place in enumerate(ranks) if place.replica in mb.cp_group]
                assert context in ([0, 1, 2, 3], [4, 5, 6, 7])  # of two tensor ranks each


def test_a_stage_gets_what_it_fetched(shards):
    mb = shards[0][0].microbatches[0]
    mb.__dict__["input_ids"], kept = None, mb.input_ids
    try:
        batch = megatron_batch(mb, groups=Groups())
    finally:
        mb.__dict__["input_ids"] = kept
    assert batch.tokens is None
    assert batch.labels is not None


def talk_in_groups(rank, size, steps_by_tp):
    """The groups this rank has been in, over steps that name more of them than are kept."""
    return {tp: talked(rank, size, tp, steps) for tp, steps in steps_by_tp.items()}


@contextmanager
def noted_sums():
    """The groups of torch's that are summed over in the body: NCCL connects one in its first."""
    groups, plain = [], dist.all_reduce
    dist.all_reduce = lambda tensor, group: (groups.append(group), plain(tensor, group=group))
    yield groups
    dist.all_reduce = plain


def talked(rank, size, tp, steps):
    me, seen = megatron_ranks(size, tp=tp)[rank], []
    groups = ContextGroups(size, tp=tp, max_groups=1)
    for named in steps:
        plan = types.SimpleNamespace(groups=[types.SimpleNamespace(replicas=g) for g in named])
        with noted_sums() as connected:
            groups.prepare(plan)
        for members in named:
            if me.replica not in members or len(members) == 1:
                continue
            group = groups.of(types.SimpleNamespace(cp_group=members))
            assert group in connected or tuple(dist.get_process_group_ranks(group)) in seen
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            ranks = dist.get_process_group_ranks(group)
            assert ranks == [replica * tp + me.tensor_rank for replica in members]
            assert group.rank() == members.index(me.replica)
            assert total == sum(ranks)
            seen.append(tuple(ranks))
    return seen


def test_groups_are_torchs_own_in_ring_order_of_each_tensor_rank_and_made_again(world, shards):
    named = [[group.replicas for group in by_replica[0].plan.groups] for by_replica in shards]
    assert any(len(members) > 1 for step in named for members in step)
    named += [[(0, 1), (2, 3)], [(1, 2)], [(0, 3)], [(0, 1), (2, 3)], [(1, 2)]]
    answers = world(talk_in_groups, 4, {1: named, 2: [[(0, 1)]]})
    assert answers[0][1][-2:] == [(0, 3), (0, 1)]
    assert answers[1][1][-2:] == [(0, 1), (1, 2)]
    assert [answers[rank][2] for rank in range(4)] == [[(0, 2)], [(1, 3)]] * 2


def test_a_group_in_another_order_than_torchs_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    plan = types.SimpleNamespace(groups=[types.SimpleNamespace(replicas=(2, 0))])
    with pytest.raises(BadArgument, match="rising order"):
        ContextGroups(4).prepare(plan)
