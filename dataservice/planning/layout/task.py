"""What `dataservice layout` is asked: a model, the GPUs, and steps that it is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dataservice.core.errors import PlanningError
from dataservice.planning.compose import StepSamples
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.costs import LayerShares, Precision, analytic_profile
from dataservice.planning.layout.measured_profile import measured_profile, require_measured
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.profile import LayerProfile
from dataservice.planning.layout.replica import PLACES, Place

_LINKLESS = 1e30  # bytes a second: what is exchanged takes no time


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTask:
    """What is asked: `model` on the GPUs of `group`, trained on steps such as `batches`; its layers
    as they were `measured`, or else computed. `places`: where encoders may run. With
    `overlap_gradients` the trainer sums a layer's gradients while those before it still run
    backward, and gathers its weights while those before it already run forward."""

    model: ModelDescription
    group: NodeGroup
    batches: tuple[StepSamples, ...]
    precision: Precision = field(default_factory=Precision)
    measured: LayerProfile | None = None
    places: tuple[Place, ...] = PLACES
    overlap_gradients: bool = False

    def __post_init__(self) -> None:
        if self.measured is not None:
            require_measured(self.measured, self.model)
        require_steps(self.batches)
        require_lengths(self.model)
        if self.model.generator:
            raise PlanningError(
                f"{self.model.name} has a generator, which runs on GPUs of its own: ask "
                "allocate_modules, as `dataservice layout --generator-tokens` does"
            )
        if strange := [place for place in self.places if place not in PLACES]:
            raise PlanningError(
                f"places has {strange[0]!r}; encoders run in one of {', '.join(PLACES)}"
            )
        if not self.places:
            raise PlanningError(f"places is empty; give at least one of {', '.join(PLACES)}")

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """Those that tensor parallelism may have."""
        return tensor_ranks_of(self.group)

    @property
    def longest_tokens(self) -> int:
        """LLM tokens of the longest sample of all batches."""
        return max(int(batch.lengths.llm_tokens.max()) for batch in self.batches)

    @property
    def ring_token_bytes(self) -> float:
        """Keys and values of a token, in all layers."""
        decoder = self.model.decoder
        return 2.0 * decoder.key_width * decoder.layers * self.precision.kept_bytes

    @property
    def row_bytes(self) -> float:
        """A feature row, as an encoder hands it to the decoder."""
        return self.model.decoder.hidden_size * self.precision.kept_bytes

    def profile(self, ranks: int, *, linkless: bool = False) -> LayerProfile:
        """Every layer over so many tensor-parallel ranks; `linkless`: without the seconds of what
        they exchange."""
        group = self.group
        if linkless:
            group = replace(group, inside_bytes_per_s=_LINKLESS, between_bytes_per_s=_LINKLESS)
        if self.measured is not None:
            return measured_profile(
                self.measured, self.model, group, tensor_ranks=ranks, precision=self.precision
            )
        shares = LayerShares(tensor_ranks=ranks)
        return analytic_profile(self.model, group, shares=shares, precision=self.precision)


def require_steps(batches: Sequence[StepSamples]) -> None:
    """Raises PlanningError where there is no step, and where one has no samples."""
    if not batches or not all(len(batch.lengths) for batch in batches):
        raise PlanningError("a layout is made for steps; give one batch of samples at least")


def require_lengths(model: ModelDescription) -> None:
    """Raises PlanningError where an encoder has a name that the index has no lengths for."""
    names = [encoder.name for encoder in model.encoders]
    if strange := [name for name in names if name not in ("vision", "audio")]:
        raise PlanningError(
            f"an encoder is called {strange[0]!r}; the index has lengths for vision and audio: "
            "give it one of these names"
        )


def tensor_ranks_of(group: NodeGroup) -> tuple[int, ...]:
    """Powers of two inside a node that divide the GPUs."""
    inside, gpus = group.gpus_per_node, group.gpus
    powers = (1 << k for k in range(inside.bit_length()))
    return tuple(ranks for ranks in powers if inside % ranks == 0 and gpus % ranks == 0)
