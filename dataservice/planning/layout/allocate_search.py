"""The kernels of `allocate_modules`: an exact search over whole allocations, with bounds.

For each count D of the backbone's data-parallel ranks the batch has M = batch / D microbatches, and

    seconds = Σ warm-up and sum of gradients of each module  +  (M − 1) · max over modules of t

Backbone, generator and encoder are chosen in this order, since a module keeps microbatches for the
stages behind it. A module's t and its gradients fall with its stages, its warm-up never rises with
them, and its GPUs grow: so the encoder, the last, takes the most stages that GPUs and memory allow.
What is left out has a bound at or above the best allocation found.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Columns of a module's shape, one row a tensor-parallel size.
RANKS, SECONDS, STATES, KEPT, GRADIENTS = range(5)


class Choices(NamedTuple):
    """What one module may have: `shape` float64[k, 5], bytes of its `optimizer` states, `virtual`
    stages, counts of `stages` int64[p] rising, `shares` float64[p] part of the layers that the
    fullest of so many stages has, `datas` int64[d] falling counts of data-parallel ranks."""

    shape: Floats
    optimizer: float
    virtual: int
    stages: Ints
    shares: Floats
    datas: Ints


class Begun(NamedTuple):
    """An allocation as far as it stands: GPUs that are `left`, seconds that are taken
    `once` a step, seconds of the slowest stage, and `stages` in all."""

    left: int
    once: float
    slowest_s: float
    stages: int


class Step(NamedTuple):
    """What holds for all allocations of one count of data-parallel ranks: GPUs, bytes of each,
    `data` ranks of the backbone, `micro`batches."""

    gpus: int
    memory: float
    data: int
    micro: int


@kernel
def held_bytes(
    module: Choices, row: int, data: int, place: int, after: int, samples: int, micro: int
) -> float:
    """Bytes of a GPU of a module's first stage, with the stages at `place`: it keeps the
    microbatches of 1F1B, one for each stage from it to the end, its own and those `after` it;
    interleaved, parts of more (core/topology.py)."""
    ranks = module.shape[row, RANKS]
    if ranks == 0:
        return 0.0
    own = float(module.stages[place])
    if module.virtual > 1 and own > 1:
        own = (2.0 * (own - 1) + (module.virtual - 1.0) * own + 1.0) / module.virtual
    kept = min(float(micro), own + after) * samples * module.shape[row, KEPT]
    states = module.shape[row, STATES] + module.optimizer / (ranks * data)
    return float(module.shares[place] * (states + kept))


@kernel
def warm_up_s(seconds: float, share: float, virtual: int) -> float:
    """Seconds until a module's last stage is done with the first microbatch, beyond which it takes
    its slowest stage a microbatch: interleaved, all but one stage's time is divided by the chunks.
    Without chunks it is all of `seconds`, whatever the stages (MMScale eq. 1)."""
    return seconds * (share + (1.0 - share) / virtual)


@kernel
def once_s(module: Choices, row: int, data: int, place: int, seconds: float) -> float:
    """What a module takes once a step: its warm-up, and the sum of its fullest stage's gradients
    over a ring of `data` ranks."""
    share = module.shares[place]
    gradients = module.shape[row, GRADIENTS] * share * 2.0 * (data - 1.0) / data
    return float(warm_up_s(seconds, share, module.virtual) + gradients)


@kernel
def search_allocation(
    gpus: int, memory: float, batch: int, encoder: Choices, backbone: Choices, generator: Choices
) -> tuple[float, float, Ints]:
    """The least seconds, their lower bound, and the choice int64[3, 3]: tensor ranks' row, data
    ranks, stages of encoder, backbone, generator; infinity where nothing fits."""
    best = np.inf
    choice = np.zeros((3, 3), np.int64)
    least, bound = least_of_all(gpus, memory, batch, encoder, backbone, generator)
    rising = np.argsort(bound)
    for at in rising:
        if bound[at] >= best:
            break
        step = Step(gpus, memory, backbone.datas[at], batch // backbone.datas[at])
        for a in range(backbone.shape.shape[0]):
            for q in range(backbone.stages.size):
                begun = begin(step, backbone, a, q)
                if begun.left < 0:
                    break
                if step_bound(step, begun, least[at, 0] + least[at, 2],
                              least[at, 1] + least[at, 3]) >= best:  # fmt: skip
                    continue
                best = best_generator(
                    step, begun, a, q, encoder, backbone, generator, least[at], best, choice
                )
    return best, bound[rising[0]], choice


@kernel
def begin(step: Step, backbone: Choices, row: int, place: int) -> Begun:
    """The allocation with the backbone alone."""
    stages = backbone.stages[place]
    used = np.int64(backbone.shape[row, RANKS]) * step.data * stages
    seconds = backbone.shape[row, SECONDS]
    once = once_s(backbone, row, step.data, place, seconds)
    return Begun(step.gpus - used, once, seconds * backbone.shares[place], stages)


@kernel
def join(begun: Begun, module: Choices, row: int, data: int, place: int, seconds: float) -> Begun:
    """The allocation with one module more, whose replicas take `seconds` a microbatch."""
    stages = module.stages[place]
    used = np.int64(module.shape[row, RANKS]) * data * stages
    once = begun.once + once_s(module, row, data, place, seconds)
    slowest = max(begun.slowest_s, seconds * module.shares[place])
    return Begun(begun.left - used, once, slowest, begun.stages + stages)


@kernel
def step_bound(step: Step, begun: Begun, warm: float, work: float) -> float:
    """Seconds that nothing goes below once modules that add `warm`-up and GPU seconds of `work` at
    least have joined; infinity where no GPU is left for them."""
    fluid = 0.0
    if work > 0:
        if begun.left <= 0:
            return float(np.inf)
        fluid = work / begun.left
    return begun.once + warm + (step.micro - 1.0) * max(begun.slowest_s, fluid)


@kernel
def best_generator(
    step: Step,
    begun: Begun,
    row: int,
    place: int,
    encoder: Choices,
    backbone: Choices,
    generator: Choices,
    least: Floats,
    best: float,
    choice: Ints,
) -> float:
    """The least seconds at or below `best` with the backbone's choice (`row`, `place`); where they
    are below, `choice` has it. `least` float64[4]: what encoder and generator add at least."""
    for b in range(generator.shape.shape[0]):
        for data in generator.datas:
            samples = -(-step.data // data)
            seconds = generator.shape[b, SECONDS] * samples
            least_warm = least[0] + warm_up_s(seconds, 0.0, generator.virtual)
            if data > step.data or step_bound(step, begun, least_warm, 0.0) >= best:
                continue
            for r in range(generator.stages.size):
                joined = join(begun, generator, b, data, r, seconds)
                if joined.left < 0:
                    break
                if step_bound(step, joined, least[0], least[1]) >= best:
                    continue
                behind = generator.stages[r]
                held = max(
                    held_bytes(generator, b, data, r, 0, samples, step.micro),
                    held_bytes(backbone, row, step.data, place, behind, 1, step.micro),
                )
                if held > step.memory:
                    continue
                found, c, d, q = best_encoder(step, joined, encoder, best)
                if found < best:
                    best = found
                    choice[0, 0], choice[0, 1], choice[0, 2] = c, d, encoder.stages[q]
                    choice[1, 0], choice[1, 1] = row, step.data
                    choice[1, 2] = backbone.stages[place]
                    choice[2, 0], choice[2, 1], choice[2, 2] = b, data, behind
    return best


@kernel
def best_encoder(
    step: Step, begun: Begun, encoder: Choices, best: float
) -> tuple[float, int, int, int]:
    """The least seconds at or below `best` with the encoder on the GPUs that are left, and where
    they are below, its choice."""
    row, ranks, place = 0, 0, 0
    for a in range(encoder.shape.shape[0]):
        for data in encoder.datas:
            samples = -(-step.data // data)
            seconds = encoder.shape[a, SECONDS] * samples
            warm = warm_up_s(seconds, 0.0, encoder.virtual)
            if data > step.data or step_bound(step, begun, warm, 0.0) >= best:
                continue
            for q in range(encoder.stages.size - 1, -1, -1):
                joined = join(begun, encoder, a, data, q, seconds)
                if joined.left < 0:
                    continue
                found = step_bound(step, joined, 0.0, 0.0)
                if found >= best:
                    break  # with fewer stages it only takes longer
                held = held_bytes(encoder, a, data, q, begun.stages, samples, step.micro)
                if held <= step.memory:
                    best, row, ranks, place = found, a, data, q
                    break
    return best, row, ranks, place


@kernel
def least_of_all(
    gpus: int, memory: float, batch: int, encoder: Choices, backbone: Choices, generator: Choices
) -> tuple[Floats, Floats]:
    """For each of the backbone's counts of data-parallel ranks, what encoder and generator add at
    least, float64[n, 4] (warm-up and GPU seconds of each), and seconds that no allocation goes
    below, float64[n]: the least warm-up of every module, and all GPUs sharing all work as a
    fluid."""
    least = np.empty((backbone.datas.size, 4))
    bound = np.empty(backbone.datas.size)
    behind = min(1, generator.stages[0])
    for at in range(backbone.datas.size):
        data = backbone.datas[at]
        step = Step(gpus, memory, data, batch // data)
        warm, work = least_of(step, backbone, backbone.datas[at : at + 1], behind)
        least[at, 0], least[at, 1] = least_of(step, encoder, encoder.datas, 1 + behind)
        least[at, 2], least[at, 3] = least_of(step, generator, generator.datas, 0)
        work += least[at, 1] + least[at, 3]
        warm += least[at, 0] + least[at, 2]
        bound[at] = warm + ((step.micro - 1.0) * work / gpus if work < np.inf else np.inf)
    return least, bound


@kernel
def least_of(step: Step, module: Choices, datas: Ints, after: int) -> tuple[float, float]:
    """What a module adds at least, of all its choices that the step's GPUs hold: warm-up seconds,
    and GPU seconds a microbatch. `after`: fewest stages behind it. Infinity where none fits."""
    least_warm = least_work = np.inf
    for a in range(module.shape.shape[0]):
        for data in datas:
            samples = -(-step.data // data)
            seconds = module.shape[a, SECONDS] * samples
            warm = warm_up_s(seconds, 0.0, module.virtual)
            work = module.shape[a, RANKS] * data * seconds
            if data > step.data or (warm >= least_warm and work >= least_work):
                continue
            for q in range(module.stages.size):
                if np.int64(module.shape[a, RANKS]) * data * module.stages[q] > step.gpus:
                    break
                if held_bytes(module, a, data, q, after, samples, step.micro) <= step.memory:
                    least_warm, least_work = min(least_warm, warm), min(least_work, work)
                    break
    return least_warm, least_work
