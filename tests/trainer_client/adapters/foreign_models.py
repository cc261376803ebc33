"""Tiny models of transformers with random weights in fp64, random samples for them, and what the
library's own forward gives for one sample at a time."""

import types
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.models.llava_next import modeling_llava_next as llava_next

from trainer_client.features import HOP_SAMPLES, log_mel, normalize_pixels, patchify

# Ids below TEXT_IDS are text.
TEXT_IDS, START, IMAGE, VIDEO, AUDIO, VOCABULARY = 56, 57, 60, 61, 62, 64
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.2, 0.25)
PROCESSOR = types.SimpleNamespace(image_mean=MEAN, image_std=STD)
WIDTH, PATCH, MERGE, SIDE = 32, 4, 2, 8
MEL_FRAMES, MEL_BINS = 100, 8


@dataclass
class Item:
    """What a worker sends of an item, and the tokens it fills in the text."""

    modality: str
    values: torch.Tensor
    tokens: int
    start: int = 0
    grid: tuple[int, int, int, int] = (0, 0, 0, 0)
    whole: tuple | None = None  # the frames and the grid of the image or clip that it is of


@dataclass
class Sample:
    """`unshifted` labels are those that a model of transformers takes, and shifts."""

    ids: torch.Tensor
    unshifted: torch.Tensor
    held: list[Item] = field(default_factory=list)
    positions: torch.Tensor | None = None  # [3, length] of M-RoPE

    @property
    def labels(self):
        return torch.cat([self.unshifted[1:], torch.tensor([-100])])

    @property
    def items(self):
        """As `random_steps` takes them."""
        return [(item.modality, item, item.start, item.tokens) for item in self.held]


class Text:
    """A family without encoders; the others are built on it."""

    auto = transformers.AutoModelForCausalLM

    def __init__(self, config, **settings):
        self.config, self.own = config, settings

    def settings(self):
        return {**text(), **self.own}

    def build(self):
        torch.manual_seed(3)
        config = getattr(transformers, self.config)(**self.settings())
        # Eager attention would take its softmax in float32; grouped experts know no fp64.
        kinds = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        model = self.auto.from_config(config, **kinds).double()
        with torch.no_grad():  # weights that matter: fresh ones hardly tell one mask from another
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
                elif "bias" in name:
                    parameter.normal_(std=0.1)
        return model

    def random_items(self, rng):
        """Placeholder and items, one after another; the items of a clip may be several."""
        return []

    def inputs(self, sample):
        """What transformers' own forward takes beside ids."""
        return {}

    def place(self, model, sample):
        """M-RoPE positions of a sample, of the library's own function."""

    def sample(self, rng, model, longest=40):
        ids, labels, items = [], [], []

        def write(most):
            found = rng.integers(0, TEXT_IDS, int(rng.integers(1, most))).tolist()
            ids.extend(found)
            labels.extend(found)

        write(longest)
        for token, pieces in self.random_items(rng):
            for item in pieces:
                ids.append(START)
                item.start = len(ids)
                ids.extend([token] * item.tokens)
                labels.extend([-100] * (item.tokens + 1))
                items.append(item)
                write(6)
        unshifted = torch.tensor(labels)
        unshifted[torch.from_numpy(rng.random(len(ids)) < 0.2)] = -100
        sample = Sample(ids=torch.tensor(ids), unshifted=unshifted, held=items)
        self.place(model, sample)
        return sample


class QwenVL(Text):
    """Qwen2-VL and Qwen2.5-VL."""

    auto = transformers.AutoModelForImageTextToText
    timed = False

    def settings(self):
        vision = {
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "depth": 2,
            "hidden_size": WIDTH,
            "num_heads": 2,
            "intermediate_size": 48,
            **self.own,
        }
        return {
            "text_config": {**text(), "rope_parameters": self.rope()},
            "vision_config": vision,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": START + 1,
        }

    def rope(self):
        return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

    def random_items(self, rng):
        found = []
        for _ in range(int(rng.integers(0, 3))):
            clip = rng.random() < 0.4
            h, w = (MERGE * int(n) for n in rng.integers(1, 5, 2))
            frames = 2 * int(rng.integers(1, 4)) if clip else 1
            pixels = random_pixels(rng, frames, h * PATCH, w * PATCH)
            found.append((VIDEO if clip else IMAGE, self.pieces(pixels, h, w)))
        return found

    def pieces(self, frames, h, w):
        """The items of frames of h × w patches, as they stand in the text: here in one piece."""
        t = -(-len(frames) // 2)
        return [Item("vision", frames, t * h * w // MERGE**2, whole=(frames, (t, h, w)))]

    def inputs(self, sample):
        kinds = (sample.ids == IMAGE) + 2 * (sample.ids == VIDEO)
        inputs = {"mm_token_type_ids": kinds.int()[None]}
        for token, suffix, prefix in ((IMAGE, "", "image"), (VIDEO, "_videos", "video")):
            items = [item for item in sample.held if sample.ids[item.start] == token]
            if wholes := list({id(item.whole): item.whole for item in items}.values()):
                inputs[f"pixel_values{suffix}"] = torch.cat([patches(f) for f, _ in wholes])
                inputs[f"{prefix}_grid_thw"] = torch.tensor([grid for _, grid in wholes])
        if self.timed and "video_grid_thw" in inputs:
            inputs["second_per_grid_ts"] = torch.full((len(inputs["video_grid_thw"]),), 0.5)
        return inputs

    def place(self, model, sample):
        known = {k: v for k, v in self.inputs(sample).items() if not k.startswith("pixel")}
        sample.positions = model.model.get_rope_index(sample.ids[None], **known)[0][:, 0]


class TimedQwenVL(QwenVL):
    """Qwen2.5-VL, with absolute time."""

    timed = True


class Qwen3VL(QwenVL):
    def rope(self):
        return {**super().rope(), "mrope_interleaved": True}

    def pieces(self, frames, h, w):
        """Text stands between the pairs of frames of a clip, so that each is an item."""
        (clip,) = super().pieces(frames, h, w)
        pairs = frames.split(2)
        return [Item("vision", pair, clip.tokens // len(pairs), whole=clip.whole) for pair in pairs]


class Squares(Text):
    """LLaVA, InternVL and Gemma 3: squares of 4 patches of which 4 tokens are left."""

    auto = transformers.AutoModelForImageTextToText

    def __init__(self, config, *, text_type, vision, most_squares=1, **settings):
        super().__init__(config, **settings)
        self.text_type, self.vision, self.most_squares = text_type, vision, most_squares

    def settings(self):
        vision = {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            **self.vision,
        }
        return {
            "text_config": {**text(), "model_type": self.text_type, **self.own.get("text", {})},
            "vision_config": vision,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            **{name: value for name, value in self.own.items() if name != "text"},
        }

    @property
    def side(self):
        size = self.vision["image_size"]
        return size if isinstance(size, int) else size[0]

    def random_items(self, rng):
        counts = rng.integers(1, self.most_squares + 1, int(rng.integers(0, 3)))
        return [(IMAGE, [self.item(rng, int(squares))]) for squares in counts]

    def item(self, rng, squares):
        return Item("vision", random_pixels(rng, squares, self.side, self.side), 4 * squares)

    def inputs(self, sample):
        if not sample.held:
            return {}
        return {"pixel_values": torch.cat([squares(item.values) for item in sample.held])}


class Canvases(Squares):
    """LLaVA-NeXT: a square of the whole and those of a canvas, with a newline behind each row."""

    SIZES = ((8, 16), (16, 8), (16, 16), (5, 16), (16, 5), (3, 3), (9, 30), (30, 9))

    def item(self, rng, squares):
        size = self.SIZES[int(rng.integers(len(self.SIZES)))]
        pinpoints, patches = self.own["image_grid_pinpoints"], self.side // PATCH
        squares = llava_next.image_size_to_num_patches(size, pinpoints, self.side)
        high, wide = llava_next.get_anyres_image_grid_shape(size, pinpoints, self.side)
        canvas = torch.zeros(1, high * patches, wide * patches)
        _, rows, columns = llava_next.unpad_image(canvas, size).shape
        item = super().item(rng, squares)
        item.tokens = patches**2 + rows * (columns + 1)
        item.grid, item.whole = (high, rows, columns, 1), size
        return item

    def inputs(self, sample):
        sizes = torch.tensor([item.whole for item in sample.held])
        return {**super().inputs(sample), "image_sizes": sizes} if sample.held else {}


class Gemma3(Squares):
    def build(self):
        """The library's norms sum the gradients of their weights in float32, so that the order of
        samples shows; here they compute the same in fp64."""
        model = super().build()
        for part in model.modules():
            if isinstance(part, transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm):
                part.forward = types.MethodType(norm_in_fp64, part)
        return model

    def inputs(self, sample):
        return {**super().inputs(sample), "token_type_ids": (sample.ids == IMAGE).long()[None]}


class Qwen2Audio(Text):
    auto = transformers.AutoModelForMultimodalLM

    def settings(self):
        encoder = {
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": WIDTH,
            "max_source_positions": MEL_FRAMES // 2,
        }
        return {
            "text_config": {**text(), "model_type": "qwen2"},
            "audio_config": {**encoder, "model_type": "qwen2_audio_encoder"},
            "audio_token_index": AUDIO,
        }

    def random_items(self, rng):
        found = []
        for _ in range(int(rng.integers(0, 3))):
            frames = int(rng.integers(8, MEL_FRAMES + 1))
            sound = torch.from_numpy(rng.standard_normal(frames * HOP_SAMPLES).astype(np.float32))
            # Fewer than two tokens in a row are an older way to write a recording.
            found.append((AUDIO, [Item("audio", sound, ((frames - 1) // 2 + 1) // 2)]))
        return found

    def inputs(self, sample):
        if not sample.held:
            return {}
        whole = MEL_FRAMES * HOP_SAMPLES
        sounds = [item.values for item in sample.held]
        mel = [log_mel(sound, n_mels=MEL_BINS, pad_to_samples=whole) for sound in sounds]
        frames = torch.tensor([len(sound) // HOP_SAMPLES for sound in sounds])
        return {
            "input_features": torch.stack(mel),
            "feature_attention_mask": (torch.arange(MEL_FRAMES) < frames[:, None]).long(),
        }


def norm_in_fp64(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def text():
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def random_pixels(rng, frames, height, width):
    return torch.from_numpy(rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8))


def patches(frames):
    return patchify(normalize_pixels(frames, MEAN, STD, torch.float64), patch=PATCH)[0]


def squares(tiles):
    return normalize_pixels(tiles, MEAN, STD, torch.float64).permute(0, 3, 1, 2)


CLIP = {"image_size": SIDE, "model_type": "clip_vision_model"}
FAMILIES = {
    "llama": Text("LlamaConfig"),
    "qwen3": Text("Qwen3Config"),
    "qwen3_moe": Text(
        "Qwen3MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "mistral": Text("MistralConfig", sliding_window=5),
    "qwen2_vl": QwenVL(
        "Qwen2VLConfig",
        embed_dim=WIDTH,
        mlp_ratio=2,
    ),
    "qwen2_5_vl": TimedQwenVL(
        "Qwen2_5_VLConfig",
        window_size=2 * PATCH * MERGE,
        fullatt_block_indexes=[1],
        out_hidden_size=WIDTH,
    ),
    "qwen3_vl": Qwen3VL(
        "Qwen3VLConfig",
        out_hidden_size=WIDTH,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    ),
    "llava": Squares("LlavaConfig", text_type="llama", vision=CLIP),
    "llava_next": Canvases(
        "LlavaNextConfig",
        text_type="llama",
        vision=CLIP,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16], [24, 8], [8, 24]],
    ),
    "internvl": Squares(
        "InternVLConfig",
        text_type="qwen2",
        vision={"image_size": [16, 16], "patch_size": [PATCH, PATCH]},
        most_squares=3,
    ),
    "qwen2_audio": Qwen2Audio("Qwen2AudioConfig"),
    "gemma3": Gemma3(
        "Gemma3Config",
        text_type="gemma3_text",
        vision={"image_size": 16, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        text={
            "query_pre_attn_scalar": 8,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def one_at_a_time(family, model, samples):
    """Loss and gradients of the library's own forward; positions, masks and shifts are its own."""
    total = sum(int((s.labels != -100).sum()) for s in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        inputs = family.inputs(sample)
        out = model(input_ids=sample.ids[None], labels=sample.unshifted[None], **inputs)
        mine = cross_entropy(out.logits[0, :-1], sample.unshifted[1:], reduction="sum")
        counted = int((sample.labels != -100).sum())
        if counted:  # the library takes its loss in float32, so that its gradients would be
            assert abs(float(out.loss.detach()) - float(mine.detach()) / counted) < 1e-5
        loss = loss + mine / total
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
