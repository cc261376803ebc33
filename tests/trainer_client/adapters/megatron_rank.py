"""Megatron-Core's own groups, rank generator and rotary embedding beside the adapter's.

    python -m torch.distributed.run --nproc-per-node 4 ... megatron_rank.py

Not run, for want of a GPU: Megatron's layers and Transformer Engine. The cut that
Transformer Engine makes of a packed sequence is the one that Megatron's rotary embedding makes.
"""

import warnings
from itertools import product

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not installed

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from tests.trainer_client.runtime.planned_steps import planned_steps  # noqa: E402
from trainer_client.adapters.megatron import (  # noqa: E402
    ContextGroups,
    megatron_batch,
    megatron_ranks,
)

WIDTH = 16


def ranks_are_those_that_megatron_generates():
    orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-dp-cp-pp", "pp-cp-dp-tp")
    for tp, cp, dp, pp, order in product((1, 2, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3), orders):
        generator = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        ranks = megatron_ranks(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp, order=order)
        for group in generator.get_ranks("tp"):
            assert [ranks[r].tensor_rank for r in group] == list(range(tp))
            assert len({(ranks[r].replica, ranks[r].stage) for r in group}) == 1
        for group in generator.get_ranks("pp"):
            assert [ranks[r].stage for r in group] == list(range(pp))
            assert len({(ranks[r].replica, ranks[r].tensor_rank) for r in group}) == 1
        for group in generator.get_ranks("cp"):
            first = ranks[group[0]].replica
            assert first % cp == 0
            assert [ranks[r].replica for r in group] == list(range(first, first + cp))
        for group in generator.get_ranks("dp"):
            assert [ranks[r].replica // cp for r in group] == list(range(dp))


def this_rank_is_where_megatron_put_it():
    sizes = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2))
    for tp, cp, pp in sizes:
        parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
        me = megatron_ranks(dist.get_world_size(), tp=tp, cp=cp, pp=pp)[dist.get_rank()]
        context = parallel_state.get_context_parallel_rank()
        assert me.tensor_rank == parallel_state.get_tensor_model_parallel_rank()
        assert me.stage == parallel_state.get_pipeline_model_parallel_rank()
        assert me.replica == parallel_state.get_data_parallel_rank() * cp + context
        assert ("inputs" in me.parts) == parallel_state.is_pipeline_first_stage()
        assert ("labels" in me.parts) == parallel_state.is_pipeline_last_stage()
        parallel_state.destroy_model_parallel()


def turned(rows, positions, frequencies):
    """Rotary embedding by each row's own position: x·cos + rotated x·sin."""
    angles = frequencies[positions, 0, 0]
    half = WIDTH // 2
    swapped = torch.cat([-rows[..., half:], rows[..., :half]], dim=-1)
    return rows * angles.cos()[:, None] + swapped * angles.sin()[:, None]


def packs_are_cut_as_megatron_cuts_them():
    parallel_state.initialize_model_parallel()
    rank, degrees = dist.get_rank(), set()
    groups = ContextGroups(dist.get_world_size())
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    speeds = 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.outer(torch.arange(8192), speeds)
    frequencies = torch.cat([angles, angles], dim=-1)[:, None, None]  # [positions, 1, 1, width]
    _, steps = planned_steps(dist.get_world_size(), 4, batch=6)
    for by_replica in steps:
        groups.prepare(by_replica[rank].plan)
        for mb, multiple in product(by_replica[rank].microbatches, (1, 16)):
            batch = megatron_batch(mb, rows_multiple=multiple, groups=groups)
            params = PackedSeqParams(**batch.packed)
            degrees.add(params.local_cp_size)
            alone = parallel_state.get_context_parallel_group()  # of this rank only
            rows = torch.randn(batch.tokens.shape[1], 1, WIDTH)
            found = apply_rotary_pos_emb(
                rows,
                frequencies[: params.max_seqlen_q],
                config,
                cu_seqlens=params.cu_seqlens_q_padded,
                cp_group=params.cp_group or alone,
            )
            expected = turned(rows, batch.position_ids[0], frequencies)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, degrees)
    assert {1, 2} <= set().union(*seen), seen


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks_are_those_that_megatron_generates()
    this_rank_is_where_megatron_put_it()
    packs_are_cut_as_megatron_cuts_them()
    dist.destroy_process_group()
