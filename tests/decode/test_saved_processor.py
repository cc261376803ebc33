"""The image processor saved beside a tokenizer is compared with what the job does. Its files are
written by transformers, and transformers judges what a line that follows them makes."""

import json

import numpy as np
import pytest
import yaml
from PIL import Image
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast, image_processing_base
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from dataservice.core.named_files import judged_by
from dataservice.decode.saved_processor import saved_differences
from dataservice.decode.spec import BUILT_IN, PipelineSpec
from tests.decode.files import SPECIALS, train

QWEN = {"shortest_edge": 3136, "longest_edge": 16384 * 784}
LLAVA = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
TILE = {"size": {"height": 448, "width": 448}}
PUBLISHED = {
    "qwen2_vl": Qwen2VLImageProcessorPil(size=QWEN),
    "qwen2_5_vl": Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=16384 * 784),
    "qwen3_vl": Qwen2VLImageProcessorPil(
        size={"shortest_edge": 65536, "longest_edge": 16384 * 1024}, patch_size=16
    ),
    "internvl3": GotOcr2ImageProcessorPil(**TILE, crop_to_patches=False),
    "llava": CLIPImageProcessorPil(**LLAVA),
    "llava1_5": LlavaImageProcessorPil(**LLAVA),
    "llava_next": LlavaNextImageProcessorPil(**LLAVA),
    "gemma3": Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
    "idefics3": Idefics3ImageProcessorPil(),
    "smolvlm": SmolVLMImageProcessorPil(
        size={"longest_edge": 1536}, max_image_size={"longest_edge": 384}
    ),
    "siglip": SiglipImageProcessorPil(size={"height": 384, "width": 384}),
    "siglip2": SiglipImageProcessorPil(size={"height": 384, "width": 384}, resample=2),
}
# By kind: what a folder says otherwise, and the line that follows it.
FOLLOWED = [
    (
        {"kind": "qwen2_5_vl"},
        Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 50176}),
        ["size.longest_edge: 50176"],
        "vision: {kind: qwen2_5_vl, max_pixels: 50176}",
    ),
    (  # neither limit could be written without the other
        {"kind": "qwen3_vl", "video_fps": 1.0},
        Qwen2VLImageProcessorPil(
            size={"shortest_edge": 4096, "longest_edge": 32768}, patch_size=16
        ),
        ["size.longest_edge: 32768", "size.shortest_edge: 4096"],
        "vision: {kind: qwen3_vl, video_fps: 1.0, max_pixels: 32768, min_pixels: 4096}",
    ),
    (
        {"kind": "internvl3"},
        GotOcr2ImageProcessorPil(**TILE, min_patches=2, max_patches=4),
        ["min_patches: 2", "max_patches: 4"],
        "vision: {kind: internvl3, min_tiles: 2, max_tiles: 4}",
    ),
    (
        {"kind": "llava"},
        LlavaImageProcessorPil(**LLAVA, do_pad=True),
        ["do_pad: true"],
        "vision: {kind: llava, aspect: pad}",
    ),
    (
        {"kind": "llava_next"},
        LlavaNextImageProcessorPil(**LLAVA, image_grid_pinpoints=[[672, 336], [336, 1344]]),
        ["image_grid_pinpoints: [[672, 336], [336, 1344]]"],
        "vision: {kind: llava_next, canvases: [[2, 1], [1, 4]]}",
    ),
    (
        {"kind": "idefics3"},
        Idefics3ImageProcessorPil(size={"longest_edge": 728}),
        ["size.longest_edge: 728"],
        "vision: {kind: idefics3, longest: 728}",
    ),
    (
        {"kind": "smolvlm"},
        SmolVLMImageProcessorPil(
            size={"longest_edge": 2048},
            max_image_size={"longest_edge": 512},
            do_image_splitting=False,
        ),
        ["max_image_size.longest_edge: 512", "size.longest_edge: 2048", "splitting: false"],
        "vision: {kind: smolvlm, tile: 512, patch: 16, shuffle: 4, longest: 2048, "
        "splitting: false}",
    ),
    (
        {"kind": "siglip", "patch": 16},
        SiglipImageProcessorPil(size={"height": 224, "width": 224}, resample=2),
        ['size: {"height": 224, "width": 224}', "resample: 2"],
        "vision: {kind: siglip2, patch: 16, side: 224}",
    ),
]
# By kind: what none of its options follows, and what is told instead.
NOT_FOLLOWED = [
    ("llava", CLIPImageProcessorPil(), "transformers, patch: 14"),
    ("llava", CLIPImageProcessorPil(**LLAVA, do_center_crop=False), "transformers, patch: 14"),
    (
        "llava",
        LlavaImageProcessorPil(size={"shortest_edge": 336}, do_pad=True),  # then cropped to 224
        "transformers, patch: 14",
    ),
    ("siglip", SiglipImageProcessorPil(size={"height": 224, "width": 112}), "transformers"),
    (
        "internvl",
        GotOcr2ImageProcessorPil(crop_to_patches=True),
        "transformers, patch: 14, merge: 2",
    ),
    ("internvl", GotOcr2ImageProcessorPil(crop_to_patches=False), "custom"),
    ("llava_next", LlavaNextImageProcessorPil(**{**LLAVA, "size": 224}), "custom"),
    ("llava_next", LlavaNextImageProcessorPil(**LLAVA, image_grid_pinpoints=[[400, 336]]), "cust"),
    ("gemma3", Gemma3ImageProcessorPil(), "custom"),
    ("qwen2_vl", Qwen2VLImageProcessorPil(size=QWEN, merge_size=1), "custom"),
    ("qwen2_vl", Qwen2VLImageProcessorPil(size=QWEN, temporal_patch_size=1), "custom"),
    ("qwen2_vl", Qwen2VLImageProcessorPil(size=QWEN, do_resize=False), "custom"),
    ("qwen2_vl", Qwen2VLImageProcessorPil(size=QWEN, patch_size=16), "qwen3_vl"),
    ("qwen2_vl", Qwen2VLImageProcessorPil(size={**QWEN, "shortest_edge": 9}), "custom"),
]


def spec_of(folder, /, **vision):
    plain = {"tokenizer": str(folder), "vision": vision}
    return TypeAdapter(PipelineSpec).validate_python(plain)


def differences(folder, /, **vision):
    return saved_differences(spec_of(folder, **vision))


def line_of(sentence):
    """The line of the job file that a sentence says to write."""
    return sentence.split("write ")[1].split(" in the job file")[0]


def shape(judge, picture):
    """[tiles, height, width] of a picture; of Qwen-VL's processors the number of patches alone."""
    extra = {"crop_to_patches": True} if isinstance(judge, GotOcr2ImageProcessorPil) else {}
    values = np.asarray(judge(images=picture, return_tensors="np", **extra)["pixel_values"])
    if values.ndim == 2:
        return (len(values),)
    return (int(np.prod(values.shape[:-3])), *values.shape[-2:])


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_folder_as_published_needs_no_word(tmp_path, kind):
    PUBLISHED[kind].save_pretrained(tmp_path)
    assert differences(tmp_path, kind=kind) == ()


@pytest.mark.parametrize(("vision", "judge", "said", "line"), FOLLOWED)
def test_each_setting_that_differs_is_told_with_the_line_that_follows_the_file(
    tmp_path, vision, judge, said, line
):
    judge.save_pretrained(tmp_path)
    told = differences(tmp_path, **vision)
    assert len(told) == len(said)
    for sentence, setting in zip(told, said, strict=True):
        assert f"{tmp_path / 'preprocessor_config.json'}' has " in sentence
        assert setting in sentence
        assert f"vision: {{kind: {vision['kind']}}} does as with" in sentence
        assert line_of(sentence) == line


@pytest.mark.parametrize(("vision", "judge", "said", "line"), FOLLOWED)
def test_a_job_with_that_line_makes_what_transformers_makes(tmp_path, vision, judge, said, line):
    judge.save_pretrained(tmp_path)
    spec = spec_of(tmp_path, **yaml.safe_load(line)["vision"])
    assert saved_differences(spec) == ()
    for width, height in [(640, 480), (333, 900)]:
        plan = spec.vision.plan_image(width=width, height=height)
        made = shape(judge, Image.new("RGB", (width, height)))
        assert made == ((plan.encoder_tokens,) if len(made) == 1 else plan.shape[:3])


@pytest.mark.parametrize(("kind", "judge", "instead"), NOT_FOLLOWED)
def test_what_no_option_follows_is_told_with_what_does(tmp_path, kind, judge, instead):
    judge.save_pretrained(tmp_path)
    told = differences(tmp_path, kind=kind)
    assert told
    assert all(f"vision: {{kind: {instead}" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("kind", "judge"),
    [
        ("llava", CLIPImageProcessorPil()),
        ("siglip", SiglipImageProcessorPil(size={"height": 56, "width": 28})),
        ("internvl", GotOcr2ImageProcessorPil(size={"height": 56, "width": 56})),
    ],
)
def test_where_kind_transformers_is_told_it_makes_what_transformers_makes(tmp_path, kind, judge):
    judge.crop_to_patches = True  # which only InternVL's knows
    judge.save_pretrained(tmp_path)
    line = line_of(differences(tmp_path, kind=kind)[0])
    processor = spec_of(tmp_path, **yaml.safe_load(line)["vision"]).vision.load()
    plan = processor.plan_image(width=300, height=200)
    assert plan.shape[:3] == shape(judge, Image.new("RGB", (300, 200)))


def test_a_limit_that_the_job_gives_is_compared_in_place_of_the_default(tmp_path):
    FOLLOWED[0][1].save_pretrained(tmp_path)
    assert differences(tmp_path, kind="qwen2_vl", max_pixels=50176) == ()
    (told,) = differences(tmp_path, kind="qwen2_vl", max_pixels=100352)
    assert "does as with 100352" in told
    assert line_of(told) == "vision: {kind: qwen2_vl, max_pixels: 50176}"


def test_the_older_names_of_limits_go_before_the_newer_ones(tmp_path):
    plain = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": QWEN, "max_pixels": 50176}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(plain))
    judge = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert judge.size["longest_edge"] == 50176
    (told,) = differences(tmp_path, kind="qwen2_vl")
    assert "max_pixels: 50176" in told


def test_settings_nested_in_the_processor_go_before_a_file_of_their_own(tmp_path):
    PUBLISHED["qwen2_vl"].save_pretrained(tmp_path)
    nested = json.loads((tmp_path / "preprocessor_config.json").read_text())
    nested["size"]["longest_edge"] = 50176
    plain = {"processor_class": "Qwen2VLProcessor", "image_processor": nested}
    (tmp_path / "processor_config.json").write_text(json.dumps(plain))
    read, _ = image_processing_base.ImageProcessingMixin.get_image_processor_dict(str(tmp_path))
    assert read["size"]["longest_edge"] == 50176
    (told,) = differences(tmp_path, kind="qwen2_vl")
    assert f"{tmp_path / 'processor_config.json'}' has size.longest_edge: 50176" in told
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    assert differences(tmp_path, kind="qwen2_vl") == ()


def test_a_whole_processor_is_found_where_transformers_saves_it(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train(SPECIALS))
    images = LlavaImageProcessorPil(**LLAVA, do_pad=True)
    LlavaProcessor(images, tokenizer, patch_size=14).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    (told,) = differences(tmp_path, kind="llava")
    assert f"{tmp_path / 'processor_config.json'}' has do_pad: true" in told
    assert differences(tmp_path / "tokenizer.json", kind="llava") == (told,)


def test_internvls_processor_cuts_whatever_its_image_processor_says():
    assert InternVLProcessor.images_kwargs["crop_to_patches"] is True


@pytest.mark.parametrize(
    "written",
    [
        None,
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"{}",
        b'{"image_processor_type": null}',
        b'{"image_processor_type": ["Qwen2VLImageProcessor"], "size": {"longest_edge": 1}}',
        b'{"image_processor_type": "TheirOwn", "size": {"longest_edge": 1}}',
        b'{"image_processor_type": "Qwen2VLImageProcessor", "unknown": 1, "size": null}',
        b'{"image_processor_type": "Qwen2VLImageProcessor", "size": 448, "patch_size": "14"}',
        b'{"image_processor_type": "Qwen2VLImageProcessor", "size": {"longest_edge": [1]}}',
        b'{"image_processor_type": "Qwen2VLImageProcessor", "size": {"longest_edge": NaN}}',
    ],
)
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_what_cannot_be_read_or_is_not_known_is_passed_over(tmp_path, name, written):
    if written is not None:
        nested = b'{"image_processor": ' + written + b"}" if name.startswith("proc") else written
        (tmp_path / name).write_bytes(nested)
    for kind in BUILT_IN:
        assert differences(tmp_path, kind=kind) == ()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llava_next", {"image_grid_pinpoints": [[[]], "x", 5]}),
        ("llava_next", {"image_grid_pinpoints": []}),
        ("siglip", {"size": {"height": "x"}}),
        ("siglip", {"size": {"shortest_edge": [[1] * 10_000]}}),
        ("qwen2_vl", {"max_pixels": -1, "min_pixels": 10**400}),
        ("idefics3", {"size": {"longest_edge": -5}, "max_image_size": {"longest_edge": 0}}),
        ("internvl", {"max_patches": 10**9}),
    ],
)
def test_nonsense_in_a_file_is_told_in_bounds_and_fails_nothing(tmp_path, kind, settings):
    plain = {**PUBLISHED["internvl3" if kind == "internvl" else kind].to_dict(), **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(plain))
    told = differences(tmp_path, kind=kind)
    assert told
    assert all(len(sentence) < 2000 for sentence in told)


def test_a_file_that_a_service_may_not_read_is_passed_over(tmp_path):
    FOLLOWED[0][1].save_pretrained(tmp_path)
    with judged_by(lambda path: False):
        assert differences(tmp_path, kind="qwen2_vl") == ()


def test_a_job_without_pictures_or_with_a_processor_of_its_own_is_not_compared(tmp_path):
    FOLLOWED[0][1].save_pretrained(tmp_path)
    assert saved_differences(PipelineSpec(tokenizer=str(tmp_path))) == ()
    assert differences(tmp_path, kind="custom", name="mine") == ()
    assert differences(tmp_path, kind="transformers", folder=str(tmp_path), patch=14) == ()


# Processors of clips want torchvision: their files are written here as transformers writes them.
CLIPS = {
    "qwen2_5_vl": {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 128 * 784, "longest_edge": 768 * 784},
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "do_resize": True,
        "do_sample_frames": False, "min_frames": 4, "max_frames": 768, "resample": 3,
    },
    "qwen3_vl": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "do_resize": True,
        "fps": 2, "min_frames": 4, "max_frames": 768, "resample": 3,
    },
}  # fmt: skip


def write_clips(folder, kind, **changes):
    text = json.dumps({**CLIPS[kind], **changes})
    (folder / "video_preprocessor_config.json").write_text(text)


@pytest.mark.parametrize("kind", CLIPS)
def test_a_processor_of_clips_as_published_needs_no_word(tmp_path, kind):
    write_clips(tmp_path, kind)
    assert differences(tmp_path, kind=kind) == ()


@pytest.mark.parametrize("sampled", [{"do_sample_frames": True, "fps": 4}, {"fps": 4}])
def test_settings_of_clips_and_of_pictures_are_followed_by_one_line(tmp_path, sampled):
    FOLLOWED[0][1].save_pretrained(tmp_path)
    size = {"shortest_edge": 50176, "longest_edge": 200704}
    write_clips(tmp_path, "qwen2_5_vl", size=size, **sampled)
    told = differences(tmp_path, kind="qwen2_5_vl")
    more = {"video_fps: 4"} if "do_sample_frames" in sampled else set()
    line = line_of(told[0])
    for name in ("max_pixels: 50176", "video_max_pixels: 200704", "video_min_pixels: 50176", *more):
        assert name in line
    # What takes the frames that it is given says nothing of their rate.
    assert ("video_fps" in line) == bool(more)
    assert {line_of(each) for each in told} == {line}
    assert sum("'" + str(tmp_path / "video_preprocessor_config.json") in each for each in told) == (
        2 + len(more)
    )
    assert differences(tmp_path, **yaml.safe_load(line)["vision"]) == ()


def test_clips_of_other_patches_are_of_the_other_kind(tmp_path):
    write_clips(tmp_path, "qwen3_vl", patch_size=14)
    (told,) = differences(tmp_path, kind="qwen3_vl")
    assert line_of(told) == "vision: {kind: qwen2_5_vl}"


def test_clips_without_a_processor_of_their_own_are_not_judged_by_that_of_pictures(tmp_path):
    plain = {**CLIPS["qwen3_vl"], "image_processor_type": "Qwen2VLImageProcessor"}
    del plain["size"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**plain, "fps": 8}))
    assert differences(tmp_path, kind="qwen3_vl") == ()
    nested = {"video_processor": {**CLIPS["qwen3_vl"], "fps": 8}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    (told,) = differences(tmp_path, kind="qwen3_vl")
    assert "processor_config.json' has fps: 8" in told
    assert line_of(told) == "vision: {kind: qwen3_vl, video_fps: 8}"
