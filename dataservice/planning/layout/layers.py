"""What each layer of a model costs, before any device: operations and bytes, for a token.

    model ──► vision.input  vision.0 … vision.n  vision.projector  decoder.embedding  decoder.0 …
              └── one LayerShape each, in the order in which they run ──────────────────────────

A layer's work grows with the tokens of a microbatch, and with the sum of the squared lengths of
what attends to itself (samples in the decoder; images, frames or tiles in an encoder):

    operations = linear · Σ tokens  +  square · Σ tokens²

A matrix takes 2 operations a weight and a token forward; backward as many for the gradient of its
input, where something before it trains, and as many for its own, where it trains itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dataservice.planning.layout.model import (
    Decoder,
    Encoder,
    Generator,
    ModelDescription,
    Projector,
    Stack,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptNumbers:
    """What one token of a layer keeps until its backward pass, as counts of numbers (of two bytes
    in half precision). `replicated` ones are held by every tensor-parallel rank unless sequence
    parallelism divides them, `divided` ones are divided anyhow. `small_bytes` are bytes that do not
    depend on the precision (log-sum-exp of flash attention, logits in float32); they are divided.

    `norms` of the replicated, and `products` of the divided, are made again cheaply from what is
    kept anyhow: outputs of norms and of activation functions. `scores` are kept for a pair of
    tokens where attention stores its probabilities, and nothing where it makes them again (flash
    attention)."""

    replicated: float = 0.0
    divided: float = 0.0
    small_bytes: float = 0.0
    norms: float = 0.0
    products: float = 0.0
    scores: float = 0.0

    @property
    def anything(self) -> bool:
        """Whether anything is kept at all."""
        return self.replicated + self.divided + self.small_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One entry of a pipeline: a layer, or what stands before or behind a module's layers. All
    counts are for one token of `module`."""

    name: str
    module: str
    parameters: int
    """Weights that are counted here."""
    trained: bool
    """Whether these weights have gradients and optimizer states."""
    gradient_flows: bool
    """Whether the gradient of its input is needed."""
    matrix_flops: float = 0.0
    """Forward operations of matrices, 2 a weight that the token goes through."""
    window_flops: float = 0.0
    """Forward operations of attention that is bounded by a window."""
    square_flops: float = 0.0
    """Forward operations of attention for a squared token."""
    input_width: float = 0.0
    """Numbers that come in: what full recomputation keeps."""
    output_width: float = 0.0
    """Numbers that go to the next entry."""
    norms: float = 0.0
    """Numbers that its norms make."""
    products: float = 0.0
    """Numbers that its activation functions make."""
    kept: KeptNumbers = KeptNumbers()
    """What stays until the backward pass; nothing where there is none."""
    heads: int = 1
    """Attention heads, which tensor-parallel ranks take whole."""
    experts: int = 0
    """Experts of a mixture; 0: none."""
    expert_parameters: int = 0
    """Those of its weights that expert parallelism divides."""
    dispatched_width: float = 0.0
    """Numbers that a mixture of experts sends, and receives again: active experts × width."""
    exchanged_width: float = 0.0
    """Numbers that tensor parallelism sums, twice forward and twice backward."""
    copied_parameters: int = 0
    """Weights that another entry counts, of which this one holds a copy on a stage of its own: a
    head that is tied to the embeddings."""

    @property
    def forward_flops(self) -> tuple[float, float]:
        """Operations of the forward pass: for a token, for a squared token."""
        return self.matrix_flops + self.window_flops, self.square_flops

    @property
    def backward_matrices(self) -> float:
        """How often a forward pass's matrices are worked through again backward: once for the
        gradient of the input, once for that of the weights; not at all where neither is needed."""
        trained = 1.0 if self.trained else 0.0
        return trained + (1.0 if self.gradient_flows else 0.0)

    @property
    def backward_attention(self) -> float:
        """The same for attention, which has no weights: twice, wherever anything is needed."""
        return 2.0 if self.trained or self.gradient_flows else 0.0

    @property
    def backward_flops(self) -> tuple[float, float]:
        """Operations of the backward pass: for a token, for a squared token. What a recomputation
        does again comes on top."""
        matrices, attention = self.backward_matrices, self.backward_attention
        return (
            matrices * self.matrix_flops + attention * self.window_flops,
            attention * self.square_flops,
        )

    @property
    def keeps(self) -> bool:
        """Whether anything has to stay for a backward pass."""
        return self.trained or self.gradient_flows


def layer_shapes(model: ModelDescription, *, dropout: bool = False) -> tuple[LayerShape, ...]:
    """Every entry of the pipeline, in the order in which they run: encoders one after the other,
    each with its projector, the decoder, the generator. `dropout`: masks of dropout are kept."""
    found: list[LayerShape] = []
    anything = False  # whether what has come so far trains
    for encoder in model.encoders:
        rows = list(_encoder(encoder, dropout=dropout))
        found += rows
        anything = anything or any(row.trained for row in rows)
    decoder = list(_decoder(model.decoder, reaches=anything, dropout=dropout))
    extra = _deepstack(model)
    found += [
        replace(row, output_width=row.output_width + extra.get(row.name, 0.0)) for row in decoder
    ]
    if model.generator:
        reaches = anything or any(row.trained for row in decoder)
        found += _generator(model.generator, reaches=reaches)
    return tuple(found)


def _encoder(encoder: Encoder, *, dropout: bool) -> Iterator[LayerShape]:
    name, trained = encoder.name, not encoder.frozen
    if encoder.input_parameters or encoder.other_parameters:
        yield LayerShape(
            name=f"{name}.input",
            module=name,
            parameters=encoder.input_parameters + encoder.other_parameters,
            trained=trained,
            gradient_flows=False,  # nobody asks for the gradient of pixels
            matrix_flops=2.0 * encoder.input_size * encoder.hidden_size,
            input_width=float(encoder.input_size),
            output_width=float(encoder.hidden_size),
            kept=KeptNumbers(replicated=float(encoder.input_size)) if trained else KeptNumbers(),
        )
    for layer in range(encoder.layers):
        # The first layer has an input that trains only where the entry before it does.
        flows = trained and (layer > 0 or encoder.input_parameters > 0)
        yield _transformer(encoder, name, layer, flows=flows, causal=False, dropout=dropout)
    if encoder.projector:
        yield _projector(encoder, encoder.projector, flows=trained)


def _projector(encoder: Encoder, projector: Projector, *, flows: bool) -> LayerShape:
    rows = 1.0 / encoder.tokens_per_row
    inner = sum(projector.widths[1:-1]) * projector.copies
    return LayerShape(
        name=f"{encoder.name}.projector",
        module=encoder.name,
        parameters=projector.parameters,
        trained=not projector.frozen,
        gradient_flows=flows,
        matrix_flops=2.0 * projector.matrices * rows,
        input_width=float(encoder.hidden_size) * projector.copies,
        output_width=projector.widths[-1] * projector.copies * rows,
        norms=projector.widths[0] * projector.copies * rows,
        products=inner * rows,
        kept=_if_kept(
            not projector.frozen or flows,
            KeptNumbers(
                replicated=2.0 * projector.widths[0] * projector.copies * rows,
                divided=2.0 * inner * rows,
                norms=projector.widths[0] * projector.copies * rows,
                products=inner * rows,
            ),
        ),
    )


def _decoder(decoder: Decoder, *, reaches: bool, dropout: bool) -> Iterator[LayerShape]:
    trained = not decoder.frozen
    if decoder.embedding_parameters:
        yield LayerShape(
            name="decoder.embedding",
            module="decoder",
            parameters=decoder.embedding_parameters,
            trained=trained,
            gradient_flows=False,
            output_width=float(decoder.hidden_size),
        )
    for layer in range(decoder.layers):
        flows = reaches or (trained and (layer > 0 or decoder.embedding_parameters > 0))
        yield _transformer(decoder, "decoder", layer, flows=flows, causal=True, dropout=dropout)
    if decoder.vocabulary or decoder.other_parameters:
        yield _head(decoder, flows=reaches or trained)


def _head(decoder: Decoder, *, flows: bool) -> LayerShape:
    """The last norm and the head: keeps both inputs and the logits in float32, as in Korthikanti
    et al. 2022, 4.1."""
    table = decoder.vocabulary * decoder.hidden_size
    return LayerShape(
        name="decoder.head",
        module="decoder",
        parameters=decoder.head_parameters + decoder.other_parameters,
        trained=not decoder.frozen,
        gradient_flows=flows,
        matrix_flops=2.0 * table,
        input_width=float(decoder.hidden_size),
        output_width=float(decoder.hidden_size),
        kept=_if_kept(
            flows,
            KeptNumbers(replicated=2.0 * decoder.hidden_size, small_bytes=4.0 * decoder.vocabulary),
        ),
        copied_parameters=table if decoder.tied else 0,
    )


def _generator(generator: Generator, *, reaches: bool) -> Iterator[LayerShape]:
    """Equal parts. What it keeps is told as bytes, so that only a frozen one with nothing trained
    before it keeps none."""
    trained, parts = not generator.frozen, generator.layers
    for part in range(parts):
        whole, rest = divmod(generator.parameters, parts)
        flows = reaches or (trained and part > 0)
        yield LayerShape(
            name=f"{generator.name}.{part}",
            module=generator.name,
            parameters=whole + (1 if part < rest else 0),
            trained=trained,
            gradient_flows=flows,
            matrix_flops=generator.flops_per_token / parts,
            input_width=float(generator.output_width),
            output_width=float(generator.output_width),
            kept=_if_kept(
                trained or flows, KeptNumbers(small_bytes=generator.kept_bytes_per_token / parts)
            ),
            exchanged_width=float(generator.output_width),
        )


def _transformer(
    stack: Stack, module: str, layer: int, *, flows: bool, causal: bool, dropout: bool
) -> LayerShape:
    trained = not stack.frozen
    matrices = stack.attention_matrices() + stack.ffn_matrices(layer, active=True)
    experts = stack.experts_of(layer)
    # Queries by keys, and probabilities by values: 2 operations each for a pair of tokens. Under a
    # causal mask half of the pairs are worked on, as kernels of flash attention do.
    pair = 4.0 * stack.query_width * (0.5 if causal else 1.0)
    window = stack.attention_window(layer)
    one_expert = (3 if stack.gated else 2) * stack.hidden_size * experts.ffn_size if experts else 0
    kept = _kept(stack, layer, dropout=dropout)
    return LayerShape(
        name=f"{module}.{layer}",
        module=module,
        parameters=stack.layer_parameters(layer),
        trained=trained,
        gradient_flows=flows,
        matrix_flops=2.0 * matrices,
        window_flops=pair * window if window else 0.0,
        square_flops=0.0 if window else pair,
        input_width=float(stack.hidden_size),
        output_width=float(stack.hidden_size),
        norms=kept.norms,
        products=kept.products,
        kept=_if_kept(trained or flows, kept),
        heads=stack.heads,
        experts=experts.count if experts else 0,
        expert_parameters=experts.count * one_expert if experts else 0,
        dispatched_width=float(experts.active * stack.hidden_size) if experts else 0.0,
        exchanged_width=float(stack.hidden_size),
    )


def _kept(stack: Stack, layer: int, *, dropout: bool) -> KeptNumbers:
    """Numbers that a token keeps: Korthikanti et al. 2022, 4.1 (34·h bytes and 5·a·s of scores),
    written out for grouped heads, gates, experts, and attention that stores no scores."""
    hidden = stack.hidden_size
    experts = stack.experts_of(layer)
    width = stack.ffn_size
    copies = 0.0
    if experts:
        width = experts.active * experts.ffn_size + experts.shared_ffn_size
        # A copy for each expert before it, one of its output behind it, and the router's scores.
        copies = 2.0 * experts.active * hidden + experts.count
    inside = 2.0 * width  # before the activation function, and behind it
    if stack.gated:
        inside += width
    masks = hidden if dropout else 0.0  # two masks of a byte each: as much as one number
    return KeptNumbers(
        replicated=4.0 * hidden + masks + copies,  # inputs of both norms, and their outputs
        divided=2.0 * stack.query_width + 2.0 * stack.key_width + inside,
        small_bytes=4.0 * stack.heads,
        norms=2.0 * hidden,
        products=float(width),
        scores=stack.heads * (2.5 if dropout else 1.0),
    )


def _if_kept(needed: bool, kept: KeptNumbers) -> KeptNumbers:
    return kept if needed else KeptNumbers()


def _deepstack(model: ModelDescription) -> dict[str, float]:
    """Numbers of a decoder's token that a cut behind one of its first layers carries besides its
    own: features of the encoder's other depths, which the first layers add one after the other. As
    if every token were a feature; so at most."""
    extra: dict[str, float] = {}
    for encoder in model.encoders:
        depths = encoder.projector.copies - 1 if encoder.projector else 0
        for layer in range(min(depths, model.decoder.layers)):
            name = f"decoder.{layer}"
            more = float((depths - 1 - layer) * model.decoder.hidden_size)
            extra[name] = max(extra.get(name, 0.0), more)
    return extra
