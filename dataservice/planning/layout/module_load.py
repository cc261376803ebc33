"""What one module asks of the GPUs that it is given: the input of `allocate_modules`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.costs import LayerShares, Precision, analytic_profile
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.profile import LayerProfile, LayerWork, Recompute

TENSOR_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleLoad:
    """One module. Arrays are [k], one value for each tensor-parallel size that it may have.

    `tensor_ranks` int64[k]; `sample_s` float64[k]: forward and backward seconds of the whole module
    for one sample, what tensor, sequence and expert parallelism exchange included. `state_bytes`,
    `kept_bytes` float64[k]: on one GPU if one pipeline stage held it all, weights and gradients,
    and what one sample keeps until its backward pass. `optimizer_bytes`: of all GPUs together, as
    ZeRO-1 divides them. `gradients_s` float64[k]: to send all gradients of one GPU once, if one
    pipeline stage held it all; a ring of d data-parallel ranks takes 2·(d − 1)/d of that. `layers`:
    parts that stages are made of. `virtual_stages`: model chunks a stage. `expert_ranks`:
    data-parallel ranks come in multiples of it. `data_ranks`: those it may have; None: any that
    divide the batch. A frozen module has fewer seconds, and no gradients, optimizer states or kept
    bytes; nothing else is told of it. Raises PlanningError with what is wrong."""

    name: str
    layers: int
    tensor_ranks: NDArray[np.int64]
    sample_s: NDArray[np.float64]
    state_bytes: NDArray[np.float64]
    kept_bytes: NDArray[np.float64]
    gradients_s: NDArray[np.float64]
    optimizer_bytes: float = 0.0
    virtual_stages: int = 1
    expert_ranks: int = 1
    data_ranks: tuple[int, ...] | None = None

    @staticmethod
    def of(
        name: str,
        *,
        layers: int,
        tensor_ranks: ArrayLike,
        sample_s: ArrayLike,
        state_bytes: ArrayLike = 0.0,
        kept_bytes: ArrayLike = 0.0,
        gradients_s: ArrayLike = 0.0,
        optimizer_bytes: float = 0.0,
        virtual_stages: int = 1,
        expert_ranks: int = 1,
        data_ranks: Sequence[int] | None = None,
    ) -> "ModuleLoad":
        """From any arrays; one number stands for all tensor-parallel sizes. Raises PlanningError
        with what is wrong."""
        sizes = np.atleast_1d(np.asarray(tensor_ranks, np.int64))

        def each_size(values: ArrayLike) -> NDArray[np.float64]:
            found = np.asarray(values, np.float64)
            return np.broadcast_to(found, sizes.shape).copy() if found.ndim == 0 else found

        return ModuleLoad(
            name=name,
            layers=layers,
            tensor_ranks=sizes,
            sample_s=each_size(sample_s),
            state_bytes=each_size(state_bytes),
            kept_bytes=each_size(kept_bytes),
            gradients_s=each_size(gradients_s),
            optimizer_bytes=float(optimizer_bytes),
            virtual_stages=virtual_stages,
            expert_ranks=expert_ranks,
            data_ranks=None if data_ranks is None else tuple(sorted(set(data_ranks))),
        )

    def __post_init__(self) -> None:
        sizes = self.tensor_ranks
        flat = sizes.ndim == 1 and sizes.size > 0
        if not (flat and sizes.min() >= 1 and np.unique(sizes).size == sizes.size):
            raise PlanningError(
                f"{self.name}: tensor_ranks is {sizes.tolist()}; give sizes of at least 1, each "
                "once"
            )
        counts = {
            name: getattr(self, name) for name in ("layers", "virtual_stages", "expert_ranks")
        }
        for what, value in (*counts.items(), *(("data_ranks", n) for n in self.data_ranks or ())):
            if value < 1:
                raise PlanningError(f"{self.name}: {what} is {value}; it must be at least 1")
        if self.virtual_stages > self.layers:
            raise PlanningError(
                f"{self.name}: virtual_stages is {self.virtual_stages} and it has {self.layers} "
                "layers; a model chunk has at least one: lower virtual_stages"
            )
        for what in ("sample_s", "state_bytes", "kept_bytes", "gradients_s", "optimizer_bytes"):
            self._check_amounts(what)

    def _check_amounts(self, what: str) -> None:
        found, sizes = np.asarray(getattr(self, what)), self.tensor_ranks
        if found.shape not in ((), sizes.shape):
            raise PlanningError(
                f"{self.name}: {what} has shape {found.shape} for {sizes.size} tensor-parallel "
                "sizes; give one number, or one for each"
            )
        if not (np.isfinite(found) & (found >= 0)).all():
            raise PlanningError(
                f"{self.name}: {what} is {found.tolist()}; it must be finite and at least 0"
            )


def module_loads(
    model: ModelDescription,
    group: NodeGroup,
    work: LayerWork,
    *,
    tensor_ranks: Sequence[int] = TENSOR_RANKS,
    recompute: Recompute = "none",
    expert_ranks: int = 1,
    sequence_parallel: bool = True,
    virtual_stages: int = 1,
    precision: Precision | None = None,
) -> dict[str, ModuleLoad]:
    """Each module of `model` as a load, from analytic costs. `work` has one sample in each
    microbatch: a sample takes the mean of their seconds, and keeps what the largest keeps.
    Gradients are summed over the links between nodes, where there are several. Virtual stages are
    the decoder's. Raises PlanningError."""
    profiles = []
    for ranks in tensor_ranks:
        shares = LayerShares(tensor_ranks=ranks, sequence_parallel=sequence_parallel)
        of_decoder = LayerShares(
            tensor_ranks=ranks, expert_ranks=expert_ranks, sequence_parallel=sequence_parallel
        )
        by_module = dict.fromkeys(model.module_names, shares) | {"decoder": of_decoder}
        profiles.append(analytic_profile(model, group, shares=by_module, precision=precision))
    has_experts = model.decoder.experts is not None
    return {
        name: load_of_modules(
            (name,), dict(zip(tensor_ranks, profiles, strict=True)), work, recompute,
            link_bytes_per_s=group.link_bytes_per_s(group.gpus),
            virtual_stages=virtual_stages if name == "decoder" else 1,
            expert_ranks=expert_ranks if name == "decoder" and has_experts else 1,
        )
        for name in model.module_names
    }  # fmt: skip


def load_of_modules(
    modules: Sequence[str],
    profiles: Mapping[int, LayerProfile],
    work: LayerWork,
    recompute: Recompute,
    *,
    link_bytes_per_s: float,
    virtual_stages: int = 1,
    expert_ranks: int = 1,
) -> ModuleLoad:
    """One load of `modules` that share their GPUs and run one after the other, from a profile for
    each number of tensor-parallel ranks; otherwise as `module_loads`. Raises PlanningError."""
    seconds, states, kept, gradients, optimizer = [], [], [], [], 0.0
    first = next(iter(profiles.values()))
    mine = np.array([module in modules for module in first.modules])
    numbered = [each for each in np.array(first.names)[mine] if each[-1].isdigit()]
    for ranks, profile in profiles.items():
        forward, backward = profile.seconds(work)
        taken = forward + backward + profile.added_s(work, recompute)
        seconds.append(math.fsum(taken[:, mine].sum(axis=1)) / len(taken))
        states.append(float(profile.state_bytes[mine].sum()))
        kept.append(float(profile.kept_bytes(work, recompute)[:, mine].sum(axis=1).max()))
        gradients.append(float(profile.gradient_bytes[mine].sum()) / link_bytes_per_s)
        # Each data-parallel rank has an equal part of them, each expert's among its own ranks.
        optimizer = max(optimizer, float(profile.optimizer_bytes[mine].sum()) * ranks)
    return ModuleLoad.of(
        "+".join(modules),
        layers=len(numbered),
        tensor_ranks=np.array(list(profiles)),
        sample_s=seconds,
        state_bytes=states,
        kept_bytes=kept,
        gradients_s=gradients,
        optimizer_bytes=optimizer,
        virtual_stages=virtual_stages,
        expert_ranks=expert_ranks,
    )
