"""Allocations of GPUs to modules: the least seconds of all, never above memory."""

from dataclasses import replace

import numpy as np
import pytest

from dataservice.planning import Allocation, ModuleLoad, PlanningError, allocate_modules
from tests.planning.layout.allocations import brute_force, random_load

GIB = float(1 << 30)


@pytest.mark.parametrize("seed", range(60))
def test_no_allocation_of_a_small_cluster_takes_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads: list[ModuleLoad | None] = [
        random_load(rng, "vision") if seed % 3 else None,
        random_load(rng, "decoder", virtual=1 + seed % 2),
        random_load(rng, "generator") if seed % 4 else None,
    ]
    gpus, batch = int(rng.integers(4, 15)), int(rng.choice([4, 6, 8, 12]))
    memory = float(rng.uniform(4, 60))
    best = brute_force(loads, gpus, batch, memory)
    encoder, backbone, generator = loads
    assert backbone is not None

    def ours() -> Allocation:
        return allocate_modules(
            backbone, gpus=gpus, batch=batch, memory_bytes=memory, encoder=encoder,
            generator=generator,
        )  # fmt: skip

    if np.isinf(best):
        with pytest.raises(PlanningError, match="GPUs of"):
            ours()
        return
    found = ours()
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert found.lower_bound_s <= found.seconds * (1 + 1e-12)
    assert found.gpus <= gpus
    assert max(module.held_bytes for module in found.modules) <= memory


LM = ModuleLoad.of(
    "decoder", layers=80, tensor_ranks=[1, 2, 4, 8], sample_s=np.array([8, 4.2, 2.2, 1.2]),
    state_bytes=420e9 / np.array([1, 2, 4, 8]), kept_bytes=60e9 / np.array([1, 2, 4, 8]),
    optimizer_bytes=840e9,
)  # fmt: skip
VIT = ModuleLoad.of(
    "vision", layers=32, tensor_ranks=[1], sample_s=[0.3], state_bytes=[4e9], kept_bytes=[6e9],
    optimizer_bytes=8e9,
)  # fmt: skip
UNET = replace(VIT, name="generator", layers=25, sample_s=np.array([0.6]))


def test_the_backbone_gets_most_where_it_works_most() -> None:
    found = allocate_modules(
        LM, gpus=1296, batch=1920, memory_bytes=80e9, encoder=VIT, generator=UNET
    )
    by_gpus = sorted(found.modules, key=lambda module: module.gpus)
    assert [module.name for module in by_gpus] == ["vision", "generator", "decoder"]
    assert found["decoder"].data_ranks * found.microbatches == 1920
    assert found.gap < 0.2


def test_a_frozen_module_needs_fewer_gpus() -> None:
    frozen = replace(UNET, sample_s=UNET.sample_s / 3, kept_bytes=UNET.kept_bytes * 0,
                     optimizer_bytes=0.0)  # fmt: skip
    trained, less = (
        allocate_modules(LM, gpus=648, batch=960, memory_bytes=80e9, encoder=VIT, generator=each)
        for each in (UNET, frozen)
    )
    assert less.seconds < trained.seconds
    assert less["generator"].gpus < trained["generator"].gpus


def test_gradients_that_take_long_to_sum_speak_for_fewer_data_parallel_ranks() -> None:
    slow = replace(LM, gradients_s=40 / LM.tensor_ranks)
    found = [
        allocate_modules(each, gpus=1296, batch=1920, memory_bytes=80e9, encoder=VIT)
        for each in (LM, slow)
    ]
    assert found[1]["decoder"].data_ranks < found[0]["decoder"].data_ranks
    assert found[1].gradients_s > found[0].gradients_s == 0


def test_expert_ranks_come_whole() -> None:
    found = allocate_modules(
        replace(LM, expert_ranks=16), gpus=648, batch=960, memory_bytes=80e9, encoder=VIT
    )
    assert found["decoder"].data_ranks % 16 == 0


def test_virtual_stages_shorten_the_warm_up_and_keep_more() -> None:
    plain, chunked = (
        allocate_modules(
            replace(LM, virtual_stages=chunks, data_ranks=(6,), tensor_ranks=np.array([8]),
                    sample_s=np.array([1.2]), state_bytes=np.array([52e9]),
                    kept_bytes=np.array([7e9]), gradients_s=np.zeros(1)),
            gpus=480, batch=960, memory_bytes=80e9,
        )
        for chunks in (1, 4)
    )  # fmt: skip
    assert plain["decoder"].pipeline_stages == chunked["decoder"].pipeline_stages == 10
    assert chunked.warmup_s == pytest.approx(plain.warmup_s * (0.1 + 0.9 / 4))
    assert chunked["decoder"].held_bytes > plain["decoder"].held_bytes


def test_the_same_seconds_come_with_the_fewest_stages() -> None:
    found = allocate_modules(
        replace(LM, data_ranks=(1,)), gpus=4096, batch=8, memory_bytes=1e15, encoder=VIT
    )
    slowest = max(module.stage_s for module in found.modules)
    vision = found["vision"]
    fewer = vision.pipeline_stages - 1
    assert fewer == 0 or vision.warmup_s * -(-32 // fewer) / 32 > slowest


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": 2}, "gpus is 2 for 3 modules; give at least one a module"),
        ({"batch": 0}, "batch is 0; give 1 to"),
        ({"memory_bytes": 0.0}, "memory_bytes is 0.0; give the bytes of a GPU"),
        ({"gpus": 16}, r"bytes a GPU are missing in the allocation that needs the least"),
        ({"memory_bytes": 1e9}, "16 GPUs of 1,000,000,000 bytes do not hold vision, decoder"),
        ({"backbone": replace(LM, data_ranks=(7,))}, "no count of data-parallel ranks divides"),
        ({"gpus": 3, "backbone": replace(LM, tensor_ranks=np.array([2, 4, 8, 16]))},
         "3 GPUs of .* whatever their memory: give more GPUs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_is_missing_and_what_would_do(
    given: dict[str, object], said: str
) -> None:
    values = {"backbone": LM, "gpus": 16, "batch": 16, "memory_bytes": 80e9, "encoder": VIT,
              "generator": UNET} | given  # fmt: skip
    with pytest.raises(PlanningError, match=said):
        allocate_modules(values.pop("backbone"), **values)  # type: ignore[arg-type]


def test_what_is_said_to_be_missing_is_enough() -> None:
    try:
        allocate_modules(LM, gpus=16, batch=16, memory_bytes=40e9, encoder=VIT)
    except PlanningError as error:
        words = str(error).replace(",", "").split()
        needed = float(words[words.index("least") + 1].rstrip("."))
        gpus = int(words[words.index("Give") + 1])
    allocate_modules(LM, gpus=16, batch=16, memory_bytes=needed, encoder=VIT)
    allocate_modules(LM, gpus=gpus, batch=16, memory_bytes=40e9, encoder=VIT)
    with pytest.raises(PlanningError):
        allocate_modules(LM, gpus=16, batch=16, memory_bytes=needed * 0.9999, encoder=VIT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_ranks": []}, "give sizes of at least 1, each once"),
        ({"tensor_ranks": [2, 2], "sample_s": [1, 1]}, "each once"),
        ({"sample_s": [1.0, 2.0]}, "give one number, or one for each"),
        ({"sample_s": [np.nan]}, "must be finite and at least 0"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"virtual_stages": 9}, "lower virtual_stages"),
        ({"gradients_s": [-1.0]}, "gradients_s is .* at least 0"),
        ({"data_ranks": (0, 4)}, "data_ranks is 0; it must be at least 1"),
    ],
)
def test_a_load_that_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    values = {"layers": 8, "tensor_ranks": [1], "sample_s": [1.0]} | given
    with pytest.raises(PlanningError, match=said):
        ModuleLoad.of("vision", **values)  # type: ignore[arg-type]
