"""Draw and plan one step: the pure function that recovery rests on.

(job file and its cost changes, index, cursor, topology) → step plan. The samples of a step are
fixed by the cursor alone, before topology and cost are looked at.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, PlanningError
from dataservice.core.job_limits import DrawnSize
from dataservice.core.job_setup import JobSetup
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog, Draw
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.compose import StepSamples, compose_step, split_window
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.encoder_memory.waves import sample_without_room
from dataservice.planning.stages.room import step_room
from dataservice.planning.validate import validate_plan

# Every plan is checked as it is made; of one step in this many, that the exchange delivers every
# feature row is checked too.
VALIDATE_EVERY = 16
SAMPLES_AT_ONCE = 1 << 18  # whose lengths are copied to look for items that have no room


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A plan, the cursor it was made from, and the cursor of the next step."""

    cursor: Cursor
    next_cursor: Cursor
    plan: StepPlan


def plan_step(setup: JobSetup, cursor: Cursor, topology: Topology) -> PlannedStep | None:
    """The step at `cursor`, or None when the last epoch is over.

    Raises PlanningError where all replicas together cannot hold a sample, QuotaError where the
    step is larger than the service takes.
    """
    drawn = draw_step(setup, cursor)
    if drawn is None:
        return None
    samples, next_cursor = drawn
    _size(samples.lengths).require_replicas(setup.job_limits, topology.replicas)
    plan = compose_step(
        samples,
        step=cursor.step,
        topology=topology,
        options=setup.options_at(cursor.step),
        limits=setup.limits_at(cursor.begun),
    )
    if cursor.step % VALIDATE_EVERY == 0:
        validate_plan(
            plan,
            memory_tokens=setup.options.memory_tokens,
            sample_count=len(samples.sample_ids),
            room=EncoderRoom.of(setup.options.memory, topology),
        )
    setup.job_limits.check("max_waves", plan.waves, f"microbatches a replica in step {plan.step}")
    return PlannedStep(cursor=cursor, next_cursor=next_cursor, plan=plan)


def draw_step(setup: JobSetup, cursor: Cursor) -> tuple[StepSamples, Cursor] | None:
    """The samples of the step at `cursor` and the cursor of the next one. Raises QuotaError
    where more are drawn than may be for one step."""
    draws = _draw_window(setup, cursor)
    if cursor.step_in_window >= len(draws):
        return None
    ids, epoch, lengths = _of_step(setup, cursor, draws)
    samples = StepSamples(
        sample_ids=ids,
        epoch=epoch,
        lengths=lengths,
        loss_weights=_loss_weights(setup, ids),
        unit_frames=setup.unit_frames,
    )
    return samples, _behind(setup, cursor, draws, 1)


def step_ids(setup: JobSetup, cursor: Cursor) -> NDArray[np.int64]:
    """The samples of the step at `cursor`, which is not past the end: int64[n]. What is read of
    them is their lengths, which an index always has at hand. Raises as `draw_step` does."""
    ids, _, _ = _of_step(setup, cursor, _draw_window(setup, cursor))
    return ids


def _of_step(
    setup: JobSetup, cursor: Cursor, draws: list[Draw]
) -> tuple[NDArray[np.int64], NDArray[np.int32], LengthTable]:
    """Of the samples of one step of a window of `draws`: ids, epochs and lengths."""
    ids = np.concatenate([draw.sample_ids for draw in draws])
    epoch = np.concatenate([draw.epoch for draw in draws])
    lengths = setup.catalog.lengths(ids)
    _size(lengths).require_step(setup.job_limits)
    step_of = split_window(
        lengths,
        steps=len(draws),
        options=setup.options,
        limits=setup.limits_at(cursor.begun),
    )
    if len(draws) > 1:  # else all are of this step
        mine = np.flatnonzero(step_of == cursor.step_in_window)
        ids, epoch, lengths = ids[mine], epoch[mine], lengths.take(mine)
    return ids, epoch, lengths


def drawn_ids(setup: JobSetup, cursor: Cursor) -> NDArray[np.int64]:
    """The samples of the window of the step at `cursor`: int64[n]. O(samples drawn)."""
    ids = [draw.sample_ids for draw in _draw_window(setup, cursor)]
    return np.concatenate([np.zeros(0, np.int64), *ids])


def _loss_weights(setup: JobSetup, sample_ids: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Each sample's own weight times its source's; None where all are 1."""
    if not setup.loss_weights:
        return None
    of_source = np.array(setup.loss_weights)[setup.catalog.source_numbers(sample_ids)]
    weights = of_source * setup.catalog.loss_weights(sample_ids)
    return None if (weights == 1).all() else weights


def _size(lengths: LengthTable) -> DrawnSize:
    return DrawnSize(samples=len(lengths), tokens=float(lengths.llm_tokens.sum(dtype=np.int64)))


def pass_over(setup: JobSetup, cursor: Cursor, *, to_step: int) -> Cursor:
    """The cursor of `to_step`, or of the end of data where that comes first. The samples between
    are drawn, but their lengths are not looked up: O(windows) draws. Changes of the mixture begin
    behind the cursor's own window, which is drawn as the cursor says."""
    while cursor.step < to_step:
        draws = _draw_window(setup, cursor)
        steps = min(len(draws) - cursor.step_in_window, to_step - cursor.step)
        if steps <= 0:
            break
        cursor = _behind(setup, cursor, draws, steps)
        if cursor.step < to_step:
            cursor = setup.stream.begin_changes(cursor)
    return cursor


def _behind(setup: JobSetup, cursor: Cursor, draws: list[Draw], steps: int) -> Cursor:
    """The cursor `steps` further on, in its window of `draws` or at its end."""
    step, in_window = cursor.step + steps, cursor.step_in_window + steps
    if in_window < len(draws):
        return replace(
            cursor,
            step=step,
            step_in_window=in_window,
            window=window_of(setup, cursor),
            order=setup.order,
        )
    end = draws[-1]
    return Cursor(
        step=step,
        epoch=end.next_epoch,
        position=end.next_position,
        order=setup.order,  # which may have grown while the attempt runs
        begun=end.next_begun,
    )


def _draw_window(setup: JobSetup, cursor: Cursor) -> list[Draw]:
    draws: list[Draw] = []
    epoch, position, begun = cursor.epoch, cursor.position, cursor.begun
    for _ in range(setup.options.window_steps):
        draw = setup.stream.draw(epoch=epoch, position=position, batch=setup.batch, begun=begun)
        if len(draw.sample_ids) == 0:
            break
        draws.append(draw)
        epoch, position, begun = draw.next_epoch, draw.next_position, draw.next_begun
    return draws


def check_fits(setup: JobSetup, topology: Topology) -> None:
    """Raises QuotaError where a step would be too large for these replicas, and PlanningError,
    naming the longest sample, where they cannot hold it together. Waits for no storage."""
    _require_size(setup, topology.replicas)
    widest = setup.options.widest_degree(topology.replicas)
    held = setup.options.longest_sample_tokens(topology.replicas)
    longest = np.array([setup.catalog.longest_sample])
    (tokens,) = setup.catalog.lengths(longest).llm_tokens
    if tokens > held:
        raise PlanningError(
            f"{_named(setup, setup.catalog.longest_sample)} has {tokens} tokens; {widest} of "
            f"{topology.replicas} replicas of {setup.options.memory_tokens} tokens, as many as may "
            f"share a sample, hold at most {held} together. Start more ranks, raise "
            "plan.memory_tokens (or the budget_bytes of plan.memory; plan.static_degree, where the "
            "job gives one), or say under pipeline.longer_than that such samples are cut or left "
            "out, and index again: these are other data, which checkpoints of the job do not fit."
        )
    _require_room(setup, topology)


def _require_room(setup: JobSetup, topology: Topology) -> None:
    """Raises PlanningError naming a sample whose encoder items these replicas have no room for."""
    room = EncoderRoom.of(setup.options.memory, topology)
    found = find_without_room(setup, topology)
    if room is None or found is None:
        return
    lengths = setup.catalog.lengths(np.array([found]))
    units = lengths.item_units(setup.unit_frames)
    step = step_room(lengths, units, topology, setup.options, room)
    sizes = step.units * step.unit_bytes
    raise PlanningError(
        f"{_named(setup, found)} has {len(sizes)} images, clips or recordings "
        f"of {sizes.sum():,} bytes in their encoders, the largest {step.unit_bytes.max():,} (of "
        f"one that may be cut, a unit), and {lengths.llm_tokens[0]} tokens. A replica may keep "
        f"{room.microbatch_bytes:,} bytes of a microbatch, its tokens included; "
        f"{topology.replicas} have no room for these. Start more ranks, raise "
        "plan.memory.budget_bytes, recompute in the encoders, or have pipeline.vision and "
        "pipeline.audio make fewer tokens of an item and index again: these are other data, "
        "which checkpoints of the job do not fit."
    )


def _named(setup: JobSetup, sample_id: int) -> str:
    """What messages call a sample: by its key, or by its number in its source while its index is
    still being read, for whose storage nobody is to wait who only asks whether a job fits."""
    catalog = setup.catalog
    if catalog.at_hand:
        ((ref, _),) = catalog.details(np.array([sample_id]))
        return f"sample {ref.source}/{ref.key}"
    (place,) = catalog.source_numbers(np.array([sample_id]))
    source, number = catalog.source_names[place], sample_id - sum(catalog.sizes[:place])
    shown = f"dataservice preview JOB.yaml --source {source} --sample {number}"
    return f"sample {number} of source {source} (`{shown}` shows it)"


# By catalog, what was found for its options and topologies: every rank asks.
_without_room: WeakKeyDictionary[Catalog, dict[Hashable, int | None]] = WeakKeyDictionary()


def find_without_room(setup: JobSetup, topology: Topology) -> int | None:
    """The id of a sample whose encoder items these replicas have no room for, None where there is
    none. Looks at every sample of the catalog, once for each topology: not for an event loop."""
    room, options = EncoderRoom.of(setup.options.memory, topology), setup.options
    if room is None:
        return None
    known = _without_room.setdefault(setup.catalog, {})
    asked = (room, options.memory_tokens, options.stages, options.static_degree, topology)
    if asked not in known:
        known[asked] = _search_without_room(setup, topology, room)
    return known[asked]


def _search_without_room(setup: JobSetup, topology: Topology, room: EncoderRoom) -> int | None:
    for first in range(0, setup.catalog.samples, SAMPLES_AT_ONCE):
        ids = np.arange(first, min(first + SAMPLES_AT_ONCE, setup.catalog.samples))
        lengths = setup.catalog.lengths(ids)
        if setup.options.stages.context != "static":  # which may put all on wider groups
            rows = room.may_be_lacked_by(lengths, setup.options.memory_tokens)
            if not rows.size:
                continue
            ids, lengths = ids[rows], lengths.take(rows)
        units = lengths.item_units(setup.unit_frames)
        step = step_room(lengths, units, topology, setup.options, room)
        found = sample_without_room(step, setup.options.memory_tokens)
        if found is not None:
            return int(ids[found])
    return None


def _require_size(setup: JobSetup, replicas: int) -> None:
    limits, size = setup.job_limits, setup.epoch_size
    if setup.options.solver == "dp":
        limits.check("max_dp_replicas", replicas, "replicas under plan.solver dp")
    if size is not None:
        size.drawn(setup.batch, setup.options.window_steps).require_replicas(limits, replicas)
        step_tokens = size.drawn(setup.batch, 1).tokens
        waves = step_tokens / (replicas * setup.options.memory_tokens)
        limits.check("max_waves", waves, f"microbatches a step for each of {replicas} replicas")


def in_order(cursor: Cursor, setup: JobSetup) -> Cursor:
    """The cursor, marked with the job's order of samples. Raises CursorMismatchError where it was
    made in another order, in which its place would mean other samples, or inside a window of
    steps that would be split otherwise now."""
    fits = cursor.order == setup.order or cursor.order in setup.earlier_orders
    if not fits and not (cursor.order == "" and cursor.at_beginning):
        raise CursorMismatchError(
            f"the checkpoint at step {cursor.step} was made in sample order "
            f"{cursor.order or 'of no job'}, job {setup.record.name!r} has order {setup.order}: "
            "it is of another job, of sources that this one lacks, of other samples, files' names, "
            "weights, tokenizer or seed, or of another release. Resuming would lose some samples "
            "and repeat others; take a checkpoint of this job, or submit the job that it is of."
        )
    if cursor.step_in_window and cursor.window != window_of(setup, cursor):
        raise CursorMismatchError(
            f"the checkpoint at step {cursor.step} lies inside a window of steps that was split "
            f"by {cursor.window or 'nothing'}; job {setup.record.name!r} would split it by "
            f"{window_of(setup, cursor)}. Resuming would lose some samples and repeat others: "
            "submit the former values and train to the end of the window, or take the last "
            f"checkpoint before step {cursor.step - cursor.step_in_window + 1}."
        )
    setup.stream.drawn(cursor)  # refuses a place that is none
    return replace(cursor, order=setup.order)


def window_of(setup: JobSetup, cursor: Cursor) -> str:
    """What decides how the samples of the cursor's window are split into steps, besides their
    order."""
    batch, limits = setup.batch, setup.limits_at(cursor.begun)
    size = f"{batch.samples} samples" if batch.samples is not None else f"{batch.tokens} tokens"
    packs = (
        ""
        if limits is None
        else (
            f", packs of {limits.min_text}-{limits.max_text} text and "
            f"{limits.min_vision}-{limits.max_vision} vision tokens"
        )
    )
    memory = "" if limits is not None else f", plan.memory_tokens {setup.options.memory_tokens}"
    return f"batch {size}, plan.window_steps {setup.options.window_steps}{packs}{memory}"
