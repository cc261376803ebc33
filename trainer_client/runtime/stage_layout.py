"""Where a model's layers are cut into pipeline chunks, and which of them recompute.

The answer of a layout planner as plain data, for whoever builds a rank's chunks. Layers are counted
over the whole model, encoders' before the decoder's, as the planner counts them:

    layer    0   1   2  │ 3   4   5 │ 6   7     bounds 0, 4, 6, 8: three chunks
             v   v   a    l ┆ l   l ┆ l   l     v, a: encoders, l: llm

The first chunk encodes, exchanges features and embeds, so all encoder layers lie in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer_client.runtime.faults import LayoutError

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
DECODER = "llm"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLayout:
    """``modules``: of each layer, the name of its module: an encoder's modality, or "llm".

    ``bounds``: chunk c holds layers bounds[c]..bounds[c+1]; stage s of p runs chunks s, s+p, ....
    ``recompute``: of each layer, whether its backward runs its forward again: "none", "selective"
    (what keeps most bytes for least time, as the model sees fit), "full"; empty: none do.

    Raises LayoutError where layers and bounds do not agree, or a cut lies inside an encoder.
    """

    modules: tuple[str, ...]
    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...] = ()

    def __post_init__(self) -> None:
        layers = len(self.modules)
        rising = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or (self.bounds[0], self.bounds[-1]) != (0, layers) or not rising:
            raise LayoutError(
                f"bounds are {self.bounds} for {layers} layers; they rise from 0 to {layers}, with "
                "a layer in each chunk"
            )
        if len(self.recompute) not in (0, layers):
            raise LayoutError(
                f"recompute names {len(self.recompute)} layers of {layers}; name every layer, or "
                "none"
            )
        for how in self.recompute:
            if how not in RECOMPUTE:
                raise LayoutError(f"recompute has {how!r}; it is one of {', '.join(RECOMPUTE)}")
        encoding = [place for place, name in enumerate(self.modules) if name != DECODER]
        if encoding and encoding[-1] >= self.bounds[1]:
            raise LayoutError(
                f"layer {encoding[-1]} is {self.modules[encoding[-1]]}'s and lies behind the first "
                f"cut, {self.bounds[1]}; the first chunk encodes, so cut behind all encoder layers"
            )
        if encoding != list(range(len(encoding))):
            raise LayoutError(
                f"layer {encoding[-1]} is {self.modules[encoding[-1]]}'s and follows the decoder's "
                "first; name encoders' layers before the decoder's"
            )

    @property
    def decoder_bounds(self) -> tuple[int, ...]:
        """The same bounds, of decoder layers alone; the first chunk may have none."""
        encoding = sum(name != DECODER for name in self.modules)
        return (0, *(bound - encoding for bound in self.bounds[1:]))

    def recompute_of(self, module: str, layers: int) -> tuple[Recompute, ...]:
        """What each of a module's layers recomputes. Raises LayoutError unless the layout has as
        many layers of it as the model."""
        places = [place for place, name in enumerate(self.modules) if name == module]
        if len(places) != layers:
            raise LayoutError(
                f"the layout has {len(places)} layers of {module} and the model {layers}; lay out "
                "the model that is trained"
            )
        return tuple(self.recompute[place] if self.recompute else "none" for place in places)


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """``function(*arguments)``, of which only the arguments are kept: its backward runs it again.

    What it sends to other ranks it sends again, so all members of a CP group recompute alike. It
    draws no random numbers.
    """
    given: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return given
