"""What a trainer lives through in a step: the one evaluator of plans.

    wave   encode ─▶ exchange ─▶ decode ─▶ decode backward ─▶ exchange ─▶ encode backward

Replicas that meet in every wave wait for the slowest in each of these phases. Those that meet once
a step wait for the members of their CP group, and for whoever encodes what they need. Where
features go ahead, the first exchange of a wave is under way beneath the backward pass of the wave
before, and takes what that does not hide. The stages of a pipeline run both passes of their model
chunks by (interleaved) 1F1B.

Shapes: W waves, M modalities, N replicas, C model chunks, m encoder items; a phase is one modality
in one wave, wave · M + modality.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan, StepTime
from dataservice.core.plan_options import CostModel
from dataservice.core.sample import Modality
from dataservice.core.topology import Topology
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import group_stable
from dataservice.planning.nodes.phases import phase_loads
from dataservice.planning.pipeline_parallel.simulator import (
    FORWARD,
    Program,
    make_program,
    simulate_1f1b,
)
from dataservice.planning.routes import item_packs
from dataservice.planning.stages.dispatch import EncoderLoads, encoder_loads

MODALITIES = len(Modality)
# Of a phase's seconds, those of its forward pass; a backward pass costs twice that.
FORWARD_SHARE = 1.0 / 3.0


class Phases(NamedTuple):
    """Seconds of both passes: `decode` float64[W, N] of each replica's group, 0 where it is idle;
    `encode` float64[W, M, N]; `exchange` float64[W, M]."""

    decode: NDArray[np.float64]
    encode: NDArray[np.float64]
    exchange: NDArray[np.float64]


def step_seconds(plan: StepPlan, topology: Topology, cost: CostModel) -> StepTime:
    """What `plan` takes on `topology`, its packs as they were priced (`pack_seconds`).

    O(m + W·N), and O(W·C·(N + packs)) where replicas meet once a step.
    """
    items = encoder_loads(plan, cost)
    return time_phases(step_phases(plan, items, cost, topology), plan, items, topology, cost)


def step_phases(plan: StepPlan, items: EncoderLoads, cost: CostModel, topology: Topology) -> Phases:
    """The seconds of every phase of a plan whose items are `items`."""
    decode = _decode_seconds(
        plan.pack_wave,
        plan.pack_seconds,
        plan.replica_offsets,
        plan.pack_replicas,
        plan.waves,
        plan.replicas,
    )
    loads = phase_loads(items.phase, items.seconds, plan.item_replica, items.phases, plan.replicas)
    used = np.bincount(items.phase, minlength=items.phases) > 0
    encode = loads.reshape(plan.waves, MODALITIES, plan.replicas)
    used = used.reshape(plan.waves, MODALITIES)
    encode[used] += np.broadcast_to(items.batch_s, used.shape)[used][:, None]
    return Phases(decode, encode, _exchange_seconds(plan, items, cost, topology))


def _exchange_seconds(
    plan: StepPlan, items: EncoderLoads, cost: CostModel, topology: Topology
) -> NDArray[np.float64]:
    """Seconds [W, M] of every exchange in which a row leaves its replica."""
    step = cost.step
    if step.exchange_s == 0 and step.feature_inter_s_per_token == 0:
        return np.zeros((plan.waves, MODALITIES))
    seconds = _busiest_rows(
        items.phase,
        plan.item_replica,
        plan.item_llm_tokens,
        item_packs(plan),
        plan.replica_offsets,
        plan.pack_replicas,
        items.phases,
        plan.replicas,
        topology.replicas_per_node or plan.replicas,
        step.feature_intra_s_per_token,
        step.feature_inter_s_per_token,
        step.exchange_s,
    )
    exchange: NDArray[np.float64] = seconds.reshape(plan.waves, MODALITIES)
    return exchange


def time_phases(
    phases: Phases, plan: StepPlan, items: EncoderLoads, topology: Topology, cost: CostModel
) -> StepTime:
    """The step that these phases of `plan` make."""
    total_s = _total_seconds(phases, plan, items, topology) + cost.step.gradient_s
    ranks = _rank_seconds(phases, topology, cost)
    return StepTime(
        total_s=total_s,
        vision_s=float(ranks.vision.mean()),
        audio_s=float(ranks.audio.mean()),
        exchange_s=float(ranks.exchange.mean()),
        llm_s=float(ranks.llm.mean()),
        gradient_s=cost.step.gradient_s,
    )


class RankSeconds(NamedTuple):
    """Seconds of the ranks of every stage of every replica, float64[stages, N] each: what
    `StepTime` is the mean of. What they leave of the step's seconds, a rank waits."""

    vision: NDArray[np.float64]
    audio: NDArray[np.float64]
    exchange: NDArray[np.float64]
    llm: NDArray[np.float64]
    gradients: NDArray[np.float64]


def rank_seconds(plan: StepPlan, topology: Topology, cost: CostModel) -> RankSeconds:
    """The phases of `plan` as every rank has them. O(m + W·N)."""
    items = encoder_loads(plan, cost)
    return _rank_seconds(step_phases(plan, items, cost, topology), topology, cost)


def _rank_seconds(phases: Phases, topology: Topology, cost: CostModel) -> RankSeconds:
    stages, replicas = topology.pipeline_stages, phases.decode.shape[1]
    shape = (stages, replicas)
    spread = topology.encoder_stage == "spread"
    # Encoders run in chunks, or are shared by all stages; each exchanges what it encoded where it
    # ends. [modality, stage]
    encoders = _EncoderChunks.of(topology)
    encodes = encoders.shares.reshape(MODALITIES, -1, stages).sum(axis=1)
    exchanges = np.eye(stages)[encoders.last % stages]
    if spread:
        encodes, exchanges = np.full_like(encodes, 1.0 / stages), np.ones_like(exchanges)
    moved, returned = _exchange_ways(phases, topology)
    exchanged_s = sum(way.mean(axis=2).sum(axis=0) for way in (moved, returned))
    decodes = np.array(topology.chunk_shares).reshape(-1, stages).sum(axis=0)
    encoding = phases.encode.sum(axis=0)
    return RankSeconds(
        vision=np.outer(encodes[Modality.VISION], encoding[Modality.VISION]),
        audio=np.outer(encodes[Modality.AUDIO], encoding[Modality.AUDIO]),
        exchange=np.broadcast_to((exchanged_s @ exchanges)[:, None], shape),
        llm=np.outer(decodes, phases.decode.sum(axis=0)),
        gradients=np.full(shape, cost.step.gradient_s),
    )


class _EncoderChunks(NamedTuple):
    """The part of each encoder that each model chunk holds, `shares` float64[M, C]; and the chunk
    in which it ends, whose stage exchanges its features: `last` int64[M]."""

    shares: NDArray[np.float64]
    last: NDArray[np.int64]

    @classmethod
    def of(cls, topology: Topology) -> "_EncoderChunks":
        shares = np.array(topology.encoder_shares, np.float64)
        last = shares.shape[1] - 1 - np.argmax(shares[:, ::-1] > 0, axis=1)
        return cls(shares, last.astype(np.int64))


class ChunkTimes(NamedTuple):
    """Seconds of replicas that meet in every wave: `forward` and `backward` float64[W, C] of each
    model chunk, and `outside` of what is encoded before and after the pipeline."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    outside_s: float

    def busiest_s(self, stages: int) -> float:
        """What the stage with most to do works for."""
        of_chunk = (self.forward + self.backward).sum(axis=0)
        return float(of_chunk.reshape(-1, stages).sum(axis=0).max()) + self.outside_s


def chunk_times(phases: Phases, topology: Topology) -> ChunkTimes:
    """Every wave as its slowest replica in each phase has it."""
    shares = np.array(topology.chunk_shares)
    # [waves, chunks]
    seconds = phases.decode.max(axis=1, initial=0.0)[:, None] * shares
    forward = seconds * FORWARD_SHARE
    backward = seconds * (1.0 - FORWARD_SHARE)
    there, back = _both_ways(phases, topology)
    moved, returned = (way.max(axis=2) for way in _exchange_ways(phases, topology))
    if topology.encoder_stage == "spread":
        encoding = there.max(axis=2).sum() + back.max(axis=2).sum()
        return ChunkTimes(forward, backward, float(encoding + moved.sum() + returned.sum()))
    encoders = _EncoderChunks.of(topology)
    ends = np.eye(shares.size)[encoders.last]  # [modality, chunk]
    forward += there.max(axis=2) @ encoders.shares + moved @ ends
    backward += back.max(axis=2) @ encoders.shares + returned @ ends
    return ChunkTimes(forward, backward, 0.0)


def _total_seconds(
    phases: Phases, plan: StepPlan, items: EncoderLoads, topology: Topology
) -> float:
    if plan.waves == 0:
        return 0.0
    if topology.replicas_meet == "step" and plan.replicas > 1:
        return _met_once(phases, plan, items, topology)
    return meeting_seconds(phases, topology)


def meeting_seconds(phases: Phases, topology: Topology) -> float:
    """What replicas that meet in every wave take for these phases, gradients left out. O(W·N)."""
    if topology.pipeline_stages == 1:
        moving = sum(way.sum() for way in _exchange_ways(phases, topology))
        encoding = phases.encode.max(axis=2).sum()
        return float(phases.decode.max(axis=1).sum() + encoding + moving)
    times = chunk_times(phases, topology)
    pipeline = simulate_1f1b(times.forward, times.backward, virtual_stages=topology.virtual_stages)
    return pipeline.makespan_s + times.outside_s


def _both_ways(
    phases: Phases, topology: Topology
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of encoding, forward and backward: float64[W, M, N] each."""
    encode = phases.encode
    if topology.encoder_stage == "spread":
        encode = encode / topology.pipeline_stages
    share = FORWARD_SHARE if topology.encoders_train else 1.0
    return encode * share, encode * (1.0 - share)


def _exchange_ways(
    phases: Phases, topology: Topology
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of exchanging features, and of their gradients: float64[W, M, N], or [W, M, 1] where
    all replicas take the same."""
    half = phases.exchange[:, :, None] * 0.5
    returned = half if topology.encoders_train else np.zeros_like(half)
    if not topology.features_ahead:
        return half, returned
    under = phases.decode * (1.0 - FORWARD_SHARE)
    if topology.replicas_meet == "wave":
        under = under.max(axis=1, keepdims=True)
    hidden = np.zeros_like(under)
    hidden[1:] = under[:-1]
    both = half.sum(axis=1)  # modalities, one after the other
    left = np.maximum(both - hidden, 0.0)
    shown = np.divide(left, both, out=np.zeros_like(left), where=both > 0)
    return half * shown[:, None], returned


def _met_once(phases: Phases, plan: StepPlan, items: EncoderLoads, topology: Topology) -> float:
    """Each replica at its own pace, until the last of them has ended."""
    stages = topology.pipeline_stages
    there, back = _both_ways(phases, topology)
    # Copied: where nothing is to be broadcast it is a read-only view, for which `_walk` would be
    # compiled once more, in the midst of a job.
    moved, returned = (
        np.array(np.broadcast_to(way, there.shape), order="C")
        for way in _exchange_ways(phases, topology)
    )
    order = np.arange(items.phase.size)
    listed, begins = group_stable(items.phase, order, items.phases)
    ends = _walk(
        phases.decode,
        there,
        back,
        moved,
        returned,
        np.array(topology.chunk_shares),
        *_EncoderChunks.of(topology),
        make_program(plan.waves, stages, topology.virtual_stages),
        stages,
        topology.encoder_stage == "spread",
        topology.encoders_train,
        np.searchsorted(plan.pack_wave, np.arange(plan.waves + 1)),
        plan.replica_offsets,
        plan.pack_replicas,
        listed,
        begins,
        plan.item_replica,
        item_packs(plan),
    )
    return float(ends.max())


@kernel
def _decode_seconds(
    pack_wave: NDArray[np.int32],
    pack_seconds: NDArray[np.float64],
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    waves: int,
    replicas: int,
) -> NDArray[np.float64]:
    seconds = np.zeros((waves, replicas))
    for pack in range(pack_wave.size):
        for place in range(replica_offsets[pack], replica_offsets[pack + 1]):
            seconds[pack_wave[pack], pack_replicas[place]] = pack_seconds[pack]
    return seconds


@kernel
def _busiest_rows(
    phase: NDArray[np.int64],
    source: NDArray[np.int32],
    rows: NDArray[np.int32],
    pack: NDArray[np.int32],
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    phases: int,
    replicas: int,
    replicas_per_node: int,
    intra_s: float,
    inter_s: float,
    fixed_s: float,
) -> NDArray[np.float64]:
    """Seconds [phases] of the replica that sends or receives longest, and `fixed_s` on top; none
    where no row leaves its replica. An item's rows are taken to lie evenly over the members of its
    group: nearly so where it is much longer than a chunk."""
    busiest = np.zeros(phases)
    sent = np.zeros((phases, replicas))
    received = np.zeros((phases, replicas))
    for item in range(phase.size):
        first, end = replica_offsets[pack[item]], replica_offsets[pack[item] + 1]
        share = rows[item] / (end - first)
        for place in range(first, end):
            target = pack_replicas[place]
            if target == source[item]:
                continue
            inside = target // replicas_per_node == source[item] // replicas_per_node
            seconds = share * (intra_s if inside else inter_s)
            sent[phase[item], source[item]] += seconds
            received[phase[item], target] += seconds
            busiest[phase[item]] = fixed_s
    for p in range(phases):
        longest = 0.0
        for replica in range(replicas):
            longest = max(longest, sent[p, replica], received[p, replica])
        busiest[p] += longest
    return busiest


@kernel
def _walk(
    decode: NDArray[np.float64],
    there: NDArray[np.float64],
    back: NDArray[np.float64],
    moved: NDArray[np.float64],
    returned: NDArray[np.float64],
    shares: NDArray[np.float64],
    encoded: NDArray[np.float64],
    ends_in: NDArray[np.int64],
    program: Program,
    stages: int,
    spread: bool,
    trains: bool,
    wave_packs: NDArray[np.int64],
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    source: NDArray[np.int32],
    item_pack: NDArray[np.int32],
) -> NDArray[np.float64]:
    """When each replica has ended: float64[N]. The operations of one wave on one replica are a
    chain, so the end of its last one is all that is kept of it."""
    waves, modalities, replicas = there.shape
    free = np.zeros((stages, replicas))  # when a stage of a replica has ended what it ran last
    ended = np.zeros((waves, replicas))  # when the last operation of a wave has
    now = np.zeros(replicas)
    if spread:
        for wave in range(waves):
            for modality in range(modalities):
                now += there[wave, modality]
                phase = wave * modalities + modality
                _receive(now, phase, listed, begins, source, item_pack, replica_offsets,
                         pack_replicas, moved[wave, modality], False)  # fmt: skip
        for stage in range(stages):
            free[stage] = now
    for k in range(program.kind.size):
        wave, chunk = program.position[k], program.chunk[k]
        stage = chunk % stages
        forward = program.kind[k] == FORWARD
        now = np.maximum(free[stage], ended[wave])
        if forward and not spread:
            for modality in range(modalities):
                if encoded[modality, chunk] > 0.0:
                    now += there[wave, modality] * encoded[modality, chunk]
                if chunk == ends_in[modality]:
                    phase = wave * modalities + modality
                    _receive(now, phase, listed, begins, source, item_pack, replica_offsets,
                             pack_replicas, moved[wave, modality], False)  # fmt: skip
        share = shares[chunk] * (FORWARD_SHARE if forward else 1.0 - FORWARD_SHARE)
        for pack in range(wave_packs[wave], wave_packs[wave + 1]):
            begin = 0.0
            for place in range(replica_offsets[pack], replica_offsets[pack + 1]):
                begin = max(begin, now[pack_replicas[place]])
            for place in range(replica_offsets[pack], replica_offsets[pack + 1]):
                replica = pack_replicas[place]
                now[replica] = begin + decode[wave, replica] * share
        if not forward and not spread and trains:
            for modality in range(modalities - 1, -1, -1):
                if chunk == ends_in[modality]:
                    phase = wave * modalities + modality
                    _receive(now, phase, listed, begins, source, item_pack, replica_offsets,
                             pack_replicas, returned[wave, modality], True)  # fmt: skip
                if encoded[modality, chunk] > 0.0:
                    now += back[wave, modality] * encoded[modality, chunk]
        free[stage] = now
        ended[wave] = now
    for stage in range(stages):
        now = np.maximum(now, free[stage])
    if spread and trains:
        for wave in range(waves):
            for modality in range(modalities):
                phase = wave * modalities + modality
                _receive(now, phase, listed, begins, source, item_pack, replica_offsets,
                         pack_replicas, returned[wave, modality], True)  # fmt: skip
                now += back[wave, modality]
    return now


@kernel
def _receive(
    now: NDArray[np.float64],
    phase: int,
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    source: NDArray[np.int32],
    item_pack: NDArray[np.int32],
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    seconds: NDArray[np.float64],
    gradients: bool,
) -> None:
    """Wait for whoever encodes what one needs, or for the gradients of what one encoded; then the
    exchange of so many `seconds` [N]. Writes `now` float64[N]."""
    before = now.copy()
    for at in range(begins[phase], begins[phase + 1]):
        item = listed[at]
        encoder = source[item]
        for place in range(replica_offsets[item_pack[item]], replica_offsets[item_pack[item] + 1]):
            needs = pack_replicas[place]
            if gradients:
                now[encoder] = max(now[encoder], before[needs])
            else:
                now[needs] = max(now[needs], before[encoder])
    now += seconds
