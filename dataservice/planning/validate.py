"""Does a step plan keep its promises? Every invariant of the design that a plan alone can show."""

import math

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.planning.encoder_memory.fit import rooms_left
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.invariants import Groups, check_assignment, check_groups, require
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.pieces import unit_counts
from dataservice.planning.routes import encode_order, feature_runs, item_packs, listed_items


def check_plan(
    plan: StepPlan, *, memory_tokens: int, sample_count: int, room: EncoderRoom | None = None
) -> None:
    """Raises PlanningError naming the first broken invariant; returns when all hold. O(n + m +
    P·degree): `compose_step` checks every plan in this way, in two parts. With `room`, no replica
    keeps more bytes of a wave than that."""
    check_packs(plan, memory_tokens=memory_tokens, sample_count=sample_count)
    check_items(plan, plan.item_replica, room)


def check_packs(plan: StepPlan, *, memory_tokens: int, sample_count: int) -> None:
    """Every sample is in exactly one pack; no member of a group holds more than `memory_tokens`; no
    replica is in two groups of a wave; packs are in wave order; seconds are numbers."""
    n = len(plan.sample_ids)
    require(n == sample_count, f"the plan holds {n} samples, {sample_count} were drawn")
    for name in ("sample_epoch", "sample_tokens", "sample_loss_tokens"):
        require(len(getattr(plan, name)) == n, f"{name} is not of {n} samples")
    weights = plan.sample_loss_weights
    if weights is not None:
        sound = len(weights) == n and bool((np.isfinite(weights) & (weights >= 0)).all())
        require(sound, f"sample_loss_weights are not {n} finite numbers from 0 on")
    check_groups(
        Groups(plan.pack_samples, plan.pack_offsets, plan.pack_replicas, plan.replica_offsets),
        plan.pack_wave,
        plan.sample_tokens,
        replicas=plan.replicas,
        memory_tokens=memory_tokens,
    )
    last = int(plan.pack_wave[-1]) + 1 if plan.packs else 0
    require(plan.waves == last, f"the plan has {plan.waves} waves and its packs {last}")
    timed = len(plan.pack_seconds) == plan.packs and bool((plan.pack_seconds >= 0).all())
    require(timed and math.isfinite(plan.predicted_s), "a pack has no time, or the step has none")


def check_items(
    plan: StepPlan, item_replica: NDArray[np.int32], room: EncoderRoom | None = None
) -> None:
    """Every item is of a sample and has one replica of the plan's that encodes it, and that has
    `room` for it beside its pack; each piece of an item but the first continues the one before."""
    m = len(plan.item_sample)
    for name in ("modality", "encoder_tokens", "llm_tokens", "position"):
        require(len(getattr(plan, f"item_{name}")) == m, f"item_{name} is not of {m} items")
    require(len(item_replica) == m, f"item_replica is not of {m} items")
    check_assignment(plan.item_sample, len(plan.sample_ids), "sample of an item")
    check_assignment(item_replica, plan.replicas, "replica of an item")
    if plan.item_first_unit is not None:
        _check_pieces(plan, plan.item_first_unit)
    if room is not None:
        _check_room(plan, item_replica, room)


def _check_pieces(plan: StepPlan, first: NDArray[np.int32]) -> None:
    """Rows that are no first piece begin at the unit and the token where the row before ends."""
    held = unit_counts(plan)
    require(len(first) == len(held) == len(plan.item_sample), "units are not of every item")
    require(len(first) == 0 or bool(first[0] == 0 and held.min() > 0), "a piece has no beginning")
    continued = _all_continued(
        first,
        held,
        plan.item_position,
        plan.item_llm_tokens,
        plan.item_sample,
        plan.item_modality,
    )
    require(continued, "a piece of an item does not continue the one before")


@kernel
def _all_continued(
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    position: NDArray[np.int32],
    llm_tokens: NDArray[np.int32],
    sample: NDArray[np.int32],
    modality: NDArray[np.int8],
) -> bool:
    for row in range(1, first.size):
        before = row - 1
        if first[row] > 0 and (
            first[row] != first[before] + held[before]
            or position[row] != position[before] + llm_tokens[before]
            or sample[row] != sample[before]
            or modality[row] != modality[before]
        ):
            return False
    return True


def _check_room(plan: StepPlan, item_replica: NDArray[np.int32], room: EncoderRoom) -> None:
    left = rooms_left(
        plan.pack_wave[item_packs(plan)],
        room.row_bytes(plan),
        item_replica,
        room.rooms(plan),
    )
    if left.size and left.min() < 0:
        wave, replica = np.unravel_index(int(left.argmin()), left.shape)
        require(
            False,
            f"in wave {wave} replica {replica} keeps {-left.min():,} bytes more than the "
            f"{room.microbatch_bytes:,} that a microbatch may keep",
        )


def validate_plan(
    plan: StepPlan, *, memory_tokens: int, sample_count: int, room: EncoderRoom | None = None
) -> None:
    """As `check_plan`, and that all feature rows of every item arrive where its text is. As much
    work as the routes themselves: for tests, and for some of the steps in production."""
    check_plan(plan, memory_tokens=memory_tokens, sample_count=sample_count, room=room)
    listed = listed_items(plan)
    runs = feature_runs(plan, listed, encode_order(plan, listed))
    arrived = np.bincount(runs.item, weights=runs.rows, minlength=len(plan.item_sample))
    require(
        bool((arrived == plan.item_llm_tokens).all()),
        "the exchange does not deliver every feature row of every item",
    )
