"""Seconds of a step that no layout goes below, whatever the search tries.

For every TP and PP whose ranks have room for their part of the states, the least of the places of
encoders; of those the least:

    work       all of it, nothing recomputed, over all GPUs; with encoders in bubbles what GPUs
               compute, as encoders do so while the decoder's ranks exchange
    stages     the busiest of them, whose layers cannot be divided
    longest    the longest sample, through all stages, by as many replicas as suit it
    gradients  of the fullest stage, unless they travel under a pass

It does not see how a pipeline fills, nor what balancing leaves.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dataservice.core.cost import ContextCost
from dataservice.planning.layout.gradients import whole_gradients_s
from dataservice.planning.layout.microbatches import batch_work
from dataservice.planning.layout.profile import Floats, LayerProfile, LayerWork
from dataservice.planning.layout.replica import Parallel, decoding, ring_seconds
from dataservice.planning.layout.search_shapes import parallels
from dataservice.planning.layout.stage_anchor import anchor_split
from dataservice.planning.layout.stage_times import MeanTimes
from dataservice.planning.layout.task import LayoutTask


def least_step_s(task: LayoutTask, profiles: Mapping[int, LayerProfile]) -> float:
    """Mean over the batches. Infinite where no shape has room for its states."""
    batches = batch_work(task.batches, task.model.module_names)
    priced = {ranks: _priced(batches, profile) for ranks, profile in profiles.items()}
    computing_s = _computing_s(task, batches)
    busiest: dict[tuple[int, int, int, bool], float] = {}
    found = [np.inf]
    for parallel in parallels(task):
        ranks, stages, virtual = (
            parallel.tensor_ranks,
            parallel.pipeline_stages,
            parallel.virtual_stages,
        )
        if not _has_room(task, profiles[ranks], parallel):
            continue
        for whole in (True, False):
            if (key := (ranks, stages, virtual, whole)) not in busiest:
                chosen = slice(None) if whole else decoding(profiles[ranks])
                entries = priced[ranks].of_stages[chosen]
                busiest[key] = _busiest_s(entries, stages, virtual)
        ours = tuple(busiest[ranks, stages, virtual, whole] for whole in (True, False))
        in_bubbles = parallel.encoder_stage == "bubbles"
        work_s = computing_s[ranks] if in_bubbles else float(priced[ranks].seconds.sum())
        found.append(_least_s(task, profiles[ranks], parallel, priced[ranks], work_s, ours))
    return min(found)


class _Priced(NamedTuple):
    """All work of a mean batch by entry, nothing recomputed, float64[entries]: `seconds`, and
    `of_stages` as the evaluator deals it out at least, by seconds a token."""

    seconds: Floats
    of_stages: Floats


def _priced(batches: LayerWork, profile: LayerProfile) -> _Priced:
    tokens, squares = (each.mean(axis=0) for each in batches.columns(profile.modules))
    token_s = (profile.forward.token_s + profile.backward.token_s) * tokens
    square_s = (profile.forward.square_s + profile.backward.square_s) * squares
    most_s = token_s + np.maximum(profile.forward.token_s, profile.again.token_s) * tokens
    of_stages = token_s.copy()
    for module in set(profile.modules):
        mine = profile.entries_of(module)
        if most_s[mine].sum() > 0:
            of_stages[mine] *= 1.0 + square_s[mine].sum() / most_s[mine].sum()
    return _Priced(token_s + square_s, of_stages)


def _computing_s(task: LayoutTask, batches: LayerWork) -> dict[int, float]:
    """What the GPUs of so many tensor-parallel ranks compute of a mean batch, by those ranks,
    without what they exchange; encoders over as few of them as suits best."""
    found: dict[int, float] = {}
    encoding_s = np.inf  # of one GPU
    for ranks in sorted(task.tensor_ranks):
        profile = task.profile(ranks, linkless=True)
        seconds, decodes = _priced(batches, profile).seconds, decoding(profile)
        encoding_s = min(encoding_s, ranks * float(seconds[~decodes].sum()))
        found[ranks] = float(seconds[decodes].sum()) + encoding_s / ranks
    return found


def _has_room(task: LayoutTask, profile: LayerProfile, parallel: Parallel) -> bool:
    states = (profile.state_bytes + profile.optimizer_bytes / parallel.replicas).sum()
    return bool(states / parallel.pipeline_stages <= task.group.device.memory_bytes)


def _least_s(
    task: LayoutTask,
    profile: LayerProfile,
    parallel: Parallel,
    priced: _Priced,
    work_s: float,
    busiest_s: tuple[float, ...],
) -> float:
    """Of one parallelism. `work_s`: of all, on the GPUs that share a layer. `busiest_s`: of a stage
    in all replicas, of all layers and of the decoder's."""
    replicas, gpus = parallel.replicas, parallel.replicas * parallel.pipeline_stages
    even_s = work_s / gpus
    whole_s, decoder_s = (each / replicas for each in busiest_s)
    longest_s = _longest_s(task, profile, parallel)
    gradient_s = 0.0 if task.overlap_gradients else _gradient_s(task, profile, parallel)
    if parallel.encoder_stage == "bubbles":  # encoders run while gradients travel, too
        return max(even_s, max(decoder_s, longest_s) + gradient_s)
    if parallel.encoder_stage == "spread":
        encoding_s = float(priced.seconds[~decoding(profile)].sum()) / gpus
        return max(even_s, decoder_s + encoding_s, longest_s) + gradient_s
    return max(even_s, whole_s, decoder_s, longest_s) + gradient_s


def _busiest_s(seconds: Floats, stages: int, virtual_stages: int) -> float:
    """Of the stage with most to do, wherever layers are cut: of `seconds` float64[layers]."""
    if stages * virtual_stages > seconds.size:
        return float(seconds.max())
    work = np.concatenate([[0.0], np.cumsum(seconds)])
    nothing = np.zeros_like(work)
    return anchor_split(MeanTimes(work, nothing, nothing), stages, virtual_stages)[1]


def _longest_s(task: LayoutTask, profile: LayerProfile, parallel: Parallel) -> float:
    """The longest sample of each batch, alone, at the degree that suits it best; mean."""
    mine = decoding(profile)
    token_s, square_s = (
        float((getattr(profile.forward, of) + getattr(profile.backward, of))[mine].sum())
        for of in ("token_s", "square_s")
    )
    intra_s, inter_s = ring_seconds(parallel, task.group, task.ring_token_bytes)
    cost = ContextCost(
        linear_s_per_token=token_s,
        attention_s_per_token2=square_s,
        ring_intra_s_per_token=intra_s,
        ring_inter_s_per_token=inter_s,
    )
    degrees = np.arange(1, parallel.replicas + 1)
    crosses = degrees > parallel.replicas_per_node(task.group)
    longest = [int(batch.lengths.llm_tokens.max()) for batch in task.batches]
    alone = [cost.times_s([each], degrees, crosses_node=crosses).min() for each in longest]
    return float(np.mean(alone))


def _gradient_s(task: LayoutTask, profile: LayerProfile, parallel: Parallel) -> float:
    """All that trains, evenly over the stages."""
    link = parallel.link_bytes_per_s(task.group, parallel.replicas)
    share = profile.trained_bytes.sum() / parallel.pipeline_stages
    return float(whole_gradients_s(share, parallel.replicas, link))
