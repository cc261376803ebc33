"""All allocations of small clusters, priced one by one, and random modules for them."""

from itertools import product

import numpy as np

from dataservice.planning import ModuleLoad


def brute_force(
    loads: list[ModuleLoad | None],
    gpus: int,
    batch: int,
    memory: float,
    apart: tuple[tuple[int, float], ...] = (),
) -> float:
    """Least seconds of every allocation, each priced and weighed as the paper's section says.
    `apart`: GPUs and memory of each module's own, instead of those that they share."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    best = np.inf
    choices = []
    for load in loads:
        if load is None:
            choices.append([(0, 0, 0, 0)])
            continue
        choices.append(
            [
                (place, ranks, data, stages)
                for place, ranks in enumerate(load.tensor_ranks.tolist())
                for data in divisors
                for stages in range(1, max(1, load.layers // load.virtual_stages) + 1)
                if ranks * data * stages <= gpus and data % load.expert_ranks == 0
            ]
        )
    for chosen in product(*choices):
        taken = [ranks * data * stages for _, ranks, data, stages in chosen]
        if sum(taken) > gpus:
            continue
        if any(taken[at] > own for at, (own, _) in enumerate(apart)):
            continue
        width = chosen[1][2]
        microbatches = batch // width
        if any(data > width for _, _, data, _ in chosen):
            continue
        slowest = warm = 0.0
        fits = True
        for at, (load, (place, ranks, data, stages)) in enumerate(zip(loads, chosen, strict=True)):
            if load is None:
                continue
            samples = -(-width // data)
            fullest = -(-load.layers // stages) / load.layers
            whole = load.sample_s[place] * samples
            stage, chunks = whole * fullest, load.virtual_stages
            warm += stage + (whole - stage) / chunks
            warm += 2 * load.gradients_s[place] * fullest * (data - 1) / data
            slowest = max(slowest, stage)
            inside = stages
            if chunks > 1 and stages > 1:
                inside = (2 * (stages - 1) + (chunks - 1) * stages + 1) / chunks
            behind = sum(each[3] for each in chosen[at + 1 :])
            held = load.state_bytes[place] + load.optimizer_bytes / (ranks * data)
            held += min(microbatches, inside + behind) * samples * load.kept_bytes[place]
            fits = fits and fullest * held <= (apart[at][1] if apart else memory)
        if fits:
            best = min(best, warm + (microbatches - 1) * slowest)
    return best


def random_load(rng: np.random.Generator, name: str, *, virtual: int = 1) -> ModuleLoad:
    sizes = np.array([1, 2, 4])[: rng.integers(1, 4)]
    return ModuleLoad.of(
        name,
        layers=int(rng.integers(virtual, 9)),
        tensor_ranks=sizes,
        sample_s=rng.uniform(0.1, 5) / sizes ** rng.uniform(0.5, 1.0),
        state_bytes=rng.uniform(1, 30) / sizes,
        kept_bytes=rng.uniform(0, 3) / sizes,
        optimizer_bytes=rng.uniform(0, 40),
        gradients_s=rng.choice([0, 1]) * rng.uniform(0, 3) / sizes,
        virtual_stages=virtual,
        expert_ranks=int(rng.choice([1, 1, 2])),
    )
