"""The kernel of `allocate_modules`: an exact search over whole allocations, with bounds.

For each count D of the backbone's data-parallel ranks the batch has M = batch / D microbatches, and

    seconds = Σ warm-up of each module  +  (M − 1) · max over modules of t

A module's t falls with its stages, its warm-up never rises with them, and its GPUs grow: so once
the others stand, it takes the most stages that GPUs and memory allow. What is left out has a bound
at or above the best allocation found.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Columns of `shape`, one row a tensor-parallel size.
RANKS, SECONDS, STATES, KEPT = range(4)


@kernel
def held_bytes(
    row: Floats,
    optimizer: float,
    virtual: int,
    data: int,
    samples: int,
    stages: int,
    share: float,
    after: int,
    microbatches: int,
) -> float:
    """Bytes of a GPU of a module's first stage, which holds `share` of its layers and keeps the
    microbatches of 1F1B: one for each stage from it to the end, its own `stages` and those `after`
    it; interleaved, parts of more (core/topology.py)."""
    if row[RANKS] == 0:
        return 0.0
    own = float(stages)
    if virtual > 1 and stages > 1:
        own = (2.0 * (stages - 1) + (virtual - 1.0) * stages + 1.0) / virtual
    kept = min(float(microbatches), own + after) * samples * row[KEPT]
    held = row[STATES] + optimizer / (row[RANKS] * data) + kept
    return float(share * held)


@kernel
def warm_up_s(seconds: float, share: float, virtual: int) -> float:
    """Seconds until a module's last stage is done with the first microbatch, beyond which it takes
    its slowest stage a microbatch: interleaved, all but one stage's time is divided by the chunks.
    Without chunks it is all of `seconds`, whatever the stages (MMScale eq. 1)."""
    return seconds * (share + (1.0 - share) / virtual)


@kernel
def search_allocation(
    gpus: int,
    memory: float,
    batch: int,
    backbone_data: Ints,
    shapes: tuple[Floats, Floats, Floats],
    optimizers: Floats,
    virtual: Ints,
    stages: tuple[Ints, Ints, Ints],
    shares: tuple[Floats, Floats, Floats],
    datas: tuple[Ints, Ints, Ints],
) -> tuple[float, float, Ints]:
    """The least seconds, their lower bound, and the choice int64[3, 3]: tensor ranks' place, data
    ranks, stages of encoder, backbone, generator; infinity where nothing fits.

    `backbone_data` int64[n]: counts of the backbone's data-parallel ranks. Modules are (encoder,
    backbone, generator): `shapes` float64[k, 4], `stages` int64[p] rising, `shares` float64[p] part
    of the layers that the fullest stage has, `datas` int64[d] falling.
    """
    best = np.inf
    choice = np.zeros((3, 3), np.int64)
    enc, lm, gen = shapes
    least, bound = least_of_all(
        gpus, memory, batch, backbone_data, shapes, optimizers, virtual, stages, shares, datas
    )
    rising = np.argsort(bound)
    for place in rising:
        data = backbone_data[place]
        if bound[place] >= best:
            break
        micro = batch // data
        rounds = micro - 1.0
        enc_warm, enc_work = least[place, 0], least[place, 1]
        gen_warm, gen_work = least[place, 2], least[place, 3]
        for a in range(lm.shape[0]):
            for q in range(stages[1].size):
                p = stages[1][q]
                used = np.int64(lm[a, RANKS]) * data * p
                left = gpus - used
                if left < 0 or (left == 0 and enc_work + gen_work > 0):
                    break
                t_lm = lm[a, SECONDS] * shares[1][q]
                warm = warm_up_s(lm[a, SECONDS], shares[1][q], virtual[1])
                fluid = (enc_work + gen_work) / left if left > 0 else 0.0
                if warm + enc_warm + gen_warm + rounds * max(t_lm, fluid) >= best:
                    continue
                # Stages after it only add to what it keeps.
                if (
                    held_bytes(lm[a], optimizers[1], virtual[1], data, 1, p, shares[1][q], 0, micro)
                    > memory
                ):
                    continue
                for b in range(gen.shape[0]):
                    for dg in datas[2]:
                        if dg > data:
                            continue
                        samples = -(-data // dg)
                        seconds = gen[b, SECONDS] * samples
                        if (
                            warm + enc_warm + warm_up_s(seconds, 0.0, virtual[2]) + (rounds * t_lm)
                            >= best
                        ):
                            continue
                        for r in range(stages[2].size):
                            pg = stages[2][r]
                            rest = left - np.int64(gen[b, RANKS]) * dg * pg
                            if rest < 0 or (rest == 0 and enc_work > 0):
                                break
                            slow = max(t_lm, seconds * shares[2][r])
                            so_far = warm + warm_up_s(seconds, shares[2][r], virtual[2])
                            fluid = enc_work / rest if rest > 0 else 0.0
                            if so_far + enc_warm + rounds * max(slow, fluid) >= best:
                                continue
                            if (
                                held_bytes(
                                    gen[b],
                                    optimizers[2],
                                    virtual[2],
                                    dg,
                                    samples,
                                    pg,
                                    shares[2][r],
                                    0,
                                    micro,
                                )
                                > memory
                                or held_bytes(
                                    lm[a],
                                    optimizers[1],
                                    virtual[1],
                                    data,
                                    1,
                                    p,
                                    shares[1][q],
                                    pg,
                                    micro,
                                )
                                > memory
                            ):
                                continue
                            found, c, de, pe = best_encoder(
                                rest,
                                memory,
                                best,
                                so_far,
                                slow,
                                rounds,
                                micro,
                                data,
                                p + pg,
                                enc,
                                optimizers[0],
                                virtual[0],
                                stages[0],
                                shares[0],
                                datas[0],
                            )
                            if found < best:
                                best = found
                                choice[0, 0], choice[0, 1], choice[0, 2] = c, de, pe
                                choice[1, 0], choice[1, 1], choice[1, 2] = a, data, p
                                choice[2, 0], choice[2, 1], choice[2, 2] = b, dg, pg
    return best, bound[rising[0]], choice


@kernel
def least_of(
    gpus: int,
    memory: float,
    micro: int,
    data: int,
    after: int,
    shape: Floats,
    optimizer: float,
    virtual: int,
    stages: Ints,
    shares: Floats,
    datas: Ints,
) -> tuple[float, float]:
    """What a module adds at least, of all its choices that `gpus` of this memory hold: warm-up
    seconds, and GPU seconds a microbatch. `after`: fewest stages behind it. Infinity: none fits."""
    warm = work = np.inf
    for a in range(shape.shape[0]):
        for d in datas:
            samples = -(-data // d)
            seconds = shape[a, SECONDS] * samples
            if d > data or (
                warm_up_s(seconds, 0.0, virtual) >= warm and shape[a, RANKS] * d * seconds >= work
            ):
                continue
            for q in range(stages.size):
                if np.int64(shape[a, RANKS]) * d * stages[q] > gpus:
                    break
                held = held_bytes(
                    shape[a], optimizer, virtual, d, samples, stages[q], shares[q], after, micro
                )
                if held <= memory:
                    warm = min(warm, warm_up_s(seconds, 0.0, virtual))
                    work = min(work, shape[a, RANKS] * d * seconds)
                    break
    return warm, work


@kernel
def least_of_all(
    gpus: int,
    memory: float,
    batch: int,
    backbone_data: Ints,
    shapes: tuple[Floats, Floats, Floats],
    optimizers: Floats,
    virtual: Ints,
    stages: tuple[Ints, Ints, Ints],
    shares: tuple[Floats, Floats, Floats],
    datas: tuple[Ints, Ints, Ints],
) -> tuple[Floats, Floats]:
    """For each of `backbone_data` int64[n], what encoder and generator add at least, float64[n, 4]
    (warm-up and GPU seconds of each), and seconds that no allocation goes below, float64[n]: the
    least warm-up of every module, and all GPUs sharing all work as a fluid."""
    least = np.empty((backbone_data.size, 4))
    bound = np.empty(backbone_data.size)
    behind_lm = min(1, stages[2][0])
    for place in range(backbone_data.size):
        data = backbone_data[place]
        micro = batch // data
        warm, work = least_of(
            gpus,
            memory,
            micro,
            data,
            behind_lm,
            shapes[1],
            optimizers[1],
            virtual[1],
            stages[1],
            shares[1],
            backbone_data[place : place + 1],
        )
        least[place, 0], least[place, 1] = least_of(
            gpus,
            memory,
            micro,
            data,
            1 + behind_lm,
            shapes[0],
            optimizers[0],
            virtual[0],
            stages[0],
            shares[0],
            datas[0],
        )
        least[place, 2], least[place, 3] = least_of(
            gpus,
            memory,
            micro,
            data,
            0,
            shapes[2],
            optimizers[2],
            virtual[2],
            stages[2],
            shares[2],
            datas[2],
        )
        work += least[place, 1] + least[place, 3]
        warm += least[place, 0] + least[place, 2]
        bound[place] = warm + ((micro - 1.0) * work / gpus if micro > 1 else 0.0)
        if not work < np.inf:
            bound[place] = np.inf
    return least, bound


@kernel
def best_encoder(
    gpus: int,
    memory: float,
    best: float,
    so_far: float,
    slow: float,
    rounds: float,
    micro: int,
    data: int,
    after: int,
    shape: Floats,
    optimizer: float,
    virtual: int,
    stages: Ints,
    shares: Floats,
    datas: Ints,
) -> tuple[float, int, int, int]:
    """The least seconds below `best` with the encoder on `gpus`, and its choice."""
    a_best, d_best, p_best = 0, 0, 0
    for a in range(shape.shape[0]):
        ranks = np.int64(shape[a, RANKS])
        for d in datas:
            samples = -(-data // d)
            seconds = shape[a, SECONDS] * samples
            least = so_far + warm_up_s(seconds, 0.0, virtual) + rounds * slow
            if d > data or ranks * d > gpus or least >= best:
                continue
            for q in range(stages.size - 1, -1, -1):
                p, share = stages[q], shares[q]
                if ranks * d * p > gpus:
                    continue
                found = so_far + warm_up_s(seconds, share, virtual)
                found += rounds * max(slow, seconds * share)
                if found >= best:
                    break  # with fewer stages it only takes longer
                held = held_bytes(shape[a], optimizer, virtual, d, samples, p, share, after, micro)
                if held <= memory:
                    best, a_best, d_best, p_best = found, a, d, p
                    break
    return best, a_best, d_best, p_best
