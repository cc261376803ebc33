"""Encoder and decoder on kinds of nodes of their own: the least seconds of all ways."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import workloads
from dataservice.core.errors import PlanningError
from dataservice.planning.layout.allocate_mix import NodeKind, allocate_mix
from dataservice.planning.layout.module_layout import lay_out_mix, lay_out_modules
from dataservice.planning.layout.task import LayoutTask
from tests.planning.layout.allocations import brute_force, random_load
from tests.planning.layout.small_models import MODEL, nodes

BATCHES = (workloads.step_samples(workloads.vlm_sft(64, 0)),)


def random_kind(rng):
    """Its GPUs are as much faster or slower as their loads happen to be."""
    return NodeKind(
        gpus=int(rng.integers(2, 9)),
        memory_bytes=float(rng.uniform(4, 60)),
        encoder=random_load(rng, "vision"),
        decoder=random_load(rng, "decoder"),
    )


def least_of_all_ways(kinds, batch):
    found = np.inf
    for decoding in kinds:
        for encoding in kinds:
            loads = [encoding.encoder, decoding.decoder, None]
            if encoding is decoding:
                seconds = brute_force(loads, decoding.gpus, batch, decoding.memory_bytes)
            else:
                apart = tuple((kind.gpus, kind.memory_bytes) for kind in (encoding, decoding))
                seconds = brute_force(loads, sum(gpus for gpus, _ in apart), batch, 0.0, apart)
            found = min(found, seconds)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_no_way_of_using_a_small_mix_takes_less(seed):
    rng = np.random.default_rng(seed)
    kinds = [random_kind(rng) for _ in range(2 + seed % 2)]
    batch = int(rng.choice([4, 6, 8]))
    best = least_of_all_ways(kinds, batch)
    if np.isinf(best):
        with pytest.raises(PlanningError, match=r"encoder on kind 0, decoder on kind 0: "):
            allocate_mix(kinds, batch=batch)
        return
    found = allocate_mix(kinds, batch=batch)
    made = found.allocation
    assert made.seconds == pytest.approx(best, rel=1e-12)
    assert made.lower_bound_s <= made.seconds * (1 + 1e-12)
    encoder, decoder = made.modules
    on = kinds[found.encoder_kind], kinds[found.decoder_kind]
    used = encoder.gpus + decoder.gpus if on[0] is on[1] else encoder.gpus
    assert used <= on[0].gpus
    assert decoder.gpus <= on[1].gpus
    for module, kind in zip((encoder, decoder), on, strict=True):
        assert module.held_bytes <= kind.memory_bytes


def test_one_kind_given_twice_is_not_one_pool():
    kind = random_kind(np.random.default_rng(0))
    twice = allocate_mix([kind, kind], batch=4).allocation
    assert twice.seconds == pytest.approx(least_of_all_ways([kind, replace(kind)], 4))
    with pytest.raises(PlanningError, match="no kind of nodes"):
        allocate_mix([], batch=4)


def test_encoders_go_to_old_nodes_when_the_decoder_keeps_the_new_ones_busy():
    new = nodes(80e9)
    old = replace(new, device=replace(new.device, name="old", peak_flops=new.device.peak_flops / 2))
    tasks = [LayoutTask(model=MODEL, group=group, batches=BATCHES) for group in (old, new)]
    found = lay_out_mix(tasks)
    assert (found.encoder_group, found.decoder_group) == (old, new)
    alone = lay_out_modules(MODEL, new, BATCHES)
    assert found.modules.allocation.seconds < alone.allocation.seconds


def test_nodes_without_room_for_anything_are_left_alone():
    new, tiny = nodes(80e9), nodes(1e6)
    tasks = [LayoutTask(model=MODEL, group=group, batches=BATCHES) for group in (tiny, new)]
    found = lay_out_mix(tasks)
    assert (found.encoder_group, found.decoder_group) == (new, new)
    assert found.modules == lay_out_modules(MODEL, new, BATCHES)


def test_a_mix_is_not_asked_for_a_model_without_encoders():
    task = LayoutTask(model=replace(MODEL, encoders=()), group=nodes(80e9), batches=BATCHES)
    with pytest.raises(PlanningError, match="has 0 encoders and no generator"):
        lay_out_mix([task])
