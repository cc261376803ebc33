"""What a model is made of, as far as laying it over GPUs goes: nouns, with exact parameter counts.

    encoder ─ projector ┐
    encoder ─ projector ┴► decoder ─► generator

A description says shapes and nothing of a device. Its counts are those of the weights that
transformers makes for the same `config.json`, module by module.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from dataservice.core.errors import PlanningError
from dataservice.core.job import STRICT

Bias = Literal["qkv", "out", "ffn"]
Norm = Literal["rms", "layer"]
QkNorm = Literal["none", "head", "width"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of a layer's feed-forward network."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    count: int
    """Experts of a layer."""
    active: int
    """Experts that each token goes through."""
    ffn_size: int
    """Width of one expert's feed-forward network."""
    shared_ffn_size: int = 0
    """Width of the network that every token goes through as well; 0: there is none."""
    dense_layers: tuple[int, ...] = ()
    """Layers, numbered from 0, that have the plain feed-forward network instead."""

    def __post_init__(self) -> None:
        _require_positive(self, "experts", "count", "active", "ffn_size")
        if self.active > self.count:
            raise PlanningError(
                f"experts.active is {self.active} of {self.count} experts; a token goes through at "
                "most all of them: lower active"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Transformer layers of one shape."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    layers: int
    """Number of layers."""
    hidden_size: int
    """Width of the residual stream."""
    heads: int
    """Attention heads of the queries."""
    ffn_size: int
    """Width of the feed-forward network."""
    kv_heads: int | None = None
    """Attention heads of keys and values; as many as of the queries where it is left out."""
    head_dim: int | None = None
    """Width of a head; hidden_size / heads where it is left out."""
    gated: bool = False
    """Whether the feed-forward network has a gate: three matrices instead of two."""
    biases: tuple[Bias, ...] = ()
    """The projections that have biases."""
    norm: Norm = "rms"
    """Kind of the layers' two norms: `layer` has a bias, `rms` has none."""
    qk_norm: QkNorm = "none"
    """Norms of queries and keys: one of a head's width each, or of the full width."""
    layer_scale: bool = False
    """Whether each residual branch is scaled by a learned vector."""
    window_tokens: int | None = None
    """Most tokens that a token attends to in a layer of windowed attention; every layer attends to
    everything where it is left out."""
    full_attention_layers: tuple[int, ...] = ()
    """With windows: the layers, numbered from 0, that attend to everything nevertheless."""
    experts: Experts | None = None
    """A mixture of experts, where the model has one."""
    frozen: bool = False
    """Whether the weights stay as they are."""
    other_parameters: int = 0
    """Weights that belong to no layer and cost no time worth counting: last norms, class tokens,
    poolers."""

    def __post_init__(self) -> None:
        what = type(self).__name__.lower()
        _require_positive(self, what, "layers", "hidden_size", "heads", "ffn_size", "key_heads")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise PlanningError(
                f"{what}.hidden_size is {self.hidden_size}, which {self.heads} heads do not "
                "divide: give head_dim"
            )
        if self.heads % self.key_heads:
            raise PlanningError(
                f"{what}.kv_heads is {self.key_heads}; it must divide the {self.heads} heads"
            )
        inside = (*self.full_attention_layers, *(self.experts.dense_layers if self.experts else ()))
        if any(not 0 <= layer < self.layers for layer in inside):
            raise PlanningError(
                f"{what} names layer {max(inside, key=abs)} of {self.layers}: layers are numbered "
                f"from 0 to {self.layers - 1}"
            )

    @property
    def key_heads(self) -> int:
        """Heads of the keys, and of the values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.key_heads * self.head_size

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of one layer; None where it has the plain network."""
        if self.experts is None or layer in self.experts.dense_layers:
            return None
        return self.experts

    def attention_window(self, layer: int) -> int | None:
        """Tokens that a token of this layer attends to; None: all of them."""
        return None if layer in self.full_attention_layers else self.window_tokens

    def attention_matrices(self) -> int:
        """Weights of a layer's four attention projections, biases left out."""
        return self.hidden_size * (2 * self.query_width + 2 * self.key_width)

    def ffn_matrices(self, layer: int, *, active: bool) -> int:
        """Weights of a layer's feed-forward network without biases: all of them, or those that one
        token goes through."""
        matrices = 3 if self.gated else 2
        experts = self.experts_of(layer)
        if experts is None:
            return matrices * self.hidden_size * self.ffn_size
        used = experts.active if active else experts.count
        width = used * experts.ffn_size + experts.shared_ffn_size
        return self.hidden_size * (matrices * width + experts.count)  # the last: the router

    def layer_parameters(self, layer: int) -> int:
        """Weights of one layer."""
        return (
            self.attention_matrices()
            + self.ffn_matrices(layer, active=False)
            + self._vectors(dense=self.experts_of(layer) is None)
        )

    def _vectors(self, *, dense: bool) -> int:
        """Biases, norms and scales of a layer."""
        found = 2 * norm_parameters(self.norm, self.hidden_size)
        if "qkv" in self.biases:
            found += self.query_width + 2 * self.key_width
        if "out" in self.biases:
            found += self.hidden_size
        if "ffn" in self.biases and dense:
            found += self.ffn_size * (2 if self.gated else 1) + self.hidden_size
        if self.qk_norm == "head":
            found += 2 * self.head_size
        elif self.qk_norm == "width":
            found += self.query_width + self.key_width
        return found + (2 * self.hidden_size if self.layer_scale else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """What brings an encoder's tokens to the decoder's width: matrices one behind the other."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    widths: tuple[int, ...]
    """Widths from its input to its output: [4096, 3584] is one matrix, [5120, 5120, 3584] two."""
    bias: bool = True
    """Whether the matrices have biases."""
    copies: int = 1
    """How many of its shape there are: more than one where features of several depths of the
    encoder go to the decoder (DeepStack)."""
    other_parameters: int = 0
    """Weights of its norms, and others that cost no time worth counting."""
    frozen: bool = False
    """Whether its weights stay as they are."""

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise PlanningError(
                f"projector.widths is {list(self.widths)}; give at least the width of its input "
                "and that of its output, each at least 1"
            )
        _require_positive(self, "projector", "copies")

    @property
    def matrices(self) -> int:
        """Weights of its matrices, of all copies."""
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        return self.copies * sum(before * after for before, after in pairs)

    @property
    def parameters(self) -> int:
        """All its weights."""
        biases = self.copies * sum(self.widths[1:]) if self.bias else 0
        return self.matrices + biases + self.other_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder(Stack):
    """An encoder of images, clips or sound, with its projector."""

    name: str = "vision"
    """What it is called in the layout, and in the work that is given for it."""
    input_size: int = 0
    """Numbers of one patch or frame that its first matrix takes."""
    input_bias: bool = False
    """Whether that matrix has a bias."""
    positions: int = 0
    """Positions that it has learned a vector for."""
    tokens_per_row: float = 1.0
    """Its tokens that make one of the decoder's: 4 where 2 × 2 patches are merged."""
    projector: Projector | None = None
    """What stands between it and the decoder."""

    def __post_init__(self) -> None:
        Stack.__post_init__(self)
        if not (math.isfinite(self.tokens_per_row) and self.tokens_per_row > 0):
            raise PlanningError(
                f"encoder.tokens_per_row is {self.tokens_per_row}; it is how many of its tokens "
                "make one of the decoder's, above 0"
            )

    @property
    def input_parameters(self) -> int:
        """Weights of its first matrix and of its positions."""
        rows = self.input_size + (1 if self.input_bias else 0) + self.positions
        return rows * self.hidden_size

    @property
    def parameters(self) -> int:
        """All its weights without the projector's."""
        inner = sum(self.layer_parameters(layer) for layer in range(self.layers))
        return self.input_parameters + inner + self.other_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder(Stack):
    """The language model that everything is fed to."""

    vocabulary: int = 0
    """Rows of the table of token embeddings."""
    tied: bool = False
    """Whether the head has the embeddings' weights instead of its own."""
    positions: int = 0
    """Positions that it has learned a vector for."""

    @property
    def embedding_parameters(self) -> int:
        """Weights of the tables of tokens and positions."""
        return (self.vocabulary + self.positions) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Weights that the head has of its own."""
        return 0 if self.tied else self.vocabulary * self.hidden_size

    @property
    def parameters(self) -> int:
        """All its weights, the head's among them."""
        inner = sum(self.layer_parameters(layer) for layer in range(self.layers))
        return self.embedding_parameters + inner + self.other_parameters + self.head_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """What makes images or sound of the decoder's states. It need not be a transformer: only its
    totals are known, and each of its layers takes an equal part."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    parameters: int
    """All its weights."""
    flops_per_token: float
    """Operations of its forward pass, for each of the tokens that its work is counted in."""
    kept_bytes_per_token: float
    """Bytes that one such token keeps until its backward pass, nothing recomputed."""
    layers: int = 1
    """Parts that a pipeline may cut it into."""
    output_width: int = 1
    """Numbers of a token that go from one of its layers to the next."""
    name: str = "generator"
    """What it is called in the layout."""
    frozen: bool = False
    """Whether its weights stay as they are."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "generator", "parameters", "layers", "flops_per_token", "kept_bytes_per_token"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A multimodal model: any number of encoders, a decoder, perhaps a generator."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    name: str
    """What the model is called."""
    decoder: Decoder
    """The language model."""
    encoders: tuple[Encoder, ...] = ()
    """The encoders, in the order in which they run."""
    generator: Generator | None = None
    """What makes images or sound, where there is such a module."""
    source: str = ""
    """Where the shape comes from."""

    def __post_init__(self) -> None:
        names = [*self.module_names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PlanningError(
                f"two modules are called {twice[0]!r}; give each encoder, and the generator, a "
                "name of its own (`decoder` is the decoder's)"
            )
        for encoder in self.encoders:
            made = encoder.projector.widths[-1] if encoder.projector else encoder.hidden_size
            if made != self.decoder.hidden_size:
                raise PlanningError(
                    f"the encoder {encoder.name!r} hands on vectors of {made} numbers, the decoder "
                    f"takes {self.decoder.hidden_size}: mend the last of projector.widths"
                )

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the modules that have work of their own, in the order in which they run."""
        last = (self.generator.name,) if self.generator else ()
        return (*(encoder.name for encoder in self.encoders), "decoder", *last)

    @property
    def parameters(self) -> int:
        """All weights of the model."""
        return sum(self.parameters_by_module().values())

    def parameters_by_module(self) -> dict[str, int]:
        """Weights of each module; a projector's stand under `ENCODER.projector`."""
        found: dict[str, int] = {}
        for encoder in self.encoders:
            found[encoder.name] = encoder.parameters
            if encoder.projector:
                found[f"{encoder.name}.projector"] = encoder.projector.parameters
        found["decoder"] = self.decoder.parameters
        if self.generator:
            found[self.generator.name] = self.generator.parameters
        return found


def norm_parameters(norm: Norm, width: int) -> int:
    """Weights of one norm."""
    return 2 * width if norm == "layer" else width


def _require_positive(owner: Any, what: str, *names: str) -> None:
    """Raises PlanningError where one of these is below 1, or another number is negative."""
    others = (field.name for field in fields(owner) if field.name not in names)
    for name in (*names, *others):
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = 1 if name in names else 0
        if not (math.isfinite(value) and value >= least):
            raise PlanningError(f"{what}.{name} is {value}; it must be at least {least}: mend it")
