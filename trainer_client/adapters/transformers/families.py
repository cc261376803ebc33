"""How each family of models takes its items and its features: one class a family.

    items ─ encoder inputs ─▶ the family's own encoder ─▶ feature rows [rows, row width]
    feature rows, local tokens ─▶ embeddings ─▶ the family's own decoder ─▶ loss, or logits

What is computed is the library's own: an encoder is called as the model's ``forward`` calls it, on
all items of a microbatch at once, and the decoder through the model's ``forward`` wherever that
takes embeddings. A family is known by its config's ``model_type``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from trainer_client.adapters.transformers.anyres import size_on_canvas
from trainer_client.adapters.transformers.attention import DEGREE_ONE, PackAttention
from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.adapters.transformers.grids import derived_from
from trainer_client.adapters.transformers.head import HeadLoss
from trainer_client.encoder_inputs import (
    log_mels,
    patch_grids,
    pixel_rows,
    sound_frames,
    square_pixels,
)
from trainer_client.features import HOP_SAMPLES
from trainer_client.positions import MropeRule, local_positions
from trainer_client.runtime import Features, Kernel, LayoutError, PackedAttention, scatter_rows
from trainer_client.shard import MODALITIES, Microbatch, ModalityBatch, PackItems
from trainer_client.staging import copied_once


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalization:
    """Mean and deviation of each colour channel, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class TextFamily:
    """A decoder alone: Llama, Qwen3 and every other causal model whose layers call the attention
    interface of transformers."""

    # By modality: the parts of the core model that make its feature rows.
    encoders: Mapping[str, tuple[str, ...]] = {}
    position_rows = 1

    def __init__(
        self, model: Any, normalization: Normalization | None, kernel: Kernel = "auto"
    ) -> None:
        self.model = model
        self.decoder = model.get_decoder()
        self.kernel = kernel
        self._normalization = normalization
        self._head_loss = HeadLoss(model)

    def of(self, model: Any) -> "TextFamily":
        """The same for another model of the family."""
        return type(self)(model, self._normalization, self.kernel)

    @property
    def deep_layers(self) -> int:
        """Decoder layers behind which features are added, from the first on."""
        return 0

    def weights(self, modality: str) -> list[Parameter]:
        """What makes a modality's feature rows.

        Raises UnsupportedModel where the model has no such encoder.
        """
        if modality not in self.encoders:
            raise UnsupportedModel(
                f"{type(self.model).__name__} has no {modality} encoder, but the job has "
                f"{modality} items. Train a model that has one, or leave those sources out of the "
                "job."
            )
        parts = [getattr(self.model.model, name) for name in self.encoders[modality]]
        return [weight for part in parts for weight in _weights_of(part)]

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """Feature rows [rows, row width] of a batch's items, end to end."""
        raise NotImplementedError

    def dummy_item(self, modality: str, device: torch.device) -> Tensor:
        """The smallest item that the encoder takes."""
        raise NotImplementedError

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """The sum of the loss over local rows, a scalar; logits [local rows, vocabulary] where it
        cannot be taken without them."""
        taken = self.taken(microbatch.input_ids[None], features)
        return self.through(self.logits, taken, microbatch, attention)

    def through(
        self,
        compute: Callable[..., Tensor],
        taken: Mapping[str, Any],
        microbatch: Microbatch,
        attention: PackedAttention,
    ) -> Tensor:
        """Rows of what `compute` (`logits`, or `hidden`) makes of what it takes of a microbatch; of
        logits rather the sum of their loss, a scalar."""
        given = {
            **taken,
            "position_ids": self.positions(microbatch),
            "use_cache": False,
            "packed": self.pack(microbatch, attention),
        }

        def run() -> Tensor:
            before = attention.calls
            made = compute(**given)
            self._check_calls(attention.calls - before)
            return made

        made = self._head_loss.of(run, microbatch) if compute == self.logits else run()
        if made.dim() == 0:
            return made
        # Not a view of the batch of one, on which FSDP's hooks would warn.
        rows: Tensor = torch.ops.aten._unsafe_view(made, made.shape[1:])
        return rows

    def _check_calls(self, calls: int) -> None:
        layers = self.decoder.config.num_hidden_layers
        if calls == layers:
            return
        name = type(self.decoder).__name__
        if calls > layers:
            raise UnsupportedModel(
                f"the {layers} layers of {name} computed attention {calls} times through "
                "transformers' attention interface, and what is known of models is one attention "
                "a layer. Of this one it is not known that it keeps the samples of a pack apart"
            )
        raise UnsupportedModel(
            f"{calls} of the {layers} layers of {name} computed their attention through "
            "transformers' attention interface. The others were left out, or attend in a way of "
            "their own, which would mix the samples of a pack; or the model was compiled as a "
            "whole: compile its decoder's layers instead, each by "
            "layer.compile(fullgraph=True, dynamic=True)"
        )

    def taken(self, ids: Tensor, features: Mapping[str, Features]) -> dict[str, Any]:
        """What `logits` takes of tokens [1, rows] and of feature rows."""
        return {"input_ids": ids}

    def logits(self, **taken: Any) -> Tensor:
        """Logits [1, rows, vocabulary]. The model never sees labels, which are shifted already."""
        logits: Tensor = self.model(**taken).logits
        return logits

    def hidden(self, **taken: Any) -> Tensor:
        """What the decoder gives [1, rows, width], before the head."""
        states: Tensor = self.decoder(**taken).last_hidden_state
        return states

    def pack(self, microbatch: Microbatch, attention: PackedAttention) -> PackAttention:
        """The attention that the layers of this microbatch are given."""
        return PackAttention(ring=attention, spans=self.spans(microbatch), kernel=self.kernel)

    def spans(self, microbatch: Microbatch) -> Tensor | None:
        """Rows that see one another in both directions; None where all attention is causal."""
        return None

    def positions(self, microbatch: Microbatch) -> Tensor:
        """[1, rows], or [3, 1, rows] where the family takes time, height and width (M-RoPE)."""
        positions = microbatch.positions
        rows = 1 if positions.dim() == 1 else len(positions)
        if rows == self.position_rows:
            return positions[None] if rows == 1 else positions[:, None]
        if rows == 1 and microbatch.vision is None:
            return positions.expand(self.position_rows, 1, -1)  # of text, all rows are equal
        raise LayoutError(
            f"the job gives {rows} position(s) a token, and {type(self.model).__name__} takes "
            f"{self.position_rows}. M-RoPE has three: time, height and width. Give the job's "
            "pipeline the vision processor of this model's family, and `positions: auto`; for a "
            "model that counts tokens, `positions: sequence`. "
            "Of synthetic shards: SyntheticJob(mrope=MropeRule())."
        )


class FeatureFamily(TextFamily):
    """A decoder whose embeddings are replaced by feature rows at their tokens."""

    def taken(self, ids: Tensor, features: Mapping[str, Features]) -> dict[str, Any]:
        return {"inputs_embeds": self.embeddings(ids, features)}

    def embeddings(self, ids: Tensor, features: Mapping[str, Features]) -> Tensor:
        """Embeddings of ids [1, rows], with feature rows in their places."""
        embeddings: Tensor = self.model.get_input_embeddings()(ids)[0]
        for found in features.values():
            embeddings = scatter_rows(embeddings, found.rows, found.positions)
        return embeddings[None]

    def pixels(self) -> dict[str, Any]:
        """How the vision encoder takes pixels: mean, deviation, and the type of its weights."""
        known = self._normalization
        assert known is not None  # trainable() finds one for every family that sees
        return {"mean": known.mean, "std": known.std, "dtype": self.weights("vision")[0].dtype}

    def seen(self, *inputs: object, **derived: object) -> Any:
        """What the library's own vision encoder, with its projector, makes of its inputs; `derived`
        are those that it would derive from the others itself."""
        return self.model.model.get_image_features(*inputs, return_dict=True, **derived)


class QwenVL(FeatureFamily):
    """Qwen2-VL and Qwen2.5-VL: patches of any resolution, M-RoPE. Images and clips are encoded
    alike, each with its own grid."""

    encoders: Mapping[str, tuple[str, ...]] = {"vision": ("visual",)}
    position_rows = 3
    _clock_is_known = False

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        return self._rows(self.seen_patches(self.patches(batch), batch))

    def patches(self, batch: ModalityBatch) -> Tensor:
        """The rows of pixels [patches, row width] that the encoder takes of a batch's items."""
        sizes = self.model.config.vision_config
        unit = sizes.patch_size * sizes.spatial_merge_size
        for item in batch.items:
            if item.shape[1] % unit or item.shape[2] % unit:
                raise LayoutError(
                    f"an item has {item.shape[1]}×{item.shape[2]} pixels, and "
                    f"{type(self.model).__name__} takes multiples of {unit}. Give the job the "
                    "vision processor of this model's family (vision: {kind: …})."
                )
        return pixel_rows(
            batch.items,
            patch=sizes.patch_size,
            temporal_patch=sizes.temporal_patch_size,
            merge=sizes.spatial_merge_size,
            **self.pixels(),
        )

    def seen_patches(self, rows: Tensor, batch: ModalityBatch) -> Any:
        """What the encoder makes of rows, one for each patch of the batch's items."""
        sizes = self.model.config.vision_config
        grids = patch_grids(
            batch.items, patch=sizes.patch_size, temporal_patch=sizes.temporal_patch_size
        )
        return self.seen(rows, grids, **derived_from(grids, self.model.model.visual, rows.device))

    def positions(self, microbatch: Microbatch) -> Tensor:
        positions = super().positions(microbatch)
        items = microbatch.items
        if not self._clock_is_known and items is not None and (items.grid[:, 0] > 1).any():
            self._check_clock(microbatch, items, positions[:, 0].cpu())
        return positions

    def _check_clock(self, microbatch: Microbatch, items: PackItems, found: Tensor) -> None:
        """Whether the job counts the time of clips as this model does: Qwen2.5-VL by the second,
        Qwen2-VL by patches. Raises LayoutError."""
        rate = getattr(self.model.config.vision_config, "tokens_per_second", 0)

        def placed(per_second: float, past_time: bool) -> Tensor:
            return local_positions(
                microbatch.cu_seqlens.numpy().astype("int64"),
                items,
                MropeRule(tokens_per_second=per_second, past_time=past_time),
                degree=len(microbatch.cp_group),
                cp_rank=microbatch.cp_rank,
            )

        for past_time in (False, True):  # whether time moves the text behind a clip is the job's
            expected = placed(rate, past_time)
            if torch.equal(expected, found):
                # These rows may lack the clip: then any clock fits, and the next pack is asked.
                self._clock_is_known = not torch.equal(expected, placed(rate + 1, past_time))
                return
        counts = f"{rate} positions a second" if rate else "one position a patch"
        raise LayoutError(
            "the job places the frames of clips by another clock than this model, which has "
            f"{counts}. The job's `pipeline` needs "
            f"`vision: {{kind: {self.model.config.model_type}}}`"
            + (f", and beside `vision` `tokens_per_second: {rate}`." if rate else ".")
            + f" Of synthetic shards: SyntheticJob(mrope=MropeRule(tokens_per_second={rate}))."
        )

    def dummy_item(self, modality: str, device: torch.device) -> Tensor:
        sizes = self.model.config.vision_config
        side = sizes.patch_size * sizes.spatial_merge_size
        return torch.zeros(1, side, side, 3, dtype=torch.uint8, device=device)

    def _rows(self, found: Any) -> Tensor:
        return _joined(found.pooler_output)


class Qwen3VL(QwenVL):
    """Qwen3-VL: features of deeper encoder layers are added behind the first decoder layers.

    A feature row carries them behind its own width, [width · (1 + deepstack layers)], so that the
    exchange brings them along.
    """

    @property
    def deep_layers(self) -> int:
        return len(self.model.config.vision_config.deepstack_visual_indexes)

    def _rows(self, found: Any) -> Tensor:
        return torch.cat([super()._rows(found), *map(_joined, found.deepstack_features)], dim=1)

    def taken(self, ids: Tensor, features: Mapping[str, Features]) -> dict[str, Any]:
        places, deep = None, None
        if (found := features.get("vision")) is not None:
            own, *deep = torch.split(found.rows, self.decoder.config.hidden_size, dim=1)
            places = found.positions
            features = {"vision": Features(rows=own, positions=places)}
        return {
            "inputs_embeds": self.embeddings(ids, features),
            "visual_pos_masks": places,
            "deepstack_visual_embeds": deep,
        }

    def hidden(self, **taken: Any) -> Tensor:
        # The library's own adds by a mask, whose rows the host would wait for in each layer.
        # It stays: layers that are computed again in the backward pass ask for it there.
        self.decoder._deepstack_process = _with_deep_rows
        return super().hidden(**taken)

    def logits(self, **taken: Any) -> Tensor:
        # The model's own forward takes deepstack features with pixels only.
        logits: Tensor = self.model.get_output_embeddings()(self.hidden(**taken))
        return logits


class Tiles(FeatureFamily):
    """LLaVA and InternVL: an item is one or more squares, [tiles, side, side, 3]."""

    encoders: Mapping[str, tuple[str, ...]] = {"vision": ("vision_tower", "multi_modal_projector")}

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        side = _sides(self.model.config.vision_config.image_size)
        for item in batch.items:
            if tuple(item.shape[1:3]) != tuple(side):
                raise LayoutError(
                    f"an item has squares of {item.shape[1]}×{item.shape[2]} pixels, and the "
                    f"model's vision tower takes {side[0]}×{side[1]}. Give the job the vision "
                    "processor of this model: another kind, kind siglip with its side, or kind "
                    "transformers with the model's own folder."
                )
        pixels = square_pixels(batch.items, **self.pixels())
        return _joined(self.seen(pixels, *self.sizes(batch)).pooler_output)

    def sizes(self, batch: ModalityBatch) -> tuple[object, ...]:
        """What the encoder takes besides pixels."""
        return ()

    def dummy_item(self, modality: str, device: torch.device) -> Tensor:
        height, width = _sides(self.model.config.vision_config.image_size)
        return torch.zeros(1, height, width, 3, dtype=torch.uint8, device=device)


class LlavaNext(Tiles):
    """LLaVA-NeXT: the whole picture as one square, then the squares of a canvas that it is fitted
    into, [1 + squares, side, side, 3]. An item's grid is [canvas, rows, columns, 1]: the rows of
    squares of the canvas, and the rows and columns of its patches without its border."""

    encoders: Mapping[str, tuple[str, ...]] = {
        "vision": ("vision_tower", "multi_modal_projector", "image_newline")
    }

    def sizes(self, batch: ModalityBatch) -> tuple[object, ...]:
        # The library finds canvas and border from a picture's size.
        if not len(batch.exchange.send_rows):  # a dummy item's
            return ([(1, 1)] * len(batch.items),)
        config, side = self.model.config, self.model.config.vision_config.image_size
        pinpoints = tuple(map(tuple, config.image_grid_pinpoints))
        found = []
        for item, (high, rows, columns, _) in zip(batch.items, _grids(batch), strict=True):
            squares = item.shape[0] - 1
            canvas = int(high) * side, squares // int(high) * side
            patch = config.vision_config.patch_size
            found.append(size_on_canvas(canvas, (int(rows), int(columns)), patch, pinpoints))
        return (found,)

    def dummy_item(self, modality: str, device: torch.device) -> Tensor:
        """The squares of a picture of one patch, for the library's choice of its canvas."""
        config, side = self.model.config, self.model.config.vision_config.image_size
        squares = image_size_to_num_patches([1, 1], config.image_grid_pinpoints, side)
        return torch.zeros(squares, side, side, 3, dtype=torch.uint8, device=device)


class Gemma3(Tiles):
    """Gemma 3: one square an item, whose tokens see one another in both directions."""

    def spans(self, microbatch: Microbatch) -> Tensor | None:
        if len(microbatch.cp_group) > 1:
            raise UnsupportedModel(
                f"{type(self.model).__name__} lets the tokens of an image see one another, which "
                f"is exact at CP degree 1 only, and this pack is spread over "
                f"{len(microbatch.cp_group)} replicas: {DEGREE_ONE}"
            )
        # By the plan, which lies on the host: tokens would be waited for, and the config of a model
        # with a small vocabulary may name an image token that the job does not have.
        items = microbatch.items
        if items is None:
            return None
        seen = items.modality == MODALITIES.index("vision")
        if not seen.any():
            return None
        ids = microbatch.input_ids
        image = torch.zeros(len(ids), dtype=torch.bool)
        for start, tokens in zip(items.start[seen], items.tokens[seen], strict=True):
            image[start : start + tokens] = True
        begins = image.clone()
        begins[1:] &= ~image[:-1]
        return copied_once(torch.where(image, begins.cumsum(0), -1), ids.device)


class Qwen2Audio(FeatureFamily):
    """Qwen2-Audio: log-mel frames of 30 s, of which only those of the recording become tokens."""

    encoders: Mapping[str, tuple[str, ...]] = {"audio": ("audio_tower", "multi_modal_projector")}

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        core = self.model.model
        sizes = core.audio_tower.config
        frames = 2 * sizes.max_source_positions  # the stem has a stride of 2
        mel = log_mels(batch.items, n_mels=sizes.num_mel_bins, pad_to_samples=frames * HOP_SAMPLES)
        # The library's own arithmetic: tokens of the encoder, then of its pooling by two.
        inner, tokens = core.audio_tower._get_feat_extract_output_lengths(sound_frames(batch.items))
        sound = _first(inner, sizes.max_source_positions)
        padded = not sound.all()  # asked here: on the device, the library would wait for the answer
        inside = create_bidirectional_mask(
            config=sizes,
            inputs_embeds=mel.new_empty(len(mel), sizes.max_source_positions, 1),
            attention_mask=copied_once(sound, mel.device) if padded else None,
            allow_is_bidirectional_skip=not padded,
        )
        encoded = core.audio_tower(mel, attention_mask=inside).last_hidden_state
        rows: Tensor = core.multi_modal_projector(encoded)
        kept = _first(tokens, rows.shape[1]).flatten().nonzero().flatten()
        return rows.flatten(0, 1).index_select(0, copied_once(kept, rows.device))

    def dummy_item(self, modality: str, device: torch.device) -> Tensor:
        return torch.zeros(4 * HOP_SAMPLES, device=device)


def _with_deep_rows(hidden: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Hidden states [batch, tokens, width] with feature rows [n, width] added: of one sequence at
    tokens [n], or where a mask [batch, tokens] says, as the library gives it."""
    rows = rows.to(hidden)
    if places.dtype == torch.bool:
        return hidden.index_put(places.nonzero(as_tuple=True), rows, accumulate=True)
    return hidden.index_add(1, places, rows[None])


def _first(counts: Tensor, size: int) -> Tensor:
    """bool [n, size], on the host as `counts` [n] are: the first counts[i] of row i are true."""
    return torch.arange(size) < counts[:, None]


def _grids(batch: ModalityBatch) -> list[list[int]]:
    """The grid of each item; of a dummy item, which the batch has no row for, one patch.

    Raises LayoutError where items came without grids.
    """
    if not len(batch.exchange.send_rows):
        return [[1, 1, 1, 1]] * len(batch.items)
    grids: list[list[int]] = [] if batch.notes is None else batch.notes.grid.tolist()
    if len(grids) != len(batch.items) or not all(map(all, grids)):
        raise LayoutError(
            f"{len(batch.items)} items came with the grids {grids}; give the job the vision "
            "processor of this model's family"
        )
    return grids


def _weights_of(part: Module | Parameter) -> list[Parameter]:
    return [part] if isinstance(part, Parameter) else list(part.parameters())


def _joined(parts: Any) -> Tensor:
    """Rows [rows, width] of items that came as one tensor, or each as its own."""
    is_rows = isinstance(parts, Tensor) and parts.dim() == 2
    return parts if is_rows else torch.cat(list(parts))


def _sides(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return int(height), int(width)


FAMILIES: dict[str, type[TextFamily]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
    "llava": Tiles,
    "llava_next": LlavaNext,
    "internvl": Tiles,
    "qwen2_audio": Qwen2Audio,
    "gemma3": Gemma3,
}
