"""The models of OmniBal's tables on their GPUs, and seconds a sample of every way to train them."""

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from benchmarks import omnibal, workloads
from benchmarks.planning.papers.omnibal_batches import (
    BATCH,
    INTERNVL,
    Batches,
    Mix,
    isf_batches,
    padded_batches,
)
from benchmarks.planning.papers.speed_ups import (
    entry_bounds,
    numbered_layers,
    paced,
    pipeline_step_s,
    sharded_step_s,
    split_by,
)
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import EncoderStage
from dataservice.jobs.layout_files import read_model
from dataservice.planning import (
    StepSamples,
    choose_recompute,
    compose_step,
    partition_stages,
)
from dataservice.planning.layout.cluster import Device, NodeGroup
from dataservice.planning.layout.costs import LayerShares, analytic_profile
from dataservice.planning.layout.cut_replica import CutTask
from dataservice.planning.layout.microbatches import batch_work, microbatch_work
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.profile import LayerProfile, joined
from dataservice.planning.layout.recompute import FULL
from dataservice.planning.layout.replica import Parallel
from dataservice.planning.layout.search import Layout, LayoutTask, search_layout

A100 = NodeGroup(
    nodes=8,
    device=Device(name="A100", peak_flops=312e12, memory_bytes=80e9, memory_bytes_per_s=2.04e12),
    inside_bytes_per_s=300e9,
    between_bytes_per_s=omnibal.LINK_BYTES_PER_S,
)
H100 = replace(
    A100,
    nodes=64,
    device=replace(A100.device, name="H100", peak_flops=989e12, memory_bytes_per_s=3.35e12),
    inside_bytes_per_s=450e9,
    between_bytes_per_s=50e9,
)
SHIPPED = {
    "InternVL-6B": "internvit-6b",
    "EVA-CLIP-1B": "eva-clip-1b",
    "EVA-CLIP-8B": "eva-clip-8b",
    "EVA-CLIP-18B": "eva-clip-18b",
    "Llama3-8B": "llama-3-8b",
    "InternLM2-20B": "internlm2-20b",
    "Yi-34B": "yi-34b",
    "Llama3-70B": "llama-3-70b",
    "Qwen1.5-110B": "qwen1.5-110b",
}
# Data-parallel replicas of each row of Table 9.
REPLICAS = (8, 4, 2, 2, 1, 4, 4, 4)
LAYOUT_TOKENS = 4096  # of a microbatch of `dataservice layout`
GPUS = 32  # of a run of DeepSpeed


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A row of Table 9 on some GPUs, with the profile of its layers."""

    row: omnibal.Published
    model: ModelDescription
    group: NodeGroup
    replicas: int
    profile: LayerProfile
    vision_pace: float

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.row.split)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.row.tensor * self.stages * self.replicas

    def split(self, name: str) -> NDArray[np.int64]:
        """A split by "parameters", "layers", "profile" (forward seconds of mean packs), or as
        "published": int64[stages + 1] over numbered layers."""
        names = self.profile.names
        if name == "published":
            return self.row.bounds
        if name == "profile":
            mean = isf_batches(0, self.replicas).dealt(1)[0]
            return split_by(joined(self.profile.seconds(mean)[0].mean(axis=0), names), self.stages)
        held = joined(self.profile.state_bytes, names)
        return split_by(held if name == "parameters" else np.ones(held.size), self.stages)

    def recomputed(self, *, published: bool) -> NDArray[np.bool_]:
        """Entries that recompute: bool[entries]."""
        found = np.ones(len(self.profile.names), np.bool_)
        if published:
            layers = numbered_layers(self.profile)
            found[:] = False
            for first, count in zip(self.row.bounds[:-1], self.row.recomputed, strict=True):
                found[layers[first : first + count]] = True
        return found

    def sample_s(self, batches: Batches, split: str, *, published_recompute: bool = False) -> float:
        """Seconds a sample."""
        seconds = pipeline_step_s(
            self.profile,
            batches.dealt(self.replicas),
            entry_bounds(self.profile, self.split(split)),
            recomputed=self.recomputed(published=published_recompute),
            tensor_ranks=self.row.tensor,
            bytes_per_s=self.group.between_bytes_per_s,
        )
        return seconds / batches.samples


def setting(place: int, group: NodeGroup = A100, replicas: int | None = None) -> Setting:
    """The row at this place of Table 9, its vision layers paced as the published split implies."""
    row = omnibal.TABLE_9[place]
    model = read_model(f"omnibal-{SHIPPED[row.vision]}-{SHIPPED[row.text]}")
    counted = analytic_profile(model, group, shares=LayerShares(tensor_ranks=row.tensor))
    pace = implied_vision_pace(row, counted)
    vision = np.array([module == "vision" for module in counted.modules])
    return Setting(
        row=row,
        model=model,
        group=group,
        replicas=replicas or REPLICAS[place],
        profile=paced(counted, np.where(vision, pace, 1.0)),
        vision_pace=pace,
    )


def counted_profile(of: Setting) -> LayerProfile:
    """Of its layers as counted."""
    return analytic_profile(of.model, of.group, shares=LayerShares(tensor_ranks=of.row.tensor))


def implied_vision_pace(row: omnibal.Published, counted: LayerProfile) -> float:
    """The factor on counted vision seconds at which the published stages are most even."""
    mean = isf_batches(0, 1).dealt(1)[0]
    forward = joined(counted.seconds(mean)[0].mean(axis=0), counted.names)
    layers = numbered_layers(counted)
    vision = np.array([counted.modules[place] == "vision" for place in layers])
    seen, read = (
        np.add.reduceat(np.where(mine, forward, 0.0), row.bounds[:-1]) for mine in (vision, ~vision)
    )
    factors = np.linspace(0.3, 3.0, 541)
    stages = factors[:, None] * seen + read  # [factor, stage]
    return float(factors[(stages.std(axis=1) / stages.mean(axis=1)).argmin()])


def planned_sample_s(of: Setting, seed: int) -> float:
    """Seconds a sample with our stages and our recomputation on the packs of ISF."""
    batches = isf_batches(seed, of.replicas)
    works = batches.dealt(of.replicas)
    forward, backward = of.profile.seconds(works[0])
    rate = of.group.between_bytes_per_s
    crossing = of.profile.handed_on_bytes(works[0]) / of.row.tensor
    bounds = partition_stages(
        forward, backward, stages=of.stages, cut_bytes=crossing, bytes_per_s=rate, top=1
    ).best.bounds
    kept = [of.profile.kept_bytes(works[0], kind) for kind in ("none", "none", "full")]
    again = of.profile.added_s(works[0], "full")
    states = of.profile.state_bytes + of.profile.optimizer_bytes / of.replicas
    chosen = choose_recompute(
        forward,
        backward,
        np.stack(kept, axis=2),
        np.stack([0 * again, 0 * again, again], axis=2),
        bounds=bounds,
        stages=of.stages,
        memory_bytes=of.group.device.memory_bytes,
        fixed_bytes=np.add.reduceat(states, bounds[:-1]),
    )
    seconds = pipeline_step_s(
        of.profile,
        works,
        bounds.astype(np.int64),
        recomputed=chosen.choice == FULL,
        tensor_ranks=of.row.tensor,
        bytes_per_s=rate,
    )
    return seconds / batches.samples


def layout_sample_s(of: Setting, seed: int) -> float:
    """Seconds a sample as `dataservice layout` prices them, at the paper's TP, PP and DP: the best
    of its places for encoders. Raises PlanningError where none fits."""
    samples = workloads.step_samples(INTERNVL.drawn(BATCH, seed))
    found, refused = [], []
    for place in get_args(EncoderStage):
        try:
            found.append(_layout_step_s(of, samples, place) / BATCH)
        except PlanningError as error:  # the encoder does not fit there
            refused.append(error)
    if not found:
        raise refused[-1]
    return min(found)


def _layout_step_s(of: Setting, samples: StepSamples, place: EncoderStage) -> float:
    decoder = of.model.decoder
    modules = of.model.module_names
    made = CutTask(
        profile=of.profile,
        parallel=Parallel(
            tensor_ranks=of.row.tensor,
            pipeline_stages=of.stages,
            virtual_stages=1,
            replicas=of.replicas,
            encoder_stage=place,
        ),
        group=of.group,
        work=microbatch_work(samples, LAYOUT_TOKENS, of.replicas, modules),
        batches=batch_work([samples], modules),
        ring_token_bytes=4.0 * decoder.key_width * decoder.layers,
        row_bytes=2.0 * decoder.hidden_size,
    ).cut()
    topology = made.topology(of.group)
    options = PlanOptions(
        memory_tokens=min(LAYOUT_TOKENS, made.memory(of.group).tokens(topology)),
        cost=made.cost(of.group),
    )
    return compose_step(samples, step=0, topology=topology, options=options).predicted_s


def searched(of: Setting, seed: int) -> Layout:
    """What `dataservice layout` finds on the GPUs of the row, with layers as counted: parallelism
    and all else free."""
    samples = workloads.step_samples(INTERNVL.drawn(BATCH, seed))
    group = replace(of.group, nodes=of.gpus // of.group.gpus_per_node)
    return search_layout(LayoutTask(model=of.model, group=group, batches=(samples,)))


def mean_sample_s(
    of: Setting, draws: int, kind: str, split: str, *, memory: bool = False, mix: Mix = INTERNVL
) -> float:
    """Mean over draws; `kind` of batches, and `memory`: recomputation as published."""
    seconds = []
    for seed in range(draws):
        if kind == "isf":
            batches = isf_batches(seed, of.replicas, mix)
        else:
            batches = padded_batches(kind, seed, mix)
        seconds.append(of.sample_s(batches, split, published_recompute=memory))
    return float(np.mean(seconds))


def deepspeed_sample_s(place: int, draws: int, kind: str, bytes_per_s: float) -> float:
    """GPU seconds a sample under ZeRO-3 on 32 GPUs; microbatches of as many ranks side by side."""
    row = omnibal.TABLE_9[place]
    profile = analytic_profile(
        read_model(f"omnibal-{SHIPPED[row.vision]}-{SHIPPED[row.text]}"), A100
    )
    seconds, samples = 0.0, 0
    for seed in range(draws):
        batches = isf_batches(seed, GPUS) if kind == "isf" else padded_batches(kind, seed)
        samples += batches.samples
        for first in range(0, batches.tiles.size, GPUS):
            seconds += sharded_step_s(
                profile,
                batches.work(slice(first, first + GPUS)),
                shards=GPUS,
                bytes_per_s=bytes_per_s,
            )
    return seconds * GPUS / samples
