"""What the processors saved with a model's tokenizer do otherwise than the job's.

A built-in kind has the sizes that its models were published with, while the model's own folder may
say others: pictures and clips would then have other tokens and pixels than the model's own
processors give them. `PICTURES` has, for each family, the settings that mean the same on both
sides, and `CLIPS` those of clips, for families that save a processor of them. Settings that the
family's processor passes over stand in none: `crop_to_patches` of InternVL and `do_pan_and_scan` of
Gemma 3, which it replaces by its own defaults, and `do_pad` of LLaVA-NeXT, which fills a batch up.
Mean and deviation are the trainer's (`trainer_client.adapters.transformers`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dataservice.core.errors import SpecError
from dataservice.core.named_files import read_named
from dataservice.core.quoting import cut, quoted
from dataservice.decode.processors.gemma3 import SIDE as GEMMA3_SIDE
from dataservice.decode.processors.gemma3 import Gemma3Processor
from dataservice.decode.processors.idefics3 import Idefics3Processor
from dataservice.decode.processors.internvl import TILE, InternVLProcessor
from dataservice.decode.processors.llava import SIDE as LLAVA_SIDE
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.llava_next import SIDE as NEXT_SIDE
from dataservice.decode.processors.llava_next import LlavaNextProcessor
from dataservice.decode.processors.qwen2_vl import MERGE, PATCH, TEMPORAL_PATCH, Qwen2VLProcessor
from dataservice.decode.processors.qwen3_vl import PATCH as QWEN3_PATCH
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.siglip import SiglipProcessor
from dataservice.decode.spec import PipelineSpec

WHOLE = "processor_config.json"
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # as Pillow numbers them
QWENS = {PATCH: "qwen2_5_vl", QWEN3_PATCH: "qwen3_vl"}  # the kind of each side of a patch

Settings = Mapping[str, Any]
Vision = Any  # one of the built-in processors of `spec.py`
Options = Callable[[Any], dict[str, object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A setting of the file: the `keys` that it may have there, the first of which counts; what the
    job's processor does, as a value of it; and which options make the processor do what is saved,
    as far as some do. `matters` says of the settings whether this one decides anything."""

    keys: tuple[str, ...]
    does: Callable[[Vision], object]
    options: Options = lambda saved: {}
    matters: Callable[[Settings], bool] = lambda settings: True


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The classes that a family's models name in their files, its rules, and the vision section
    that follows a file where no options do, if there is one."""

    classes: tuple[str, ...]
    rules: tuple[Rule, ...]
    instead: Callable[[Vision, Settings], dict[str, object] | None] = lambda vision, settings: None


def _fixed(key: str, value: object, **more: Any) -> Rule:
    return Rule(keys=(key,), does=lambda vision: value, **more)


def _option(option: str, *keys: str, **more: Any) -> Rule:
    return Rule(
        keys=keys,
        does=lambda vision: getattr(vision, option),
        options=lambda saved: {option: saved},
        **more,
    )


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _qwen(patch: int, of: str, *rules: Rule) -> Family:
    others: dict[int, dict[str, object]] = {
        side: {"kind": kind} for side, kind in QWENS.items() if side != patch
    }
    return Family(
        classes=(of,),
        rules=(
            *rules,
            _fixed("patch_size", patch),
            _fixed("merge_size", MERGE),
            _fixed("temporal_patch_size", TEMPORAL_PATCH),
            _fixed("do_resize", True),
            _fixed("resample", BICUBIC),
        ),
        instead=lambda vision, settings: next(
            (kind for side, kind in others.items() if side == settings.get("patch_size")),
            None,
        ),
    )


def _qwen_pixels(of: str) -> tuple[Rule, Rule]:
    """The limits of a picture's pixels, or with another prefix those of a clip's. Where a file has
    both names of one, transformers lets the older decide."""
    return (
        _option(f"{of}max_pixels", "max_pixels", "size.longest_edge"),
        _option(f"{of}min_pixels", "min_pixels", "size.shortest_edge"),
    )


def _qwen_frames(sampled: Callable[[Settings], bool]) -> tuple[Rule, ...]:
    """Which frames a processor takes that samples them itself."""
    names = {"fps": "video_fps", "min_frames": "video_min_frames", "max_frames": "video_max_frames"}
    return tuple(_option(ours, theirs, matters=sampled) for theirs, ours in names.items())


def _crops(settings: Settings) -> bool:
    return settings.get("do_center_crop") is not False


PICTURES: dict[type, Family] = {
    Qwen2VLProcessor: _qwen(PATCH, "Qwen2VLImageProcessor", *_qwen_pixels("")),
    Qwen3VLProcessor: _qwen(QWEN3_PATCH, "Qwen2VLImageProcessor", *_qwen_pixels("")),
    InternVLProcessor: Family(
        classes=("GotOcr2ImageProcessor",),
        rules=(
            _option("min_tiles", "min_patches"),
            _option("max_tiles", "max_patches"),
            _fixed("size", _square(TILE)),
            _fixed("resample", BICUBIC),
        ),
        # The image processor alone obeys crop_to_patches; InternVL's whole processor always cuts.
        instead=lambda vision, settings: (
            {"kind": "transformers", "patch": 14, "merge": 2}
            if settings.get("crop_to_patches") is True
            else None
        ),
    ),
    LlavaProcessor: Family(
        classes=("LlavaImageProcessor", "CLIPImageProcessor"),
        rules=(
            Rule(
                keys=("do_pad",),
                does=lambda vision: vision.aspect == "pad",
                options=lambda saved: {"aspect": "pad" if saved else "crop"},
                # CLIP's knows no such padding.
                matters=lambda settings: _class(settings) == "LlavaImageProcessor",
            ),
            _fixed("size", {"shortest_edge": LLAVA_SIDE}),
            _fixed("crop_size", _square(LLAVA_SIDE), matters=_crops),
            # A square that was padded is cropped to itself.
            _fixed(
                "do_center_crop", True, matters=lambda settings: settings.get("do_pad") is not True
            ),
            _fixed("do_resize", True),
            _fixed("resample", BICUBIC),
        ),
        instead=lambda vision, settings: {"kind": "transformers", "patch": 14},
    ),
    LlavaNextProcessor: Family(
        classes=("LlavaNextImageProcessor",),
        rules=(
            Rule(
                keys=("image_grid_pinpoints",),
                does=lambda vision: [[h * NEXT_SIDE, w * NEXT_SIDE] for h, w in vision.canvases],
                options=lambda saved: {
                    "canvases": tuple((h // NEXT_SIDE, w // NEXT_SIDE) for h, w in saved)
                },
            ),
            _fixed("size", {"shortest_edge": NEXT_SIDE}),
            # Its height is that of the squares, whether or not they are cropped.
            _fixed("crop_size", _square(NEXT_SIDE)),
            _fixed("resample", BICUBIC),
        ),
    ),
    Gemma3Processor: Family(
        classes=("Gemma3ImageProcessor",),
        rules=(
            _fixed("size", _square(GEMMA3_SIDE)),
            _fixed("do_resize", True),
            _fixed("resample", BILINEAR),
        ),
    ),
    Idefics3Processor: Family(
        classes=("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
        rules=(
            Rule(
                keys=("max_image_size.longest_edge",),
                does=lambda vision: vision.tile_side,
                options=lambda saved: {
                    "tile": saved,
                    # 512 is the tile of SmolVLM's smaller models, whose patches are others too.
                    **({"patch": 16, "shuffle": 4} if saved == 512 else {}),
                },
            ),
            Rule(
                keys=("size.longest_edge",),
                does=lambda vision: vision.longest_side,
                options=lambda saved: {"longest": saved},
            ),
            _option("splitting", "do_image_splitting"),
            _fixed("do_resize", True),
            _fixed("resample", LANCZOS),
        ),
    ),
    SiglipProcessor: Family(
        classes=("SiglipImageProcessor",),
        rules=(
            Rule(
                keys=("size",),
                does=lambda vision: _square(vision.side),
                options=lambda saved: {"side": saved["height"]},
            ),
            Rule(
                keys=("resample",),
                does=lambda vision: BILINEAR if vision.kind == "siglip2" else BICUBIC,
                options=lambda saved: {"kind": "siglip2" if saved == BILINEAR else "siglip"},
            ),
            _fixed("do_resize", True),
        ),
        instead=lambda vision, settings: {"kind": "transformers", "patch": vision.patch},
    ),
}


CLIPS: dict[type, Family] = {
    Qwen2VLProcessor: _qwen(
        PATCH,
        "Qwen2VLVideoProcessor",
        *_qwen_pixels("video_"),
        # By default this one takes the frames that it is given.
        *_qwen_frames(lambda settings: settings.get("do_sample_frames") is True),
    ),
    Qwen3VLProcessor: _qwen(
        QWEN3_PATCH,
        "Qwen3VLVideoProcessor",
        *_qwen_pixels("video_"),
        *_qwen_frames(lambda settings: settings.get("do_sample_frames") is not False),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """What was saved of a family: the file, and its settings."""

    family: Family
    file: Path
    settings: Settings

    def different(self, vision: Vision) -> Iterator["_Difference"]:
        """The rules whose setting is saved with another value than the job's."""
        for rule in self.family.rules:
            saved = ((key, _value(self.settings, key)) for key in rule.keys)
            key, value = next((each for each in saved if each[1] is not None), ("", None))
            ours = rule.does(vision)
            # What is of another type is of a release that is not known here; but 2 is a rate too.
            alike = type(value) is type(ours) or (type(value), type(ours)) == (int, float)
            if alike and value != ours and rule.matters(self.settings):
                yield _Difference(saved=self, rule=rule, key=key, value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """A setting that is saved with another value than the job's, as the file names it."""

    saved: _Saved
    rule: Rule
    key: str
    value: object


def saved_differences(spec: PipelineSpec) -> tuple[str, ...]:
    """One sentence for each setting of the processors beside the job's tokenizer that the job's
    vision processor does otherwise, with the line of the job file that follows it. Nothing where no
    processor is saved, or none that is known here: this never fails a job."""
    tokenizer = Path(spec.tokenizer)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    saved = [
        each
        for families, name in ((PICTURES, "image"), (CLIPS, "video"))
        if (family := families.get(type(spec.vision))) is not None
        if (each := _saved(folder, family, name)) is not None
    ]
    return tuple(_told(spec.vision, saved)) if saved else ()


def _saved(folder: Path, family: Family, name: str) -> _Saved | None:
    """The settings of the `image` or `video` processor that transformers would read in a folder, if
    they are of this family: in the file of the whole processor, or else in its own. Where a folder
    has none for clips, transformers takes the picture's, which no family means: that is none."""
    own = "preprocessor_config.json" if name == "image" else "video_preprocessor_config.json"
    for file in (WHOLE, own):
        try:
            plain = json.loads(read_named(folder / file))
        except (OSError, ValueError, RecursionError):
            continue
        if file == WHOLE and isinstance(plain, dict):
            plain = plain.get(f"{name}_processor")
        if isinstance(plain, dict):
            known = _class(plain, name) in family.classes
            return _Saved(family=family, file=folder / file, settings=plain) if known else None
    return None


def _class(settings: Settings, name: str = "image") -> str:
    """The class that a file names, without its backend."""
    return str(settings.get(f"{name}_processor_type")).removesuffix("Fast").removesuffix("Pil")


def _value(settings: Settings, key: str) -> object:
    """The value of a key, of a nested one behind a dot; None where there is none."""
    value: object = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):  # releases write the sides that a size does not have as null
        return {name: side for name, side in value.items() if side is not None}
    return value


def _told(vision: Vision, saved: Sequence[_Saved]) -> Iterator[str]:
    """A sentence for each difference. One line follows all files, where one does."""
    different = [each for of in saved for each in of.different(vision)]
    followed, options = _followed(vision, different)
    own = {f.name: v for f in fields(vision) if (v := getattr(vision, f.name)) != f.default}
    instead = _instead(vision, [each for each in different if each not in followed])
    line = _line(instead or {"kind": vision.kind, **own, **options})
    for each in different:
        remedy = f"To follow the file, write {line} in the job file."
        if instead is None and each not in followed:
            remedy = (
                "No kind follows the file: write a class of your own, vision: {kind: custom}, or "
                "train the model on what this kind makes."
            )
        yield (
            f"{quoted(str(each.saved.file), 400)} has {each.key}: {_written(each.value)}, and "
            f"vision: {{kind: {vision.kind}}} does as with {_written(each.rule.does(vision))}, so "
            f"that tokens or pixels are not those of the model's own processor. {remedy}"
        )


def _instead(vision: Vision, left: Sequence[_Difference]) -> dict[str, object] | None:
    """The vision section that follows the file of one of these, which no options do."""
    for each in left:
        section = each.saved.family.instead(vision, each.saved.settings)
        if section is not None and section["kind"] == "transformers":
            return {**section, "folder": str(each.saved.file.parent)}
        if section is not None:
            return section
    return None


def _followed(
    vision: Vision, different: Sequence[_Difference]
) -> tuple[list[_Difference], dict[str, object]]:
    """The differences that options of the kind follow, and these options: all together, since one
    limit alone may lie beyond the other."""
    rules = list(different)
    while rules:
        try:
            options = {n: o for each in rules for n, o in each.rule.options(each.value).items()}
            changed = replace(vision, **options)
            kept = [each for each in rules if each.rule.does(changed) == each.value]
        except (SpecError, TypeError, ValueError, KeyError):
            break
        if len(kept) == len(rules):
            return rules, options
        rules = kept
    return [], {}


def _line(section: Mapping[str, object]) -> str:
    inside = ", ".join(f"{name}: {_written(value)}" for name, value in section.items())
    return f"vision: {{{inside}}}"


def _written(value: object) -> str:
    """A value as a job file writes it, on one line."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    return str(value) if plain else cut(json.dumps(value), 400)
