"""A model of transformers as something that `run_step` trains.

    model = trainable(AutoModelForImageTextToText.from_pretrained(path))
    for shard in dataset:
        result = run_step(model, shard, groups)
        optimizer.step()

What is trained is what the model's own forward would train on the same samples, one at a time: the
same positions, the same masks, the same loss. Where that cannot be had, `trainable` or the first
step raises UnsupportedModel.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Conv1d, Embedding, Module, RNNBase
from transformers.image_processing_base import ImageProcessingMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from trainer_client.adapters.transformers.attention import RING, note_mask_windows
from trainer_client.adapters.transformers.families import FAMILIES, Normalization, TextFamily
from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.adapters.transformers.own_tokens import OwnTokens
from trainer_client.runtime import (
    Features,
    GroupPool,
    Kernel,
    LayoutError,
    PackedAttention,
    forward_microbatch,
)
from trainer_client.runtime.step import require_eager
from trainer_client.shard import Microbatch, ModalityBatch

LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their frequencies depend on the longest position in a batch, beyond a limit.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# What some families with encoders have beside the text, which is their whole config.
ENCODER_CONFIGS = ("vision_config", "codec_config")
# What decoders call the embeddings of positions that they have learned.
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")
CHANNELS = 3
_NORMALIZING = ("image_mean", "image_std", "do_normalize", "do_rescale", "rescale_factor")

# What loads a model with its language head, and the class that it gives of each family. Where a
# family is in several, the first is that of the whole model.
HEADED = {
    "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForMultimodalLM": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}


def trainable(model: Module, *, processor: Any = None, kernel: Kernel = "auto") -> "TrainableModel":
    """Make a model of transformers trainable by `run_step`.

    Parameters
    ----------
    model: a causal language model whose layers call transformers' attention interface, or a model
        of a family in ``families.FAMILIES``; with PEFT's adapters in it or without. It is changed
        in place: its decoder's attention becomes the ring, and it is set to training. Encoders
        keep their attention.
    processor: what has ``image_mean`` and ``image_std``, or an ``image_processor`` that has; its
        ``do_normalize``, ``do_rescale`` and ``rescale_factor`` are obeyed. By default that which
        lies where the model was loaded from. For vision encoders only.

    Raises
    ------
    UnsupportedModel: packs of samples would train another model.
    RuntimeFault: the model was compiled as a whole.
    """
    require_eager(model)
    plain = plain_model(model)
    family_of = family_class(plain)
    require_language_head(plain)
    obstacles = list(obstacles_of(plain))
    if obstacles:
        raise UnsupportedModel(
            f"{type(plain).__name__} {', and it '.join(obstacles)}. Trained from packs, it would "
            "become another model than transformers trains."
        )
    pixels = normalization(plain, processor) if "vision" in family_of.encoders else None
    plain.get_decoder().set_attn_implementation(RING)
    note_mask_windows(plain.get_decoder())
    return TrainableModel(model, family_of(plain, pixels, kernel)).train()


class TrainableModel(Module):
    """A ``MultimodalModel`` whose weights are those of ``model``, a model of transformers.

    Plain, in DDP, in FSDP2 (shard layers of ``model`` first, then this), or as accelerate prepares
    it. Save with ``model.save_pretrained``.
    """

    def __init__(self, model: Module, family: TextFamily) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._tokens = OwnTokens(family.model)

    @property
    def family(self) -> TextFamily:
        """How the model takes items and features."""
        return self._family

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Have the library's model compute its layers again in the backward pass, as transformers'
        Trainer asks for; ``options`` are those of the library's own method."""
        self._family.model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=activation_checkpointing_kwargs, **options
        )

    def activation_checkpointing_disable(self) -> None:
        """Have the library's model keep what its layers need in the backward pass."""
        self._family.model.activation_checkpointing_disable()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """`activation_checkpointing_enable` by its older name, which some versions know alone."""
        self._family.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=gradient_checkpointing_kwargs, **options
        )

    def gradient_checkpointing_disable(self) -> None:
        """`activation_checkpointing_disable` by its older name."""
        self._family.model.gradient_checkpointing_disable()

    def forward(self, microbatch: Microbatch, groups: GroupPool) -> Tensor:
        """What ``decode`` gives; DDP and FSDP2 hook into this."""
        return forward_microbatch(self, microbatch, groups)

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """Feature rows [rows, row width] of ``batch.items`` joined end to end."""
        return self._family.encode(modality, batch)

    def dummy_item(self, modality: str) -> Tensor:
        """The smallest item that this encoder takes."""
        device = next(self.parameters()).device
        return self._family.dummy_item(modality, device)

    def require_own_tokens(self, microbatch: Microbatch) -> None:
        """Raise LayoutError where a microbatch that lies on the host has ids beyond the vocabulary,
        or, as the first with items of a kind, has them at other tokens than the model's."""
        self._tokens.look_at(microbatch)

    def encoder_trains(self, modality: str) -> bool:
        """Whether any weight that makes this modality's features takes gradients."""
        return any(weight.requires_grad for weight in self._family.weights(modality))

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """The sum of the loss over local rows, a scalar, of the library's own decoder and head;
        their logits [local rows, vocabulary] where the head is no plain linear layer."""
        decoder = self._family.decoder
        if decoder.config._attn_implementation != RING:  # someone has evaluated in between
            decoder.set_attn_implementation(RING)
        refuse_long_rope(decoder.config, microbatch)
        refuse_unlearned_positions(decoder, microbatch)
        return self._family.decode(microbatch, features, attention)


def plain_model(model: Any) -> Any:
    """The model of transformers inside PEFT's wrapper."""
    settings = getattr(model, "active_peft_config", None)
    if getattr(settings, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"{type(settings).__name__} puts tokens before every sample, which the plan does not "
            "count. Adapters that change weights, such as LoRA, are supported."
        )
    wraps = hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel)
    tuner = model.base_model if wraps else None  # mixed models have no get_base_model()
    if (method := _method_of_forward(model, tuner)) is not None:
        raise UnsupportedModel(
            f"{method} does a part of its work in PEFT's own forward, which run_step does not "
            "call, so that it would be left out. Adapters that work in the model's layers alone, "
            "such as LoRA without invocation tokens, IA3, LoHa, VeRA and OFT, are supported."
        )
    plain = getattr(tuner, "model", model)
    if not isinstance(plain, PreTrainedModel):
        raise UnsupportedModel(
            f"{type(plain).__name__} is no model of transformers. Give trainable the library's own "
            "model, with PEFT's adapters in it or without, and wrap what trainable returns, as in "
            "DistributedDataParallel(trainable(model))."
        )
    return plain


def _method_of_forward(model: Any, tuner: Any) -> str | None:
    """What of PEFT's adapters in a model, or of their tuner, needs PEFT's forward, if anything."""
    for settings in getattr(model, "peft_config", {}).values():
        if getattr(settings, "alora_invocation_tokens", None):
            return "aLoRA (alora_invocation_tokens)"
    owner = next((kind for kind in type(tuner).__mro__ if "forward" in vars(kind)), None)
    # By its name, since PEFT need not be there.
    if owner is None or owner is Module or owner.__name__ == "BaseTuner":
        return None
    return owner.__name__.removesuffix("Model")


def family_class(plain: Any) -> type[TextFamily]:
    """The class of a model's family; a text decoder needs none of its own."""
    kind, text = plain.config.model_type, plain.config.get_text_config()
    encodes = any(getattr(plain.config, name, None) for name in ENCODER_CONFIGS)
    if text is plain.config and not encodes:
        return TextFamily
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"{type(plain).__name__} is of the family {kind!r}, and how that takes its features is "
            f"not known here; known are {', '.join(sorted(FAMILIES))}, and text decoders. Write "
            "the four methods of MultimodalModel around it (trainer_client/runtime/README.md)."
        )
    return FAMILIES[kind]


def require_language_head(plain: Any) -> None:
    """Raise UnsupportedModel where a model gives something else than logits of tokens."""
    if plain.get_output_embeddings() is not None:
        return
    kind = plain.config.model_type
    known = [f"{classes[kind]}, as {auto}" for auto, classes in HEADED.items() if kind in classes]
    instead = known[0] if known else "the family's own class that has one, as AutoModelForCausalLM"
    raise UnsupportedModel(
        f"{type(plain).__name__} has no language head, so that it gives no logits of tokens to "
        f"train. Load {instead}.from_pretrained(...) gives it."
    )


def obstacles_of(plain: Any) -> Iterator[str]:
    """What the config and the modules show to be inexact in packs, with the remedy."""
    decoder = plain.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        yield (
            f"gives a {type(decoder).__name__} as its decoder (get_decoder()), where a model of "
            "transformers is expected, so that its layers cannot take the ring"
        )
        return
    config = decoder.config
    if getattr(plain.config, "is_encoder_decoder", False):
        yield "is an encoder-decoder, where a decoder alone is expected"
    if not getattr(decoder, "_supports_attention_backend", False):
        yield "does not call transformers' attention interface, so that it cannot take the ring"
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        yield f"has layers of {sorted(unknown)}; exact are those of {sorted(LAYER_TYPES)}"
    mixers = [name for name, part in decoder.named_modules() if isinstance(part, Conv1d | RNNBase)]
    if mixers:
        yield f"mixes neighbouring tokens outside of attention, in {mixers[0]}"
    tuned = [
        part
        for part in decoder.modules()
        if getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
    ]
    if tuned:
        yield (
            "scales queries by their place in the pack (attn_temperature_tuning); where no sample "
            f"of the job has {config.floor_scale} tokens (floor_scale), load it with "
            "attn_temperature_tuning=False in its text config, which is the same model then"
        )
    if getattr(config, "output_router_logits", False):
        yield (
            "adds a loss of its routers, a mean over a whole batch; set output_router_logits=False "
            "in its text config"
        )
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in decoder.modules()):
        yield "counts positions from the id of its padding token on, as RoBERTa does; packs from 0"
    layerdrop = [
        part.layerdrop
        for part in plain.modules()
        if getattr(part, "layerdrop", 0.0) not in (0, 0.0)
    ]
    if layerdrop:
        yield (
            f"skips layers at random (layerdrop {layerdrop[0]}), other ones on every replica; set "
            "it to 0"
        )


def refuse_long_rope(config: Any, microbatch: Microbatch) -> None:
    """Raise UnsupportedModel where rotary frequencies would depend on a pack's longest sample."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(r, dict) for r in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
            continue
        limit = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        longest = int(microbatch.cu_seqlens.diff().max())
        if longest > limit:
            raise UnsupportedModel(
                f"rotary positions of type {kind['rope_type']!r} change their frequencies beyond "
                f"{limit} tokens, for all samples of a pack, and one has {longest}; set "
                f"max_sample_tokens of the job's pipeline to {limit}"
            )


def refuse_unlearned_positions(decoder: Any, microbatch: Microbatch) -> None:
    """Raise LayoutError where a sample is longer than a decoder's table of positions."""
    owners = decoder, getattr(decoder, "embeddings", None)
    tables = [getattr(owner, name, None) for owner in owners for name in POSITION_TABLES]
    for table in tables:
        if not isinstance(table, Embedding):
            continue
        limit = table.num_embeddings - getattr(table, "offset", 0)
        longest = int(microbatch.cu_seqlens.diff().max())
        if longest > limit:
            raise LayoutError(
                f"a sample has {longest:,} tokens, padding included, and {type(decoder).__name__} "
                f"has learned {limit:,} positions; set max_sample_tokens of the job's pipeline to "
                f"{limit}"
            )


def normalization(plain: Any, processor: Any) -> Normalization:
    """Mean and deviation of pixels: the processor's, or what lies where the model came from."""
    if processor is None:
        settings = _saved_processor(plain.name_or_path)
    else:
        image = getattr(processor, "image_processor", processor)
        settings = {name: getattr(image, name, None) for name in _NORMALIZING}
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if settings.get("do_normalize") is False:
        mean, std = (0.0,) * CHANNELS, (1.0,) * CHANNELS
    if mean is None or std is None:
        raise UnsupportedModel(
            f"{type(plain).__name__} has a vision encoder, and the mean and deviation of its "
            f"pixels are not known: no image processor lies in {plain.name_or_path or 'memory'!r}. "
            "Give trainable(model, processor=AutoProcessor.from_pretrained(...))."
        )
    # Pixels come in [0, 1] here; the processor may take them in [0, 255], or by another factor.
    factor = settings.get("rescale_factor")
    factor = 1 / 255 if factor is None else factor
    scale = 255 * (1.0 if settings.get("do_rescale") is False else factor)
    return Normalization(
        mean=tuple(each / scale for each in mean), std=tuple(each / scale for each in std)
    )


def _saved_processor(name_or_path: str) -> dict[str, Any]:
    """Settings of the image processor in a folder, or of a repository that was downloaded."""
    if not name_or_path:
        return {}
    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(
            name_or_path, local_files_only=True
        )
    except OSError:
        return {}
    return dict(settings)
