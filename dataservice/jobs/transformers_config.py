"""A model description from the `config.json` of a transformers model, without transformers.

config.json ─► text_config   ─► Decoder         what a file leaves out has the value that
               vision_config ─► Encoder         transformers gives it: DEFAULTS
                                + Projector
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataservice.core.errors import PlanningError, SpecError
from dataservice.core.quoting import quoted
from dataservice.jobs.yaml_file import read_text
from dataservice.planning.layout.model import (
    Bias,
    Decoder,
    Encoder,
    Experts,
    ModelDescription,
    Projector,
)

Config = Mapping[str, Any]

_LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
_QWEN = {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936}
_QWEN_VL = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
}  # fmt: skip
_QWEN_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151936,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_local_experts": 60,
}  # fmt: skip
_CLIP = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "image_size": 336, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
_QWEN2_VISION = {
    "depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 3584,
    "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip
_QWEN3_VISION = {
    "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
    "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "out_hidden_size": 3584, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip

DEFAULTS: Mapping[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3_vl_text": {
        **_QWEN, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0,
    },
    "qwen3_vl_moe_text": _QWEN_MOE,
    "clip_vision_model": _CLIP,
    "siglip_vision_model": {
        **_CLIP, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "image_size": 224, "patch_size": 16,
    },
    "internvl_vision": {**_CLIP, "image_size": [448, 448], "patch_size": [14, 14]},
    "qwen2_vl_vision": _QWEN2_VISION,
    "qwen2_5_vl_vision": {
        **_QWEN2_VISION, "hidden_size": 3584, "intermediate_size": 3420, "out_hidden_size": 3584,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl_vision": _QWEN3_VISION,
    "qwen3_vl_moe_vision": _QWEN3_VISION,
}  # fmt: skip
"""What transformers takes for a key that a file leaves out, by `model_type`."""

# The parts of a model whose file does not name their types, as files of before did not.
_PARTS = {
    "qwen2_vl": ("qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "internvl": ("qwen2", "internvl_vision"),
    "llava": ("llama", "clip_vision_model"),
    "llava_next": ("llama", "clip_vision_model"),
    "llava_onevision": ("qwen2", "siglip_vision_model"),
}
_RENAMED = {"qwen2_vl": "qwen2_vl_vision", "qwen2_5_vl": "qwen2_5_vl_vision",
            "qwen3_vl": "qwen3_vl_vision", "qwen3_vl_moe": "qwen3_vl_moe_vision"}  # fmt: skip


class _Part:
    """One part's keys, over the defaults of its type."""

    def __init__(self, kind: str, given: Config, where: str, path: Path) -> None:
        self.kind, self._where, self._path = kind, where, path
        if kind not in DEFAULTS:
            raise SpecError(
                f"the model config {path} has a {where} of model_type {quoted(kind)}; descriptions "
                f"are made of {', '.join(DEFAULTS)}. Describe the model in YAML instead."
            )
        self._values = {**DEFAULTS[kind], **{k: v for k, v in given.items() if v is not None}}

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that the part has."""
        return next((self._values[name] for name in names if name in self._values), default)

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number; of a pair of equal ones, the one. Raises SpecError."""
        value = self.get(*names, default=default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(
                f"the model config {self._path} has {quoted(value)} for {self._where}."
                f"{names[0]}; it must be a whole number. Mend it."
            )
        return value

    def optional(self, *names: str) -> int | None:
        """A whole number, or None where the part has none."""
        return None if self.get(*names) is None else self.number(*names)


def read_transformers_config(path: Path) -> ModelDescription:
    """The description of the model whose `config.json` this is, or lies in this folder. Raises
    SpecError where it cannot be read, or is of no family that is known."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_text(path, "model config"))
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"the model config {path} is not JSON: {error}. Mend it.") from error
    if not isinstance(config, dict):
        raise SpecError(f"the model config {path} holds no mapping. Give a model's config.json.")
    try:
        return _described(config, path)
    except PlanningError as error:
        raise SpecError(f"the model config {path} cannot be right: {error}") from error


def _described(config: Config, path: Path) -> ModelDescription:
    family = str(config.get("model_type", ""))
    if family not in _PARTS:
        raise SpecError(
            f"the model config {path} has model_type {quoted(family)}; descriptions are made of "
            f"{', '.join(sorted(_PARTS))}. Describe the model in YAML instead."
        )
    text_kind, vision_kind = _PARTS[family]
    given = config.get("text_config") or {k: v for k, v in config.items() if k != "vision_config"}
    text = _Part(_kind(given, text_kind, family), given, "text_config", path)
    seen = config.get("vision_config") or {}
    vision = _Part(_kind(seen, vision_kind, ""), seen, "vision_config", path)
    tied = bool(config.get("tie_word_embeddings", _tied_by_default(family)))
    encoder = _VISION[vision.kind](vision, text, config)
    extra = text.number("hidden_size") if family in ("llava_next", "llava_onevision") else 0
    return ModelDescription(
        name=path.parent.name or family,
        encoders=(encoder,),
        decoder=_decoder(text, tied=tied, extra=extra),
        source=f"config.json of transformers, model_type {family}",
    )


def _kind(given: Config, default: str, family: str) -> str:
    """The type of a part. Where the text's keys stand beside the model's, its type is the model's;
    older files call a vision part as they call the model."""
    kind = str(given.get("model_type", default))
    return default if kind == family or kind in _RENAMED else kind


def _tied_by_default(family: str) -> bool:
    return family == "internvl"


def _decoder(text: _Part, *, tied: bool, extra: int) -> Decoder:
    """`extra`: weights of the model beside its parts, such as LLaVA's vector of a new line."""
    kind, biases = text.kind, list[Bias]()
    if kind in ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"):
        biases = ["qkv"]
    elif kind != "mistral" and text.get("attention_bias", default=False):
        biases = ["qkv", "out"]
    if kind == "llama" and text.get("mlp_bias", default=False):
        biases.append("ffn")
    hidden = text.number("hidden_size")
    return Decoder(
        layers=text.number("num_hidden_layers"),
        hidden_size=hidden,
        heads=text.number("num_attention_heads"),
        kv_heads=text.optional("num_key_value_heads"),
        head_dim=text.optional("head_dim"),
        ffn_size=text.number("intermediate_size"),
        gated=True,
        biases=tuple(biases),
        qk_norm="head" if kind.startswith("qwen3") else "none",
        experts=_experts(text) if text.get("moe_intermediate_size") else None,
        vocabulary=text.number("vocab_size"),
        tied=tied,
        other_parameters=hidden + extra,  # the last norm
    )


def _experts(text: _Part) -> Experts:
    layers, every = text.number("num_hidden_layers"), text.number("decoder_sparse_step", default=1)
    plain = text.get("mlp_only_layers", default=[])
    return Experts(
        count=text.number("num_experts", "num_local_experts"),
        active=text.number("num_experts_per_tok"),
        ffn_size=text.number("moe_intermediate_size"),
        dense_layers=tuple(n for n in range(layers) if n in plain or (n + 1) % every),
    )


def _qwen2_vl(vision: _Part, text: _Part, config: Config) -> Encoder:
    wide, merged = vision.number("embed_dim"), vision.number("spatial_merge_size") ** 2
    out = vision.number("hidden_size")
    return Encoder(
        layers=vision.number("depth"),
        hidden_size=wide,
        heads=vision.number("num_heads"),
        ffn_size=int(wide * vision.get("mlp_ratio")),
        biases=("qkv", "out", "ffn"),
        norm="layer",
        input_size=_patch(vision),
        tokens_per_row=float(merged),
        projector=Projector(widths=(wide * merged, wide * merged, out), other_parameters=2 * wide),
    )


def _qwen2_5_vl(vision: _Part, text: _Part, config: Config) -> Encoder:
    wide, merged = vision.number("hidden_size"), vision.number("spatial_merge_size") ** 2
    side = vision.number("window_size") // vision.number("patch_size")
    return Encoder(
        layers=vision.number("depth"),
        hidden_size=wide,
        heads=vision.number("num_heads"),
        ffn_size=vision.number("intermediate_size"),
        gated=True,
        biases=("qkv", "out", "ffn"),
        window_tokens=side * side,
        full_attention_layers=tuple(vision.get("fullatt_block_indexes")),
        input_size=_patch(vision),
        tokens_per_row=float(merged),
        projector=Projector(
            widths=(wide * merged, wide * merged, vision.number("out_hidden_size")),
            other_parameters=wide,
        ),
    )


def _qwen3_vl(vision: _Part, text: _Part, config: Config) -> Encoder:
    wide, merged = vision.number("hidden_size"), vision.number("spatial_merge_size") ** 2
    depths = len(vision.get("deepstack_visual_indexes"))
    return Encoder(
        layers=vision.number("depth"),
        hidden_size=wide,
        heads=vision.number("num_heads"),
        ffn_size=vision.number("intermediate_size"),
        biases=("qkv", "out", "ffn"),
        norm="layer",
        input_size=_patch(vision),
        input_bias=True,
        positions=vision.number("num_position_embeddings"),
        tokens_per_row=float(merged),
        projector=Projector(
            widths=(wide * merged, wide * merged, vision.number("out_hidden_size")),
            copies=1 + depths,
            # The last depth is normed before it is merged, the others after.
            other_parameters=2 * wide + depths * 2 * wide * merged,
        ),
    )


def _patch(vision: _Part) -> int:
    """Numbers of a patch of a clip."""
    area = vision.number("patch_size") ** 2
    channels = vision.number("in_channels", "in_chans", default=3)
    return channels * vision.number("temporal_patch_size") * area


def _internvl(vision: _Part, text: _Part, config: Config) -> Encoder:
    wide, out = vision.number("hidden_size"), text.number("hidden_size")
    merged = int(1 / float(config.get("downsample_ratio", 0.5))) ** 2
    qkv: tuple[Bias, ...] = ("qkv",) if vision.get("attention_bias", default=False) else ()
    image = _image(vision, positions=vision.get("use_absolute_position_embeddings", default=True))
    masked = wide if vision.get("use_mask_token", default=False) else 0
    last = 0 if vision.get("use_mean_pooling", default=True) else 2 * wide
    return Encoder(
        **image,
        biases=(*qkv, "out", "ffn"),
        norm="rms" if vision.get("norm_type", default="layer_norm") == "rms_norm" else "layer",
        qk_norm="width" if vision.get("use_qk_norm", default=False) else "none",
        layer_scale=True,
        input_bias=True,
        other_parameters=wide + masked + last,  # the class token, a masked one, a last norm
        tokens_per_row=float(merged),
        projector=Projector(widths=(wide * merged, out, out), other_parameters=2 * wide * merged),
    )


def _clip(vision: _Part, text: _Part, config: Config) -> Encoder:
    wide = vision.number("hidden_size")
    return Encoder(
        **_image(vision, positions=True),
        biases=("qkv", "out", "ffn"),
        norm="layer",
        other_parameters=5 * wide,  # the class token, a norm before the layers and one behind
        projector=_llava_projector(vision, text, config),
    )


def _siglip(vision: _Part, text: _Part, config: Config) -> Encoder:
    wide, ffn = vision.number("hidden_size"), vision.number("intermediate_size")
    # The head that pools: a query, attention with biases, a norm, a feed-forward network.
    head = wide + 4 * wide * (wide + 1) + 2 * wide + ffn * (2 * wide + 1) + wide
    pools = bool(vision.get("vision_use_head", default=True))
    return Encoder(
        **{**_image(vision, positions=True), "positions": _positions(vision)},
        biases=("qkv", "out", "ffn"),
        norm="layer",
        input_bias=True,
        other_parameters=2 * wide + (head if pools else 0),
        projector=_llava_projector(vision, text, config),
    )


def _llava_projector(vision: _Part, text: _Part, config: Config) -> Projector:
    """Two matrices from the features of one layer, or of several side by side."""
    layers = config.get("vision_feature_layer", -2)
    wide = vision.number("hidden_size") * (1 if isinstance(layers, int) else len(layers))
    out = text.number("hidden_size")
    return Projector(
        widths=(wide, out, out), bias=bool(config.get("multimodal_projector_bias", True))
    )


def _image(vision: _Part, *, positions: bool) -> dict[str, Any]:
    """The shape that encoders of images of one size share; they have a class token."""
    patch = vision.number("patch_size")
    return {
        "layers": vision.number("num_hidden_layers"),
        "hidden_size": vision.number("hidden_size"),
        "heads": vision.number("num_attention_heads"),
        "ffn_size": vision.number("intermediate_size"),
        "input_size": vision.number("num_channels") * patch * patch,
        "positions": _positions(vision) + 1 if positions else 0,
    }


def _positions(vision: _Part) -> int:
    """Patches of an image."""
    return (vision.number("image_size") // vision.number("patch_size")) ** 2


_VISION: Mapping[str, Callable[[_Part, _Part, Config], Encoder]] = {
    "qwen2_vl_vision": _qwen2_vl,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "qwen3_vl_moe_vision": _qwen3_vl,
    "internvl_vision": _internvl,
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
}
