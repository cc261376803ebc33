"""The certificate of a whole step: seconds that no plan of these samples can go below.

Work that is spread evenly over all replicas and stages, the one sample or item that takes longest
however it is shared, memory, which makes several waves of much, and what the last stage of a
pipeline waits for before its first pass and after its last.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import PhaseCost
from dataservice.core.layout import padded_tokens
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.sample import LengthTable, Modality
from dataservice.core.topology import Topology
from dataservice.planning.context.groups import ContextWaves
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.stages.dispatch import units_seconds
from dataservice.planning.stages.group import full_attention
from dataservice.planning.step_time import Phases, meeting_seconds


class StepBound:
    """Bounds of a step of `lengths`, as `step_seconds` counts them; items may be cut into `units`
    int32[m] each, or are whole. O(n + m + N) when made."""

    def __init__(
        self,
        lengths: LengthTable,
        topology: Topology,
        options: PlanOptions,
        units: NDArray[np.int32] | None = None,
    ) -> None:
        self._topology, self._cost = topology, options.cost
        self._lengths, self._units = lengths, units
        self._meet = topology.replicas_meet == "wave"
        self._decoder_s = self._longest_s = 0.0
        self._encoders_s = [0.0 for _ in Modality]
        self._present = np.zeros(0, np.int64)
        self._parts = _parts_of_stages(topology)
        if len(lengths) == 0:
            return
        alone_s = _longest_sample(lengths, topology, options)
        self._decoder_s = _mean_decoder(lengths, topology, options)
        if self._meet:
            self._decoder_s = max(self._decoder_s, alone_s)
        items_s = _items(lengths, options.cost, units)
        self._present = np.flatnonzero([items is not None for items in items_s])
        self._encoders_s = [
            _encoder(items, m, topology, options.cost, self._meet)
            for m, items in zip(Modality, items_s, strict=True)
        ]
        stages = topology.pipeline_stages if topology.encoder_stage == "spread" else 1
        longest_s = (
            (items.longest_s + _phase_cost(options.cost, m).batch_s) / stages
            for m, items in zip(Modality, items_s, strict=True)
            if items is not None
        )
        self._longest_s = max((alone_s, *longest_s))

    @property
    def counts_waves(self) -> bool:
        """Whether a step takes longer the longer its waves take, one by one."""
        return self._meet

    def of(self, waves: ContextWaves) -> float:
        """The least that a step of these waves takes: in sum as long as the slowest group of each
        or, where replicas meet once a step, as what they do in the mean."""
        if self._meet:
            decoder_s = max(self._decoder_s, waves.makespan_s)
            return self._step(decoder_s, self._encoders_s, _least_wave(waves))
        work_s = sum(float(wave.time_s @ wave.degrees) for wave in waves.waves)
        return self.given(mean_s=work_s / self._topology.replicas)

    def as_formed(self, waves: ContextWaves) -> float:
        """The same where waves and groups stay as they were formed and each item is encoded whole
        by its sample's own group, as in a trainer that plans nothing: the slowest group of each
        wave encodes, or the busiest replica of all. O(n + packs)."""
        topology, modalities = self._topology, len(Modality)
        slowest = np.zeros((len(waves.waves), modalities))
        busy = np.zeros((1 + modalities, 0 if self._meet else topology.replicas))
        for wave, of_wave in zip(waves.waves, slowest, strict=True):
            _add_groups(
                wave.samples,
                wave.sample_offsets,
                wave.ranks,
                wave.rank_offsets,
                wave.time_s,
                self._present,
                self._item_seconds,
                of_wave,
                busy,
            )
        batches_s = np.array([_phase_cost(self._cost, m).batch_s for m in Modality])
        encode = slowest + (slowest > 0) * batches_s
        if self._meet:
            decode = np.array([wave.makespan_s for wave in waves.waves])
            phases = Phases(decode[:, None], encode[:, :, None], np.zeros_like(encode))
            found_s = meeting_seconds(phases, topology) + self._cost.step.gradient_s
        else:
            busiest = busy[:, busy.sum(axis=0).argmax()]
            busiest[1:] += (encode - slowest).sum(axis=0)
            found_s = self._step(float(busiest[0]), busiest[1:].tolist())
        return max(found_s, self.of(waves))

    @cached_property
    def _item_seconds(self) -> NDArray[np.float64]:
        """What encoding the items of each sample takes: float64[modalities, n]."""
        lengths, cost = self._lengths, self._cost
        return _sample_item_seconds(
            lengths.item_offsets,
            lengths.item_modality,
            lengths.item_encoder_tokens,
            np.zeros(0, np.int32) if self._units is None else self._units,
            np.array([_phase_cost(cost, modality).coefficients for modality in Modality]),
        )

    def given(self, waves_s: float = 0.0, *, mean_s: float = 0.0) -> float:
        """The least that a step takes whose waves' makespans are at least `waves_s` in sum, those
        of one plan or a bound of all of them, and whose replicas decode for at least `mean_s` in
        the mean. `waves_s` is without effect where replicas meet once a step."""
        decoder_s = max(self._decoder_s, mean_s, waves_s if self._meet else 0.0)
        return self._step(decoder_s, self._encoders_s)

    def _step(self, decoder_s: float, encoders_s: list[float], wave_s: float = 0.0) -> float:
        """The step of so many seconds of the decoder and of each encoder; no wave takes less than
        `wave_s`, or β₁."""
        wave_s = max(wave_s, self._cost.llm.group_s)
        stage_s = _busiest_stage(decoder_s, encoders_s, wave_s, self._parts)
        return max(stage_s, self._longest_s) + self._cost.step.gradient_s


def _least_wave(waves: ContextWaves) -> float:
    """Seconds of the wave whose slowest group takes least."""
    return min((wave.makespan_s for wave in waves.waves), default=0.0)


def _phase_cost(cost: CostModel, modality: Modality) -> PhaseCost:
    return (cost.vision, cost.audio)[modality]


def _mean_decoder(lengths: LengthTable, topology: Topology, options: PlanOptions) -> float:
    """All work, and β₁ for each replica and wave that memory calls for, over the replicas."""
    cost, tokens = options.cost.llm, lengths.llm_tokens
    seats = -(-int(tokens.sum(dtype=np.int64)) // options.memory_tokens)
    eta = full_attention(lengths, options.full_attention)
    return (cost.total_work_s(tokens, eta) + seats * cost.group_s) / topology.replicas


def _longest_sample(lengths: LengthTable, topology: Topology, options: PlanOptions) -> float:
    """The longest sample at the degree that suits it best, of those that hold it."""
    longest = int(lengths.llm_tokens.max())
    degrees = np.arange(1, topology.replicas + 1)
    holds = padded_tokens(np.array([longest]), degrees) <= degrees * options.memory_tokens
    degrees = degrees[holds]
    if degrees.size == 0:
        return 0.0
    crosses = degrees > (topology.replicas_per_node or topology.replicas)
    return float(options.cost.llm.times_s([longest], degrees, crosses_node=crosses).min())


class _Items(NamedTuple):
    """Seconds of all items of an encoder, and of the longest that cannot be cut."""

    total_s: float
    longest_s: float


def _items(
    lengths: LengthTable, cost: CostModel, units: NDArray[np.int32] | None
) -> list[_Items | None]:
    """Those of each modality; None where it has no items. O(m)."""
    sums = _item_sums(
        lengths.item_modality,
        lengths.item_encoder_tokens,
        np.zeros(0, np.int32) if units is None else units,
        len(Modality),
    )
    found: list[_Items | None] = []
    for modality, (count, tokens, squares, longest) in zip(Modality, sums, strict=True):
        phase = _phase_cost(cost, modality)
        longest_s = float(phase.item_seconds(longest))
        total_s = float(phase.sums_s(count, tokens, squares))
        found.append(_Items(total_s, longest_s) if count else None)
    return found


@kernel
def _item_sums(
    modality: NDArray[np.int8],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    modalities: int,
) -> NDArray[np.float64]:
    """Of each modality's items: how many, Σt, Σt²/u and the tokens of the largest unit,
    float64[modalities, 4]. All are whole without `units` int32[m]."""
    sums = np.zeros((modalities, 4))
    for item in range(tokens.size):
        of_item, size = sums[modality[item]], float(tokens[item])
        of_item[0] += 1.0
        of_item[1] += size
        if units.size:
            of_item[2] += size * size / units[item]
            of_item[3] = max(of_item[3], float(tokens[item] // units[item]))
        else:
            of_item[2] += size * size
            of_item[3] = max(of_item[3], size)
    return sums


@kernel
def _sample_item_seconds(
    item_offsets: NDArray[np.int64],
    modality: NDArray[np.int8],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    encoders: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Of items as `units_seconds` has them; `encoders` float64[M, 3] are the coefficients."""
    seconds = np.zeros((encoders.shape[0], item_offsets.size - 1))
    for sample in range(item_offsets.size - 1):
        for item in range(item_offsets[sample], item_offsets[sample + 1]):
            count = units[item] if units.size else 1
            of_unit, fixed = units_seconds(tokens[item], count, encoders[modality[item]])
            seconds[modality[item], sample] += of_unit * count + fixed
    return seconds


@kernel
def _add_groups(
    samples: NDArray[np.int32],
    sample_offsets: NDArray[np.int64],
    ranks: NDArray[np.int32],
    rank_offsets: NDArray[np.int64],
    time_s: NDArray[np.float64],
    present: NDArray[np.int64],
    item_seconds: NDArray[np.float64],
    slowest: NDArray[np.float64],
    busy: NDArray[np.float64],
) -> None:
    """What a wave's groups encode of their own items of the modalities `present`, spread evenly
    over their replicas: the most of any to `slowest` float64[M], and beside their decoding to
    `busy` float64[1 + M, N], unless that is empty."""
    counts_busy = busy.size > 0
    for group in range(time_s.size if counts_busy else 0):
        for place in range(rank_offsets[group], rank_offsets[group + 1]):
            busy[0, ranks[place]] += time_s[group]
    for modality in present:
        of_sample = item_seconds[modality]
        for group in range(time_s.size):
            encoding = 0.0
            for place in range(sample_offsets[group], sample_offsets[group + 1]):
                encoding += of_sample[samples[place]]
            first, end = rank_offsets[group], rank_offsets[group + 1]
            encoding /= end - first
            slowest[modality] = max(slowest[modality], encoding)
            for place in range(first, end if counts_busy else first):
                busy[1 + modality, ranks[place]] += encoding


def _encoder(
    items: _Items | None, modality: Modality, topology: Topology, cost: CostModel, meet: bool
) -> float:
    """One encoder's phases of all waves, summed: its mean work and, where replicas meet in every
    wave, at least its longest item."""
    if items is None:
        return 0.0
    mean_s = items.total_s / topology.replicas
    return _phase_cost(cost, modality).batch_s + (max(mean_s, items.longest_s) if meet else mean_s)


class _Parts(NamedTuple):
    """The part of the decoder's and of each encoder's seconds that each stage takes, float64[S],
    and of the decoder's that of all first chunks but the last stage's."""

    decoder: NDArray[np.float64]
    encoders: tuple[NDArray[np.float64], ...]
    ahead: float


@lru_cache(maxsize=16)
def _parts_of_stages(topology: Topology) -> _Parts:
    """The parts under a topology, which all steps of an attempt have in common."""
    stages = topology.pipeline_stages

    def of_stage(shares: tuple[float, ...]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.array(shares).reshape(-1, stages).sum(axis=0)
        return sums

    shares = topology.chunk_shares
    ahead = float(np.array(shares[: stages - 1]).sum())
    encoders = tuple(map(of_stage, topology.encoder_shares))
    if topology.encoder_stage == "spread":
        encoders = (np.full(stages, 1.0 / stages),) * len(encoders)
    return _Parts(of_stage(shares), encoders, ahead)


class StageParts(NamedTuple):
    """The parts that a stage takes of the seconds of the decoder, and of encoders float64[M]."""

    decoder: float
    encoders: NDArray[np.float64]


def busiest_parts(
    topology: Topology, decoder_s: float, encoders_s: NDArray[np.float64]
) -> StageParts:
    """The parts of the stage that has most to do, of the decoder's seconds and of the encoders'
    float64[M]."""
    parts = _parts_of_stages(topology)
    encoders = np.array(parts.encoders)  # [M, S]
    stage = int(np.argmax(decoder_s * parts.decoder + encoders_s @ encoders))
    return StageParts(float(parts.decoder[stage]), encoders[:, stage])


def _busiest_stage(
    decoder_s: float, encoders_s: list[float], wave_s: float, parts: _Parts
) -> float:
    """The stage with most to do, and the last one behind those that fill it and drain it, for as
    long as their parts of the shortest wave take."""
    if decoder_s == 0:
        return 0.0
    of_stage = decoder_s * parts.decoder
    of_stage[-1] += wave_s * parts.ahead
    for encoder_s, of_encoder in zip(encoders_s, parts.encoders, strict=True):
        of_stage += encoder_s * of_encoder
    return float(of_stage.max())
