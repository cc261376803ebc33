"""Megatron-Core on the service: who is who, what a microbatch is called there, and its groups.

Checked against megatron-core 0.16. Its ranks count tensor parallelism fastest and pipeline stages
slowest; the service counts tensor ranks fastest and replicas slowest:

    8 ranks of T=2, P=2            Megatron, tp-cp-ep-dp-pp        service
    replica 0, stage 0             0 1                             0 1
    replica 1, stage 0             2 3                             4 5
    replica 0, stage 1             4 5                             2 3
    replica 1, stage 1             6 7                             6 7

A replica is one place in Megatron's data and context parallelism together. Expert parallelism
regroups the same ranks, so it changes nothing here.

    me = megatron_ranks(world_size, tp=T, pp=P)[rank]
    dataset = ShardDataset(address, job=job, rank=me.service_rank, world_size=world_size,
                           parts=me.parts)
    groups = ContextGroups(world_size, tp=T, pp=P)              # where packs are shared
    for shard in dataset:
        groups.prepare(shard.plan)
        for mb in shard.microbatches:
            batch = megatron_batch(mb, rows_multiple=T, groups=groups)
            model(batch.tokens, batch.position_ids, None, labels=batch.labels,
                  loss_mask=batch.loss_mask, packed_seq_params=PackedSeqParams(**batch.packed))

Nothing here imports Megatron.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from trainer_client.adapters.group_ledger import GroupLedger, Members
from trainer_client.alignment import extended, missing_rows
from trainer_client.errors import BadArgument
from trainer_client.shard import Microbatch, PlanSummary

MEGATRON_ORDER = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRank:
    """One of Megatron's ranks as the service knows it: what `ShardDataset` is given as `rank` and
    `parts`."""

    replica: int
    stage: int
    tensor_rank: int
    service_rank: int
    parts: tuple[str, ...]


def megatron_ranks(
    world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, order: str = MEGATRON_ORDER
) -> tuple[MegatronRank, ...]:
    """The service's view of each of Megatron's global ranks, in their order.

    `order` is that of `initialize_model_parallel`, fastest first. Replicas are numbered with the
    context rank fastest, so that a static degree of `cp` gives Megatron's own groups. The first
    stage reads inputs and the last labels. Raises BadArgument where the sizes do not divide the
    world, or the order has other names.
    """
    names = order.lower().split("-")
    known = {"tp", "cp", "ep", "dp", "pp"}
    if len(set(names)) != len(names) or not {"tp", "dp", "pp"} <= set(names) <= known:
        raise BadArgument(
            f"order {order!r} is none of Megatron's: name tp, dp and pp, and cp and ep where they "
            f"are used, once each, as in {MEGATRON_ORDER!r}."
        )
    if min(tp, cp, pp) < 1 or world_size < 1 or world_size % (tp * cp * pp):
        raise BadArgument(
            f"{world_size} ranks cannot be divided into tp {tp} × cp {cp} × pp {pp}; the world "
            "size must be a multiple of their product."
        )
    if cp > 1 and "cp" not in names:
        raise BadArgument(f"cp is {cp}, and order {order!r} leaves it out. Name it there.")
    size = {"tp": tp, "cp": cp, "ep": 1, "dp": world_size // (tp * cp * pp), "pp": pp}
    return tuple(_placed(rank, names, size) for rank in range(world_size))


def _placed(rank: int, names: list[str], size: dict[str, int]) -> MegatronRank:
    place = dict.fromkeys(size, 0)
    for name in names:
        rank, place[name] = divmod(rank, size[name])
    replica = place["dp"] * size["cp"] + place["cp"]
    stage = place["pp"]
    first, last = stage == 0, stage == size["pp"] - 1
    return MegatronRank(
        replica=replica,
        stage=stage,
        tensor_rank=place["tp"],
        service_rank=(replica * size["pp"] + stage) * size["tp"] + place["tp"],
        parts=("inputs",) * first + ("labels",) * last,
    )


class ContextGroups:
    """Real process groups for packs that replicas share, other ones in each wave.

    Transformer Engine asks torch for a group's ranks, so these are groups of `new_group`, one for
    each stage and tensor rank. All ranks of the world make one `ContextGroups` with the same
    arguments (those of `megatron_ranks`), after `torch.distributed` is initialised.

    Contract: `prepare` is collective over all ranks of the world, and all call it with the same
    plan, from the training thread, between steps. A group is made, and connected, when a plan first
    names it, and none in a step. A replica keeps up to `max_groups` (more where two steps need
    more), and its oldest are destroyed by all of their members together. Failures are those of
    `new_group`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        order: str = MEGATRON_ORDER,
        max_groups: int = 64,
    ) -> None:
        ranks = megatron_ranks(world_size, tp=tp, pp=pp, order=order)
        self._me = ranks[dist.get_rank()]
        self._lanes: dict[tuple[int, int], dict[int, int]] = {}  # replica → Megatron's rank
        for rank, place in enumerate(ranks):
            lane = self._lanes.setdefault((place.stage, place.tensor_rank), {})
            lane[place.replica] = rank
        self._ledger = GroupLedger(max_groups)
        self._kept: dict[Members, dist.ProcessGroup] = {}

    def prepare(self, plan: PlanSummary) -> None:
        """Make the groups of a step that are missing, and destroy those long unused."""
        admitted, dropped = self._ledger.admit(group.replicas for group in plan.groups)
        for members in dropped:
            if (group := self._kept.pop(members, None)) is not None:
                dist.destroy_process_group(group)
        for members in admitted:
            if any(after < before for before, after in pairwise(members)):
                raise BadArgument(
                    f"the group {list(members)} does not name its replicas in rising order, as "
                    "torch's groups do, so that ranks would hold each other's chunks. Groups that "
                    "cross hosts may be so: leave replicas_per_node out of the job's topology."
                )
            for lane, rank_of in self._lanes.items():
                group = dist.new_group([rank_of[replica] for replica in members])
                if lane == (self._me.stage, self._me.tensor_rank) and self._me.replica in members:
                    self._kept[members] = group
                    # Else NCCL would make its communicator in the step, beside running kernels.
                    home = "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"
                    dist.all_reduce(torch.zeros(1, device=home), group=group)

    def of(self, microbatch: Microbatch) -> dist.ProcessGroup | None:
        """The group of a microbatch of the prepared step, None where its pack is not shared."""
        return self._kept[microbatch.cp_group] if len(microbatch.cp_group) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MegatronBatch:
    """What Megatron's models take, each [1, local tokens]; None for what was not fetched.

    `labels` are shifted already, and 0 where `loss_mask` (float32) is 0: ignored labels and
    padding. `position_ids` are [3, 1, local tokens] where the model counts by M-RoPE. `packed`
    are the fields of `PackedSeqParams`.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor
    packed: dict[str, object]


def megatron_batch(
    microbatch: Microbatch,
    *,
    rows_multiple: int = 1,
    groups: ContextGroups | None = None,
    cp: int = 1,
) -> MegatronBatch:
    """A microbatch in Megatron's names and its packed layout (`thd`).

    Each rank's rows become a multiple of `rows_multiple`: give T with sequence parallelism, times
    16 with FP8 (32 with MXFP8). The rows that are missing are one more sample of the pack, of
    tokens 0 without loss, and the same on all members of the group. An idle replica gets such a
    sample alone, because expert and data parallelism need every rank's passes.

    `groups` serves packs that are shared by changing groups, with Megatron's own context
    parallelism at 1. Without it, all packs must have Megatron's own degree `cp`
    (`static_degree` of the job). Raises BadArgument for any other pack, for M-RoPE in a shared
    pack, for which Megatron has no packed layout, and for loss weights, since Megatron divides by a
    whole number of tokens.
    """
    if microbatch.weights is not None:
        raise BadArgument(
            f"pack {microbatch.pack} has loss weights, and Megatron divides its loss by a whole "
            "number of tokens. Use run_step or run_pipeline_step of trainer_client.runtime, or "
            "take loss_weight out of the job file."
        )
    degree, cp_rank = _share(microbatch, groups, cp)
    rows = missing_rows(microbatch.local_tokens, multiple=rows_multiple, degree=degree)
    if microbatch.positions.ndim > 1 and degree > 1:
        raise BadArgument(
            f"pack {microbatch.pack} is shared by {degree} replicas and has M-RoPE positions, "
            "which Megatron does not cut sample by sample. Give the job static_degree: 1."
        )
    whole = extended(microbatch, rows, degree=degree, cp_rank=cp_rank)
    positions = whole.positions
    tokens = getattr(whole, "input_ids", None)
    labels = getattr(whole, "labels", None)
    return MegatronBatch(
        tokens=None if tokens is None else tokens[None],
        labels=None if labels is None else labels.clamp(min=0)[None],
        loss_mask=None if labels is None else (labels >= 0).float()[None],
        position_ids=positions[..., None, :],
        packed={
            **_packed_fields(whole, positions.device),
            **({} if groups is None else _group_fields(microbatch, groups)),
        },
    )


def _share(microbatch: Microbatch, groups: ContextGroups | None, cp: int) -> tuple[int, int]:
    """Degree and this replica's place among the members; Megatron's own where it is idle."""
    if groups is not None:
        if cp != 1:
            raise BadArgument(f"cp is {cp} beside groups; Megatron's own must be 1 with them.")
        return len(microbatch.cp_group), microbatch.cp_rank
    if microbatch.idle:
        return cp, microbatch.cp_group[0] % cp
    degree = len(microbatch.cp_group)
    if degree != cp:
        raise BadArgument(
            f"pack {microbatch.pack} is shared by {degree} replicas, and Megatron's context "
            f"parallelism is {cp}. Give the job plan: {{strategy: packing, static_degree: {cp}}}, "
            "or pass groups=ContextGroups(...) with Megatron's own at 1."
        )
    return degree, microbatch.cp_rank


def _packed_fields(microbatch: Microbatch, device: torch.device) -> dict[str, object]:
    """`cu_seqlens_*` int32[S+1] count true lengths and `*_padded` the places in the whole pack."""
    true, padded = microbatch.lengths.int(), microbatch.cu_seqlens.diff().int()
    fields: dict[str, object] = {"qkv_format": "thd"}
    for side in ("q", "kv"):
        fields[f"cu_seqlens_{side}"] = _offsets(true).to(device)
        fields[f"cu_seqlens_{side}_padded"] = _offsets(padded).to(device)
        fields[f"max_seqlen_{side}"] = int(padded.max())
    return fields


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _group_fields(microbatch: Microbatch, groups: ContextGroups) -> dict[str, object]:
    """A size of 1 without a group turns context parallelism off for this microbatch."""
    return {"local_cp_size": len(microbatch.cp_group), "cp_group": groups.of(microbatch)}
