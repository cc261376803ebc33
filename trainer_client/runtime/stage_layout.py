"""Where a model's layers are cut into pipeline chunks, and which of them recompute.

The answer of a layout planner as plain data, for whoever builds a rank's chunks. Layers are counted
over the whole model, encoders' before the decoder's, as the planner counts them:

    layer    0   1   2  │ 3   4   5 │ 6   7     bounds 0, 4, 6, 8: three chunks
             v   v   a    l ┆ l   l ┆ l   l     v, a: encoders, l: llm

Where encoders run (`encoder_stage`), as the planner calls it:

    first    the first chunk encodes, exchanges features, embeds, and has its part of the decoder
    own      the same chunk without a decoder layer: bounds 0, 3, ...
    cut      encoders' layers lie in the first chunks like the decoder's: bounds 0, 2, 5, ...; the
             first chunk with a layer of the decoder exchanges features and embeds
    spread   no chunk encodes; each stage encodes whole microbatches before the pipeline fills, and
             returns through them after it drains, or in its bubbles, by the list of actions that
             lies beside the file. Bounds and modules are the decoder's alone
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer_client.runtime.encoder_cut import EncoderCut
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.layout_file import checked_layout, read_layout_file
from trainer_client.runtime.layout_seconds import LayoutSeconds

EncoderStage = Literal["first", "own", "cut", "spread"]
ENCODER_STAGES: tuple[EncoderStage, ...] = get_args(EncoderStage)
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
DECODER = "llm"
_DECODER_IN_FILES = "decoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLayout:
    """``modules``: of each layer, the name of its module: an encoder's modality, or "llm".

    ``bounds``: chunk c holds layers bounds[c]..bounds[c+1]; stage s of p runs chunks s, s+p, ....
    ``recompute``: of each layer, whether its backward runs its forward again: "none", "selective"
    (what keeps most bytes for least time, as the model sees fit), "full"; empty: none do.
    ``spread_recompute``: the same of every layer of encoders that are spread.
    ``seconds``: what the planner predicts, where it is known.

    Raises LayoutError where layers and bounds do not agree, or a cut lies inside an encoder and
    ``encoder_stage`` is another than "cut".
    """

    modules: tuple[str, ...]
    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...] = ()
    virtual_stages: int = 1
    tensor_ranks: int = 1
    encoder_stage: EncoderStage = "first"
    spread_recompute: Recompute = "full"
    seconds: LayoutSeconds | None = None

    def __post_init__(self) -> None:
        layers = len(self.modules)
        rising = all(a < b for a, b in zip(self.bounds, self.bounds[1:-1], strict=False))
        ends = (self.bounds[:1], self.bounds[-1:]) == ((0,), (layers,))
        # The last chunk has the output head, and so may have no layer.
        if not (len(self.bounds) > 1 and ends and rising and self.bounds[-2] <= layers):
            raise LayoutError(
                f"bounds are {self.bounds} for {layers} layers; they rise from 0 to {layers}, with "
                "a layer in each chunk but the last"
            )
        if self.virtual_stages < 1 or self.chunks % self.virtual_stages or self.tensor_ranks < 1:
            raise LayoutError(
                f"{self.chunks} chunks cannot be {self.virtual_stages} virtual stages of each "
                f"stage, with {self.tensor_ranks} tensor ranks; give a number that divides them"
            )
        if len(self.recompute) not in (0, layers):
            raise LayoutError(
                f"recompute names {len(self.recompute)} layers of {layers}; name every layer, or "
                "none"
            )
        for how in (*self.recompute, self.spread_recompute):
            if how not in RECOMPUTE:
                raise LayoutError(f"recompute has {how!r}; it is one of {', '.join(RECOMPUTE)}")
        self._check_encoders()

    def _check_encoders(self) -> None:
        encoding = [place for place, name in enumerate(self.modules) if name != DECODER]
        if self.encoder_stage not in ENCODER_STAGES:
            raise LayoutError(
                f"encoder_stage is {self.encoder_stage!r}; it is one of {', '.join(ENCODER_STAGES)}"
            )
        if self.encoder_stage == "spread" and encoding:
            raise LayoutError(
                f"layer {encoding[0]} is {self.modules[encoding[0]]}'s, and encoders that are "
                "spread belong to no chunk; name the decoder's layers alone"
            )
        if self.encoder_stage != "cut" and encoding and encoding[-1] >= self.bounds[1]:
            raise LayoutError(
                f"layer {encoding[-1]} is {self.modules[encoding[-1]]}'s and lies behind the first "
                f"cut, {self.bounds[1]}; the first chunk encodes, so cut behind all encoder "
                "layers, or say encoder_stage 'cut'"
            )
        if encoding != list(range(len(encoding))):
            raise LayoutError(
                f"layer {encoding[-1]} is {self.modules[encoding[-1]]}'s and follows the decoder's "
                "first; name encoders' layers before the decoder's"
            )

    @classmethod
    def load(cls, path: str | Path) -> "StageLayout":
        """What `dataservice layout` wrote: its YAML where PyYAML is installed, or the JSON that
        `--json` prints. Raises LayoutError."""
        return cls.of(read_layout_file(path))

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "StageLayout":
        """The layout of a layout file's mapping. Raises LayoutError.

        Layers are the numbered entries; what else the file places (an embedding, a projector, the
        output head) goes with the first chunk, its encoder and the last chunk.
        """
        chunks = checked_layout(plain, "the layout")["stages"]
        topology, plan = plain["job"]["topology"], plain["job"]["plan"]
        numbered = [[n for n in each["layers"] if _is_layer(n)] for each in chunks]
        names = [name for of_chunk in numbered for name in of_chunk]
        again: dict[str, Recompute] = {}
        for how in RECOMPUTE[1:]:
            again |= {name: how for each in chunks for name in each.get(how, [])}
        modules = tuple(_module_of(name) for name in names)
        ends = [sum(map(len, numbered[: place + 1])) for place in range(len(numbered))]
        layout = cls(
            modules=modules,
            bounds=(0, *ends),
            recompute=tuple(again.get(name, "none") for name in names),
            virtual_stages=topology.get("virtual_stages", 1),
            tensor_ranks=topology.get("tensor_parallel", 1),
            encoder_stage=topology.get("encoder_stage", "first"),
            spread_recompute=plain.get("bubbles", {}).get("recompute", "full"),
            seconds=LayoutSeconds.of(topology, plan.get("cost", {})),
        )
        found = [each["stage"] for each in chunks]
        if found != [chunk % layout.stages for chunk in range(layout.chunks)]:
            raise LayoutError(
                f"the chunks stand on stages {found}; chunk c runs on stage c mod {layout.stages}, "
                "pipeline stages as virtual_stages divides the chunks"
            )
        return layout

    @property
    def chunks(self) -> int:
        """Model chunks of the whole pipeline."""
        return len(self.bounds) - 1

    @property
    def stages(self) -> int:
        """Pipeline stages: ranks of a replica, divided by ``tensor_ranks``."""
        return self.chunks // self.virtual_stages

    @property
    def decoder_bounds(self) -> tuple[int, ...]:
        """The same bounds, of decoder layers alone; the first chunk may have none, and of encoders
        that are cut several."""
        encoding = sum(name != DECODER for name in self.modules)
        return (0, *(max(0, bound - encoding) for bound in self.bounds[1:]))

    @property
    def encoder_cut(self) -> EncoderCut | None:
        """Which chunk has which encoder layers, where encoders are cut; else None."""
        if self.encoder_stage != "cut":
            return None
        parts: dict[str, dict[int, tuple[int, int]]] = {}
        for modality in dict.fromkeys(name for name in self.modules if name != DECODER):
            first = self.modules.index(modality)
            count = self.modules.count(modality)
            inside = [min(max(bound - first, 0), count) for bound in self.bounds]
            parts[modality] = {
                chunk: (begin, end)
                for chunk, (begin, end) in enumerate(itertools.pairwise(inside))
                if begin < end
            }
        decoding = (chunk for chunk, bound in enumerate(self.decoder_bounds[1:]) if bound > 0)
        return EncoderCut(parts=parts, decoder_chunk=next(decoding, self.chunks - 1))

    def recompute_of(self, module: str, layers: int) -> tuple[Recompute, ...]:
        """What each of a module's layers recomputes. Raises LayoutError unless the layout has as
        many layers of it as the model, or it is a spread encoder, whose layers it does not count.
        """
        if self.encoder_stage == "spread" and module != DECODER:
            return (self.spread_recompute,) * layers
        places = [place for place, name in enumerate(self.modules) if name == module]
        if len(places) != layers:
            raise LayoutError(
                f"the layout has {len(places)} layers of {module} and the model {layers}; lay out "
                "the model that is trained"
            )
        return tuple(self.recompute[place] if self.recompute else "none" for place in places)


def _is_layer(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _module_of(name: str) -> str:
    module = name.partition(".")[0]
    return DECODER if module == _DECODER_IN_FILES else module


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """``function(*arguments)``, of which only the arguments are kept: its backward runs it again.

    What it sends to other ranks it sends again, so all members of a CP group recompute alike. It
    draws no random numbers.
    """
    given: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return given
