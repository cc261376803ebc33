"""All stages of one step, in order: pack → group → assign → dispatch → order → StepPlan.

Every stage reports its cost before and after and a lower bound, in its own unit, and every
stage can be a named baseline, so that a comparison runs through this same code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.layout import padded_tokens, sample_starts
from dataservice.core.plan import ITEM_COLUMNS, StageReport, StepPlan, StepTime
from dataservice.core.plan_options import (
    STRATEGIES,
    IsfLimits,
    PlanOptions,
    Strategy,
)
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.context.check import joined
from dataservice.planning.context.groups import ContextPlan, ContextWaves
from dataservice.planning.encoder_memory.room import AllBytes, EncoderRoom
from dataservice.planning.encoder_memory.waves import NoRoomError
from dataservice.planning.invariants import check_permutation
from dataservice.planning.loads.partition import partition
from dataservice.planning.stages.assign import assign_packs
from dataservice.planning.stages.at_home import keep_near, seconds_at_home
from dataservice.planning.stages.dispatch import (
    MODALITIES,
    EncoderItems,
    dispatch_reports,
    encoder_items,
    encoder_loads,
    encoding_bounds,
)
from dataservice.planning.stages.effort import Effort, forming_s, later_s
from dataservice.planning.stages.encoders import place_items
from dataservice.planning.stages.gather import gathered_waves
from dataservice.planning.stages.group import (
    FEW_SAMPLES,
    WORTH_TRYING,
    PackedStep,
    full_attention,
    group_packs,
    group_report,
)
from dataservice.planning.stages.order import order_waves
from dataservice.planning.stages.pack import isf_packs, pack_report, pack_samples
from dataservice.planning.stages.room import (
    beside_encoders,
    bound_in_bytes,
    bound_in_tokens,
    least_for,
    static_degree,
    waves_in_room,
)
from dataservice.planning.stages.static_bounds import StaticBounds
from dataservice.planning.step_bound import StepBound, busiest_parts
from dataservice.planning.step_time import Phases, chunk_times, step_phases, time_phases
from dataservice.planning.validate import check_packs

# A plan this close to the bound of the whole step is not compared with others.
NEAR = 1.001
BASELINES: tuple[Strategy, ...] = ("packing", "length_grouped", "random")
# Into how many parts the memory of a replica is cut for the microbatches of a pipeline; or what a
# wave of the step's own plan fills of it, as memory may be there for far more than a step has.
SMALLER = (2**0.5, 2, 2 * 2**0.5, 4, 8, 16)
ALIKE = 1.1  # of two sizes less than this apart, one is tried
# Where encoders share the memory, the part of the tokens that would fit in an average wave: then
# fewer waves have more to encode than they have room for.
ROOMIER = (0.92, 0.84)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples of a step in draw order: `sample_ids` int64[n], `epoch` int32[n], lengths, and
    `loss_weights` float64[n], None where all are 1. `unit_frames`: frames that the vision encoder
    takes together, between which items may be cut; 0 where they are whole."""

    sample_ids: NDArray[np.int64]
    epoch: NDArray[np.int32]
    lengths: LengthTable
    loss_weights: NDArray[np.float64] | None = None
    unit_frames: int = 0


def split_window(
    lengths: LengthTable, *, steps: int, options: PlanOptions, limits: IsfLimits | None = None
) -> NDArray[np.int32]:
    """Which step of a window each drawn sample is trained in: int32[n].

    Packs of the whole window are spread over its steps by tokens, so that all steps cost about
    the same (OmniBal's grouping over many batches). It looks at lengths alone: the split is the
    same at any N.
    """
    if steps <= 1 or len(lengths) == 0:
        return np.zeros(len(lengths), dtype=np.int32)
    pack_of = isf_packs(lengths, options, limits)
    pack_tokens = np.bincount(pack_of, weights=lengths.llm_tokens)
    return partition(pack_tokens, steps).rank_of[pack_of]


def compose_step(
    samples: StepSamples,
    *,
    step: int,
    topology: Topology,
    options: PlanOptions,
    limits: IsfLimits | None = None,
) -> StepPlan:
    """Plan one step. Pure; raises PlanningError where a sample cannot fit. Each part of
    the plan is checked before others are made from it, as `check_plan` does.

    Strategy `full` also looks at what its baselines make of the step, and in a pipeline at smaller
    microbatches, and takes whatever ends first, as long as that is not proven to be near enough.

    `limits` for ISF are found once a job, over all its samples; without them the paper's rule
    is applied to the step's own.
    """
    lengths = samples.lengths
    whole = options.over(topology)
    units = lengths.item_units(samples.unit_frames)
    bound = StepBound(lengths, topology, whole, units)
    room = EncoderRoom.of(options.memory, topology) if len(lengths.item_modality) else None
    held = None if room is None else room.of_all(lengths)
    options = beside_encoders(lengths, held, topology, whole)
    effort = Effort(bound.given())
    eta = full_attention(lengths, options.full_attention)
    given = _Given(lengths, units, eta, topology, limits, room, effort)
    own = _Waves(given, _Variant(options=(options,)))
    packed, found = own.packed, own.with_room
    waves_s = found.lower_bound_s
    if held is not None and options.memory_tokens < whole.memory_tokens:
        waves_s = bound_in_bytes(lengths, held, topology, whole, waves_s)
        found = replace(found, lower_bound_s=waves_s)
    elif packed.restricts:  # no bound of all plans is that of these packs or degrees
        waves_s = bound_in_tokens(lengths, eta, topology, whole)
    best = first = _composed(samples, units, step, packed, found)
    bound_s = bound.given(waves_s)
    static = StaticBounds(lengths, eta, topology, units, room)

    def composing_s(waves: int) -> float:
        pieces = None if held is None else held.pieces
        sizes = len(lengths), len(lengths.item_modality), pieces
        return later_s(*sizes, waves, topology.replicas, topology.pipeline_stages)

    effort.take(composing_s(len(found.waves)))

    def improved(made: _Composed, waves: _Waves) -> _Composed:
        """The plan, or one of the same packs if it ends sooner: with heavy items in few waves or,
        where replicas meet once a step, at home."""
        once = not bound.counts_waves
        more_s = composing_s(len(made.found.waves))
        if not effort.allows(more_s):
            return made
        if not (made.balances_items if once else made.waits_for_encoders):
            return made
        effort.take(more_s)
        found = made.found if once else waves.gathered(made)
        if found is None:
            return made
        other = _composed(samples, units, step, made.packed, found, at_home=once)
        return min(made, other, key=lambda each: each.time.total_s)

    done = best.time.total_s <= bound_s * NEAR  # as most small steps are
    done = done or not _decides_all(options) or len(lengths) == 0
    if not done:
        best = improved(best, own)
    plans = [first]
    for rival in () if done else _rivals(lengths, held, topology, options, whole, plans):
        step_s = effort.step_s = best.time.total_s
        if step_s <= bound_s * NEAR:
            break
        more_s = composing_s(rival.waves)
        forming = rival.forming_s(len(lengths), topology.replicas)
        if not rival.due and not effort.allows(forming + more_s):
            continue
        waves = own if rival.of_own else _Waves(given, rival)
        if any(least_s >= step_s for least_s in waves.least_s(static, bound)):
            continue
        try:
            found = waves.with_room
        except NoRoomError:
            continue  # at one degree for all, items may have room nowhere
        for other in rival.options:
            if bound.of(found) >= best.time.total_s:
                continue
            as_formed = room is None and _stays_as_formed(other)
            if as_formed and bound.as_formed(found) >= best.time.total_s:
                continue
            if rival.due and other == rival.options[0]:
                effort.take(more_s)
            elif not effort.spend(more_s):
                break
            packed = replace(waves.packed, options=other)
            plans.append(improved(_composed(samples, units, step, packed, found), waves))
            best = min(best, plans[-1], key=lambda each: each.time.total_s)
    report = StageReport(
        stage="step",
        algorithm=best.options.strategy,
        unit="s",
        before=first.time.total_s,
        after=best.time.total_s,
        lower_bound=bound_s,
    )
    return best.plan((report,))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Composed:
    """A plan by `options`, and what its stages have to report: `items` as they were drawn; the
    slowest replicas of all waves take `encoded_s` float64[modalities], and no phase takes less than
    `encoding_s` float64[phases], which is known where items are balanced. The busiest stage works
    for `busy_s`."""

    options: PlanOptions
    packed: PackedStep
    found: ContextWaves
    lengths: LengthTable
    grouped: StepPlan
    items: EncoderItems
    encoded_s: NDArray[np.float64]
    encoding_s: NDArray[np.float64] | None
    busy_s: float
    time: StepTime
    reports: tuple[StageReport, ...]

    @property
    def waits_for_encoders(self) -> bool:
        """Whether replicas wait for slower encoders for a part of the step that is worth trying to
        save."""
        waiting_s = self.encoded_s - self.items.mean_s(self.grouped.replicas)
        return bool(waiting_s.sum() > (WORTH_TRYING - 1.0) * self.time.total_s)

    @property
    def balances_items(self) -> bool:
        """Whether packs and items may be on any replica, and there are items."""
        stages = self.options.stages
        return stages.assign == stages.dispatch == "balanced" and len(self.items.home) > 0

    def plan(self, more: tuple[StageReport, ...]) -> StepPlan:
        """The whole plan, with the reports of its stages and then these."""
        encoding_s, replicas = self.encoding_s, self.grouped.replicas
        if encoding_s is None:
            encoding_s = encoding_bounds(self.items, replicas)
        reports = (
            pack_report(self.lengths, self.packed.packed[1], self.found.waves, self.options),
            group_report(self.packed, self.found),
            *self.reports,
            *dispatch_reports(
                self.items,
                self.encoded_s,
                encoding_s,
                replicas,
                self.options.stages.dispatch,
            ),
            *more,
        )
        return replace(self.grouped, stages=reports, predicted_s=self.time.total_s, time=self.time)


class _Given(NamedTuple):
    """What all variants of a plan have in common: `units` int32[m] of the items, None where they
    are whole; `eta` float64[n], None where all attention is causal; the `room` that items share
    with the decoder, None where they need none; and the `effort` that forming waves is counted
    in."""

    lengths: LengthTable
    units: NDArray[np.int32] | None
    eta: NDArray[np.float64] | None
    topology: Topology
    limits: IsfLimits | None
    room: EncoderRoom | None
    effort: Effort


class _Waves:
    """The packs and the groups of a variant of the plan."""

    def __init__(self, given: _Given, variant: "_Variant") -> None:
        self._given, self._options, self._unpadded = given, variant.options[0], variant.unpadded

    @cached_property
    def packed(self) -> PackedStep:
        """The packs alone."""
        return self._packed(self._given.lengths, self._given.eta, self._options)

    @cached_property
    def formed(self) -> ContextWaves:
        """Waves as their packs are formed, whether or not there is room for all items."""
        return group_packs(self.packed)

    @cached_property
    def with_room(self) -> ContextWaves:
        """Waves that have room for their items. Raises NoRoomError."""
        return self._in_room(self.formed)

    def gathered(self, made: _Composed) -> ContextWaves | None:
        """The waves of a plan `made` of these packs, heavy items in few of them; None where that
        promises little or has no room."""
        topology = self._given.topology
        waves = gathered_waves(
            made.found.waves,
            made.items,
            replicas=topology.replicas,
            ranks_per_node=topology.replicas_per_node or topology.replicas,
            parts=busiest_parts(topology, made.found.makespan_s, made.encoded_s),
        )
        try:
            return None if waves is None else self._in_room(replace(made.found, waves=waves))
        except NoRoomError:
            return None

    def _in_room(self, found: ContextWaves) -> ContextWaves:
        lengths, units, room = self._given.lengths, self._given.units, self._given.room
        if room is None:
            return found

        def group(some: LengthTable, fewer: PlanOptions) -> tuple[ContextPlan, ...]:
            eta = full_attention(some, fewer.full_attention)
            return group_packs(self._packed(some, eta, fewer)).waves

        return replace(
            found, waves=waves_in_room(lengths, units, self.packed, found.waves, room, group)
        )

    def least_s(self, static: StaticBounds, bound: StepBound) -> Iterator[float]:
        """What a step of static waves takes at least, what is quick to tell first; nothing is told
        of others. What has no room leaves its wave, but for the slowest pack."""
        options = self._options
        if options.stages.context != "static":
            return
        degree = static_degree(self._given.lengths, self._given.topology.replicas, options)
        least = static.of_any(degree, options)
        yield bound.given(max(least.spread_s, least.longest_s), mean_s=least.mean_s)
        if bound.counts_waves and static.packs_stay(degree, options):
            yield from map(bound.given, static.of_packs(degree, options, least.spread_s))
            yield bound.of(self.formed)

    def _packed(
        self, lengths: LengthTable, eta: NDArray[np.float64] | None, options: PlanOptions
    ) -> PackedStep:
        """What the group stage is given."""
        topology, limits = self._given.topology, self._given.limits
        degree = static_degree(lengths, topology.replicas, options)
        packs, charged = pack_samples(lengths, degree=degree, options=options, limits=limits)
        if self._unpadded:
            charged = padded_tokens(lengths.llm_tokens, degree)
        return PackedStep(
            tokens=lengths.llm_tokens.astype(np.int64),
            packed=(packs, charged),
            degree=degree,
            topology=topology,
            options=options,
            effort=self._given.effort,
            full_attention=eta,
        )


def _composed(
    samples: StepSamples,
    units: NDArray[np.int32] | None,
    step: int,
    packed: PackedStep,
    found: ContextWaves,
    *,
    at_home: bool = False,
) -> _Composed:
    """The plan of these groups, each later stage by its algorithm; `units` int32[m] of the items,
    None where they are whole. `at_home`: packs and items are balanced over the whole step, and most
    items stay with their text."""
    lengths, options, topology = samples.lengths, packed.options, packed.topology
    stages, replicas = options.stages, topology.replicas
    seconds = near = None
    if at_home:
        loose = replace(
            _grouped_plan(samples, found.waves, step, replicas, options), item_units=units
        )
        items = encoder_items(loose, options.cost)
        parts = busiest_parts(topology, found.makespan_s, items.mean_s(replicas))
        seconds = seconds_at_home(found.waves, items, parts)
    waves, seated = assign_packs(
        found.waves, replicas=replicas, algorithm=stages.assign, seconds=seconds
    )
    grouped = replace(_grouped_plan(samples, waves, step, replicas, options), item_units=units)
    held_tokens = options.over(topology).memory_tokens
    check_packs(grouped, memory_tokens=held_tokens, sample_count=len(lengths))
    items = encoder_items(grouped, options.cost)
    encoding_s = None if stages.dispatch == "home" else encoding_bounds(items, replicas)
    if at_home:
        near = keep_near(grouped, items, parts)
    grouped, pieces = place_items(grouped, items, encoding_s, topology, options, near=near)
    phases = step_phases(grouped, pieces, options.cost, topology)
    times = chunk_times(phases, topology)
    order, ordered = order_waves(
        times,
        algorithm=stages.order,
        stages=topology.pipeline_stages,
        virtual_stages=topology.virtual_stages,
    )
    check_permutation(order, len(waves), "order of waves")
    if (order != np.arange(len(waves))).any():
        in_order = _grouped_plan(samples, tuple(waves[w] for w in order), step, replicas, options)
        grouped = replace(in_order, **{name: getattr(grouped, name) for name in ITEM_COLUMNS})
        pieces = encoder_loads(grouped, options.cost)
        phases = Phases(*(of_wave[order] for of_wave in phases))
    return _Composed(
        options=options,
        packed=packed,
        found=found,
        lengths=lengths,
        grouped=grouped,
        items=items,
        encoded_s=phases.encode.max(axis=2).sum(axis=0),
        encoding_s=encoding_s,
        busy_s=times.busiest_s(topology.pipeline_stages),
        time=time_phases(phases, grouped, pieces, topology, options.cost),
        reports=tuple(report for report in (seated, ordered) if report is not None),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variant:
    """Plans of the same packs and groups, which only later stages tell apart, in about so many
    `waves`. `of_own`: those of the step's own plan. `unpadded`: priced as a trainer that packs
    computes it, although the algorithm is a baseline's that pads. `due`: the first is compared
    whatever that takes."""

    options: tuple[PlanOptions, ...]
    waves: int = 0
    of_own: bool = False
    unpadded: bool = False
    due: bool = False

    def forming_s(self, samples: int, replicas: int) -> float:
        """About what forming its waves will take: next to nothing where they are static or those of
        the own plan."""
        if self.of_own or self.options[0].stages.context == "static":
            return 0.0
        return forming_s(samples, self.waves, replicas)


def _decides_all(options: PlanOptions) -> bool:
    """Whether strategy `full` decides about every stage."""
    return options.strategy == "full" and options.stages == STRATEGIES["full"]


def _stays_as_formed(options: PlanOptions) -> bool:
    """Whether no later stage changes anything, as in baselines."""
    stages = options.stages
    return (stages.assign, stages.order, stages.dispatch) == ("as_packed", "as_formed", "home")


def _rivals(
    lengths: LengthTable,
    held: AllBytes | None,
    topology: Topology,
    options: PlanOptions,
    whole: PlanOptions,
    made: list[_Composed],
) -> Iterator[_Variant]:
    """What strategy `full` compares its own plan with, the first that was `made`; all plans of
    rivals are added to those. `whole`: the options with all the tokens that memory holds."""
    stages, waves = STRATEGIES["full"], len(made[0].found.waves)
    if options.memory_tokens < whole.memory_tokens:
        least = least_for(lengths, topology, options)
        if len(lengths) <= FEW_SAMPLES:  # else many leave their waves, and are grouped six times
            yield _Variant(options=(whole,), waves=waves)
        for part in ROOMIER:
            tokens = max(least, int(options.memory_tokens * part))
            yield _Variant(options=(replace(options, memory_tokens=tokens),), waves=waves)
    if topology.replicas_meet == "step" or options.cost.step.version:
        yield _Variant(options=(replace(options, dispatch="home"),), waves=waves, of_own=True)
    if topology.pipeline_stages > 1:
        yield from _smaller(lengths, topology, options, made)
    unnamed = dict.fromkeys(("pack", "context", "assign", "order", "dispatch"))
    for name in BASELINES:
        plain = replace(options, strategy=name, **unnamed)  # type: ignore[arg-type]
        try:
            plain.static_degree_of(int(lengths.llm_tokens.max()), topology.replicas)
        except PlanningError:  # the step's own plan is of any degree: a rival may be too
            plain = replace(plain, static_degree=None)
        # By itself it would leave room for encoders at its own degree.
        level = beside_encoders(
            lengths, held, topology, replace(plain, memory_tokens=whole.memory_tokens)
        )
        for each in (level,) if level == plain else (level, plain):
            seats = replace(
                each, assign=stages.assign, order=stages.order, dispatch=stages.dispatch
            )
            yield _Variant(options=(each, seats), waves=waves, unpadded=True, due=held is None)
        if level.stages.pack.startswith("padded") and held is not None:
            # Other packs leave its waves where padding is paid for.
            yield _Variant(options=(level,), waves=waves)


def _smaller(
    lengths: LengthTable, topology: Topology, options: PlanOptions, made: list[_Composed]
) -> Iterator[_Variant]:
    """Smaller microbatches, those first that promise most: a pipeline fills and drains sooner by
    as much as there are more of them, and each costs what a group always takes. What a plan `made`
    of some takes beyond that, as items do in small waves, is taken to grow with their number."""
    own = made[0]
    waves, waiting_s = len(own.found.waves), own.time.total_s - own.busy_s
    part = busiest_parts(topology, 1.0, np.zeros(MODALITIES)).decoder
    fixed_s = waves * part * options.cost.llm.group_s
    longest, limit = int(lengths.llm_tokens.max()), options.memory_tokens
    needed = -(-int(lengths.llm_tokens.sum(dtype=np.int64)) // (topology.replicas * waves))
    left: dict[int, PlanOptions] = {}  # by tokens
    for tokens in (max(1, int(most / parts)) for most in (limit, needed) for parts in SMALLER):
        smaller = replace(options, memory_tokens=tokens)
        new = all(max(tokens, other) > ALIKE * min(tokens, other) for other in (limit, *left))
        if new and smaller.longest_sample_tokens(topology.replicas) >= longest:
            left[tokens] = smaller
    beyond_s = 0.0
    while left:
        more = {each: max(needed / each, 1.0) - 1.0 for each in left}  # waves, for each of the own
        plain_s = {
            each: own.busy_s + waiting_s / (1.0 + more[each]) + more[each] * fixed_s
            for each in left
        }
        tokens = min(left, key=lambda each: plain_s[each] + more[each] * beyond_s)
        before = len(made)
        yield _Variant(options=(left.pop(tokens),), waves=int(waves * (1 + more[tokens])) + 1)
        if more[tokens] > 0:
            found_s = min(plan.time.total_s for plan in made[before:] or made)  # refused: no less
            beyond_s = (found_s - plain_s[tokens]) / more[tokens]


def _grouped_plan(
    samples: StepSamples,
    waves: tuple[ContextPlan, ...],
    step: int,
    replicas: int,
    options: PlanOptions,
) -> StepPlan:
    """The plan with its packs and groups, encoder items not yet given to anyone."""
    lengths = samples.lengths
    item_sample = np.repeat(np.arange(len(lengths), dtype=np.int32), np.diff(lengths.item_offsets))
    return StepPlan(
        step=step,
        replicas=replicas,
        waves=len(waves),
        cost_version=options.cost.version,
        predicted_s=0.0,
        sample_ids=samples.sample_ids,
        sample_epoch=samples.epoch,
        sample_tokens=lengths.llm_tokens,
        sample_loss_tokens=lengths.loss_tokens,
        sample_loss_weights=samples.loss_weights,
        pack_offsets=sample_starts(joined([np.diff(w.sample_offsets) for w in waves], np.int64)),
        pack_samples=joined([w.samples for w in waves], np.int32),
        pack_wave=np.repeat(np.arange(len(waves), dtype=np.int32), [len(w.time_s) for w in waves]),
        pack_seconds=joined([w.time_s for w in waves], np.float64),
        replica_offsets=sample_starts(joined([w.degrees for w in waves], np.int64)),
        pack_replicas=joined([w.ranks for w in waves], np.int32),
        item_sample=item_sample,
        item_modality=lengths.item_modality,
        item_encoder_tokens=lengths.item_encoder_tokens,
        item_llm_tokens=lengths.item_llm_tokens,
        item_position=lengths.item_position,
        item_replica=np.zeros(len(item_sample), dtype=np.int32),
    )
