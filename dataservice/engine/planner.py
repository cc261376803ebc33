"""Draw and plan one step: the pure function that recovery rests on.

(job file and its cost changes, index, cursor, topology) → step plan. The samples of a step are
fixed by the cursor alone, before topology and cost are looked at.
"""

from dataclasses import dataclass, replace

import numpy as np

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, PlanningError
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Draw
from dataservice.core.topology import Topology
from dataservice.engine.setup import JobSetup
from dataservice.planning.compose import StepSamples, compose_step, split_window
from dataservice.planning.validate import validate_plan

# One step in this many is checked against every invariant of the design.
VALIDATE_EVERY = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A plan, the cursor it was made from, and the cursor of the next step."""

    cursor: Cursor
    next_cursor: Cursor
    plan: StepPlan


def plan_step(setup: JobSetup, cursor: Cursor, topology: Topology) -> PlannedStep | None:
    """The step at `cursor`, or None when the last epoch is over.

    Raises PlanningError when a sample cannot be held by all replicas together.
    """
    drawn = draw_step(setup, cursor)
    if drawn is None:
        return None
    samples, next_cursor = drawn
    plan = compose_step(
        samples,
        step=cursor.step,
        topology=topology,
        options=setup.options_at(cursor.step),
        limits=setup.limits,
    )
    if cursor.step % VALIDATE_EVERY == 0:
        validate_plan(
            plan,
            memory_tokens=setup.options.memory_tokens,
            sample_count=len(samples.sample_ids),
        )
    return PlannedStep(cursor=cursor, next_cursor=next_cursor, plan=plan)


def draw_step(setup: JobSetup, cursor: Cursor) -> tuple[StepSamples, Cursor] | None:
    """The samples of the step at `cursor` and the cursor of the next one."""
    draws = _draw_window(setup, cursor)
    if cursor.step_in_window >= len(draws):
        return None
    ids = np.concatenate([draw.sample_ids for draw in draws])
    epoch = np.concatenate([draw.epoch for draw in draws])
    lengths = setup.catalog.lengths(ids)
    step_of = split_window(lengths, steps=len(draws), options=setup.options, limits=setup.limits)
    mine = np.flatnonzero(step_of == cursor.step_in_window)
    samples = StepSamples(sample_ids=ids[mine], epoch=epoch[mine], lengths=lengths.take(mine))
    return samples, _behind(cursor, draws, 1)


def pass_over(setup: JobSetup, cursor: Cursor, *, to_step: int) -> Cursor:
    """The cursor of `to_step`, or of the end of data where that comes first. The samples between
    are drawn and not looked at; in O(windows) draws."""
    while cursor.step < to_step:
        draws = _draw_window(setup, cursor)
        steps = min(len(draws) - cursor.step_in_window, to_step - cursor.step)
        if steps <= 0:
            break
        cursor = _behind(cursor, draws, steps)
    return cursor


def _behind(cursor: Cursor, draws: list[Draw], steps: int) -> Cursor:
    """The cursor so many steps further on, in its window of `draws` or at its end."""
    step, in_window = cursor.step + steps, cursor.step_in_window + steps
    if in_window < len(draws):
        return replace(cursor, step=step, step_in_window=in_window)
    end = draws[-1]
    return replace(
        cursor, step=step, epoch=end.next_epoch, position=end.next_position, step_in_window=0
    )


def _draw_window(setup: JobSetup, cursor: Cursor) -> list[Draw]:
    draws: list[Draw] = []
    epoch, position = cursor.epoch, cursor.position
    for _ in range(setup.options.window_steps):
        draw = setup.stream.draw(epoch=epoch, position=position, batch=setup.batch)
        if len(draw.sample_ids) == 0:
            break
        draws.append(draw)
        epoch, position = draw.next_epoch, draw.next_position
    return draws


def check_fits(setup: JobSetup, topology: Topology) -> None:
    """Raises PlanningError naming the longest sample if all replicas cannot hold it."""
    tokens = setup.catalog.lengths(np.arange(setup.catalog.samples)).llm_tokens
    longest = int(np.argmax(tokens))
    held = setup.options.longest_sample_tokens(topology.replicas)
    if tokens[longest] > held:
        ref, lengths = setup.catalog.details(np.array([longest]))[0]
        raise PlanningError(
            f"sample {ref.source}/{ref.key} has {lengths.llm_tokens} tokens; "
            f"{topology.replicas} replicas of {setup.options.memory_tokens} tokens hold at most "
            f"{held} together. Start more ranks, raise plan.memory_tokens, or set "
            "pipeline.max_sample_tokens and index again to leave such samples out."
        )


def in_order(cursor: Cursor, setup: JobSetup) -> Cursor:
    """The cursor, marked with the job's order of samples. Raises CursorMismatchError when it
    was made in another, where its place would mean other samples."""
    if cursor.order not in ("", setup.order):
        raise CursorMismatchError(
            f"the checkpoint at step {cursor.step} was made in sample order {cursor.order}, job "
            f"{setup.record.name!r} now has order {setup.order}: its sources, their weights or "
            "its seed are others. Resuming would lose some samples and repeat others; restore "
            "them, or start from the beginning."
        )
    return replace(cursor, order=setup.order)
