"""GPUs and TP, DP, PP of encoder, backbone and generator: MMScale §4, exact.

    encoder TP·DP·PP ─► backbone TP·DP·PP ─► generator TP·DP·PP        Σ GPUs ≤ N

A batch is cut into M = batch / DP of the backbone microbatches. A module of data parallelism d
takes ⌈DP/d⌉ samples of each, and its slowest stage, with ⌈layers/PP⌉ of its layers, t seconds; so

    step = Σ (warm-up + sum of gradients)  +  (M − 1) · max t

Corrections to the paper: T_lm is C_lm/PP_lm, and eq. 2 divides by PP once; z are the generator's
GPUs; the warm-up of a fixed TP and DP does not depend on the GPUs, so that no convex relaxation is
needed: counts of stages are few, and the search over them is exact. Samples and layers are whole.
The first stage of the encoder keeps a microbatch for each stage of all modules behind it, and not
for its own stages alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import require
from dataservice.planning.layout.allocate_search import (
    GRADIENTS,
    KEPT,
    RANKS,
    SECONDS,
    STATES,
    Choices,
    Floats,
    Ints,
    held_bytes,
    search_allocation,
)
from dataservice.planning.layout.module_load import ModuleLoad

MOST_GPUS = 1 << 22
_MEMORY_STEPS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAllocation:
    """What one module gets. `samples`: how many of a microbatch one of its replicas takes;
    `stage_s`: forward and backward seconds of its slowest stage for them; `held_bytes`: of a GPU of
    its first stage, which holds most; `gradients_s`: of summing a stage's gradients."""

    name: str
    tensor_ranks: int
    data_ranks: int
    pipeline_stages: int
    samples: int
    stage_s: float
    warmup_s: float
    gradients_s: float
    held_bytes: float

    @property
    def gpus(self) -> int:
        """Its GPUs."""
        return self.tensor_ranks * self.data_ranks * self.pipeline_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """GPUs for every module. `seconds` of a step are `warmup_s`, `gradients_s` and `steady_s`; no
    allocation takes
    less (the search is exact). `lower_bound_s` proves it by another way, and less sharply: all GPUs
    share the work as a fluid, in the sizes of parallelism that memory allows."""

    modules: tuple[ModuleAllocation, ...]
    microbatches: int
    warmup_s: float
    gradients_s: float
    steady_s: float
    lower_bound_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.warmup_s + self.gradients_s + self.steady_s

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound, relatively."""
        return self.seconds / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else 0.0

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(module.gpus for module in self.modules)

    def __getitem__(self, name: str) -> ModuleAllocation:
        return next(module for module in self.modules if module.name == name)


class _Problem(NamedTuple):
    """The kernel's arguments, in its order."""

    gpus: int
    memory: float
    batch: int
    encoder: Choices
    backbone: Choices
    generator: Choices

    @property
    def modules(self) -> tuple[Choices, Choices, Choices]:
        """In the order in which they run, which is that of a choice's rows."""
        return self.encoder, self.backbone, self.generator


def allocate_modules(
    backbone: ModuleLoad,
    *,
    gpus: int,
    batch: int,
    memory_bytes: float,
    encoder: ModuleLoad | None = None,
    generator: ModuleLoad | None = None,
) -> Allocation:
    """The allocation of at most `gpus` GPUs of `memory_bytes` with the least seconds a step of
    `batch` samples (MMScale §4, corrected as above). Of equal ones, each module has the fewest
    stages. Exact: bounded by D·(TP·PP)·(TP·DP·PP)·(TP·DP) candidates, nearly all of which a bound
    leaves out. Raises PlanningError where nothing fits, with what is missing."""
    loads = (encoder, backbone, generator)
    _check(gpus, batch, memory_bytes, loads)
    problem = _problem(loads, gpus=gpus, batch=batch, memory=float(memory_bytes))
    best, bound, choice = search_allocation(*problem)
    if not np.isfinite(best):
        raise PlanningError(_why_not(problem, loads))
    answer = _answer(problem, loads, _fewest_stages(problem, choice), bound)
    require(
        answer.gpus <= gpus and abs(answer.seconds - best) <= 1e-9 * best,
        f"{answer.gpus} of {gpus} GPUs and {answer.seconds} s of {best} s",
    )
    held = max(module.held_bytes for module in answer.modules)
    require(held <= memory_bytes, f"a GPU holds {held:g} of {memory_bytes:g} bytes")
    return answer


def _check(
    gpus: int, batch: int, memory_bytes: float, loads: tuple[ModuleLoad | None, ...]
) -> None:
    present = [load for load in loads if load]
    if not len(present) <= gpus <= MOST_GPUS:
        raise PlanningError(
            f"gpus is {gpus} for {len(present)} modules; give at least one a module, and at most "
            f"{MOST_GPUS:,}"
        )
    if not 1 <= batch <= MOST_GPUS:
        raise PlanningError(f"batch is {batch}; give 1 to {MOST_GPUS:,} samples a step")
    if not memory_bytes > 0:
        raise PlanningError(f"memory_bytes is {memory_bytes}; give the bytes of a GPU, above 0")


def _problem(
    loads: tuple[ModuleLoad | None, ...], *, gpus: int, batch: int, memory: float
) -> _Problem:
    whole = np.arange(1, batch + 1)
    divisors = whole[batch % whole == 0]
    encoder, backbone, generator = (choices_of(load, divisors, gpus) for load in loads)
    return _Problem(gpus, memory, batch, encoder, backbone, generator)


def choices_of(load: ModuleLoad | None, divisors: Ints, gpus: int) -> Choices:
    """What a module may have on so many GPUs. Raises PlanningError where it has no data ranks."""
    stages, shares = _stage_counts(load, gpus)
    return Choices(
        shape=_shape(load),
        optimizer=load.optimizer_bytes if load else 0.0,
        virtual=load.virtual_stages if load else 1,
        stages=stages,
        shares=shares,
        datas=_data_counts(load, divisors, gpus),
    )


def _shape(load: ModuleLoad | None) -> Floats:
    """float64[k, 5]; a module that is not there takes no GPU and no time."""
    if load is None:
        return np.zeros((1, 5))
    found = np.empty((load.tensor_ranks.size, 5))
    found[:, RANKS], found[:, SECONDS] = load.tensor_ranks, load.sample_s
    found[:, STATES], found[:, KEPT] = load.state_bytes, load.kept_bytes
    found[:, GRADIENTS] = load.gradients_s
    return found


def _stage_counts(load: ModuleLoad | None, gpus: int) -> tuple[Ints, Floats]:
    """Counts of stages that differ in their fullest stage: int64[p] rising, and its part of the
    layers float64[p]."""
    if load is None:
        return np.zeros(1, np.int64), np.zeros(1)
    most = max(1, min(load.layers // load.virtual_stages, gpus))
    counts = np.arange(1, most + 1)
    fullest = -(-load.layers // counts)
    fewest = np.concatenate(([True], fullest[1:] < fullest[:-1]))
    return counts[fewest], fullest[fewest] / load.layers


def _data_counts(load: ModuleLoad | None, divisors: Ints, gpus: int) -> Ints:
    """Counts of data-parallel ranks, int64[d] falling: large ones are good allocations soon."""
    if load is None:
        return np.ones(1, np.int64)
    allowed = divisors[divisors * int(load.tensor_ranks.min()) <= gpus]
    if load.data_ranks is not None:
        allowed = np.intersect1d(allowed, np.array(load.data_ranks, np.int64))
    allowed = allowed[allowed % load.expert_ranks == 0]
    if allowed.size == 0:
        raise PlanningError(
            f"{load.name}: no count of data-parallel ranks divides the batch, is a multiple of "
            f"expert_ranks ({load.expert_ranks}), and leaves each a GPU; change the batch, "
            "expert_ranks or data_ranks"
        )
    return np.ascontiguousarray(allowed[::-1].astype(np.int64))


def _fewest_stages(problem: _Problem, choice: Ints) -> Ints:
    """The same seconds with the fewest stages of each module: int64[3, 3]."""
    least = choice.copy()
    slowest = max(_stage_s(problem, choice, module) for module in range(3))
    for module, choices in enumerate(problem.modules):
        if choices.virtual > 1 or choices.shape[choice[module, 0], GRADIENTS] > 0:
            continue  # fewer stages make its warm-up, or the sum of its gradients, longer
        for count in choices.stages:
            tried = least.copy()
            tried[module, 2] = count
            fits = all(_held(problem, tried, each) <= problem.memory for each in range(3))
            if fits and _stage_s(problem, tried, module) <= slowest:
                least = tried
                break
    return least


def _place(problem: _Problem, choice: Ints, module: int) -> int:
    """Where a module's count of stages stands among those it may have."""
    return int(np.searchsorted(problem.modules[module].stages, choice[module, 2]))


def _samples(choice: Ints, module: int) -> int:
    """Samples of a microbatch that one replica of the module takes."""
    return -(-int(choice[1, 1]) // max(int(choice[module, 1]), 1))


def _sample_s(problem: _Problem, choice: Ints, module: int) -> float:
    """Seconds of all its samples of a microbatch."""
    row = problem.modules[module].shape[choice[module, 0]]
    return float(row[SECONDS]) * _samples(choice, module)


def _stage_s(problem: _Problem, choice: Ints, module: int) -> float:
    share = problem.modules[module].shares[_place(problem, choice, module)]
    return _sample_s(problem, choice, module) * float(share)


def _gradients_s(problem: _Problem, choice: Ints, module: int) -> float:
    choices, data = problem.modules[module], int(choice[module, 1])
    share = float(choices.shares[_place(problem, choice, module)])
    return float(choices.shape[choice[module, 0], GRADIENTS]) * share * 2.0 * (data - 1) / data


def _held(problem: _Problem, choice: Ints, module: int) -> float:
    return float(
        held_bytes(
            problem.modules[module],
            int(choice[module, 0]),
            max(int(choice[module, 1]), 1),
            _place(problem, choice, module),
            int(choice[module + 1 :, 2].sum()),
            _samples(choice, module),
            problem.batch // int(choice[1, 1]),
        )
    )


def answer_of(
    encoding: ModuleLoad,
    decoding: ModuleLoad,
    encoder: Choices,
    decoder: Choices,
    batch: int,
    choice: Ints,
    bound: float,
) -> Allocation:
    """The allocation of a choice int64[3, 3] of encoder and backbone, on whichever GPUs."""
    nothing = choices_of(None, np.ones(1, np.int64), 1)
    problem = _Problem(MOST_GPUS, np.inf, batch, encoder, decoder, nothing)
    return _answer(problem, (encoding, decoding, None), choice, bound)


def _answer(
    problem: _Problem,
    loads: tuple[ModuleLoad | None, ...],
    choice: Ints,
    bound: float,
) -> Allocation:
    modules = []
    for module, load in enumerate(loads):
        if load is None:
            continue
        seconds = _sample_s(problem, choice, module)
        stage_s = _stage_s(problem, choice, module)
        modules.append(
            ModuleAllocation(
                name=load.name,
                tensor_ranks=int(load.tensor_ranks[choice[module, 0]]),
                data_ranks=int(choice[module, 1]),
                pipeline_stages=int(choice[module, 2]),
                samples=_samples(choice, module),
                stage_s=stage_s,
                warmup_s=stage_s + (seconds - stage_s) / load.virtual_stages,
                gradients_s=_gradients_s(problem, choice, module),
                held_bytes=_held(problem, choice, module),
            )
        )
    microbatches = problem.batch // int(choice[1, 1])
    gradients = sum(module.gradients_s for module in modules)
    warm = sum(module.warmup_s for module in modules)
    steady = (microbatches - 1) * max(module.stage_s for module in modules)
    return Allocation(
        modules=tuple(modules),
        microbatches=microbatches,
        warmup_s=warm,
        gradients_s=gradients,
        steady_s=steady,
        # Summing in another order may land a hair above: never claim so.
        lower_bound_s=min(bound, warm + gradients + steady),
    )


def _why_not(problem: _Problem, loads: tuple[ModuleLoad | None, ...]) -> str:
    """What is missing, and two changes that would do: more GPUs, or larger ones."""
    names = ", ".join(load.name for load in loads if load)
    head = f"{problem.gpus:,} GPUs of {problem.memory:,.0f} bytes do not hold {names}"
    bytes_needed = _least_memory(problem)
    if bytes_needed is None:
        return (
            f"{head}, whatever their memory: give more GPUs, or allow fewer tensor_ranks or "
            "data_ranks"
        )
    missing = bytes_needed - problem.memory
    more = _least_gpus(problem, loads)
    gpus = f"{more:,} GPUs, or " if more else ""
    return (
        f"{head}: {missing:,.0f} bytes a GPU are missing in the allocation that needs the least, "
        f"{bytes_needed:,.0f}. Give {gpus}more memory, recompute activations, freeze a module, or "
        "allow more tensor_ranks"
    )


def _least_memory(problem: _Problem) -> float | None:
    """Least bytes of a GPU with which as many GPUs hold everything, to a millionth; None where no
    memory is enough."""

    def fits(memory: float) -> bool:
        return bool(np.isfinite(search_allocation(*problem._replace(memory=memory))[0]))

    if not fits(np.inf):
        return None
    low = high = problem.memory
    while not fits(high):
        low, high = high, high * 2
    for _ in range(_MEMORY_STEPS):
        if high - low <= high * 1e-6:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return float(np.ceil(high))


def _least_gpus(problem: _Problem, loads: tuple[ModuleLoad | None, ...]) -> int | None:
    """Fewest GPUs, of doublings, that hold everything; None up to 64 times as many."""
    for doubling in range(1, 7):
        gpus = problem.gpus << doubling
        wider = _problem(loads, gpus=gpus, batch=problem.batch, memory=problem.memory)
        if gpus <= MOST_GPUS and np.isfinite(search_allocation(*wider)[0]):
            return gpus
    return None
